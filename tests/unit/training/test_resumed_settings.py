# SPDX-License-Identifier: Apache-2.0
"""What may change between two lives of a state: each row of the tables in docs/persist.md is a case.

Run as a program, it writes the tables into the page:

    python tests/unit/training/test_resumed_settings.py
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch", reason="torch absent")


import torch

import hotbed as hb
from hotbed.config import describe
from hotbed.connectors.kafka.topic_source import Timings
from hotbed.connectors.position import Position
from hotbed.connectors.read_plan import JoinWishes, ReadPlan
from hotbed.connectors.status import status_of
from hotbed.embedding.policy import Admission, Eviction
from hotbed.errors import DataError, HotbedError, PersistError
from hotbed.persist.publish.topic import TopicFeed
from hotbed.persist.publish.version import Publisher
from hotbed.persist.state.resume import compare, meaning
from hotbed.prepare import ByFold, Preparation, prepare
from hotbed.testing import FakeStream

PAGE = Path(__file__).parents[3] / "docs" / "persist.md"
BEGIN, END = "<!-- the tables of settings begin -->", "<!-- the tables of settings end -->"
Verdict = Literal["refuses", "takes", "keeps", "warns", "begins anew"]
COUNT = 60
QUIET_SECONDS, LATE_SECONDS = 0.2, 10.0
"""How long a topic yields nothing before a case stops reading: at its end, and where rows are missing.
"""
IDS = range(COUNT)
COLUMNS = {
    "id": [*IDS],
    "at": [1000 + number for number in IDS],
    "back": [COUNT - number for number in IDS],
    "side": [number % 5 for number in IDS],
    "label": [number % 2 for number in IDS],
}


# --- sources: rows of one life and of the next one


@dataclass(frozen=True)
class SourceCase:
    """A source of two lives, and what a resume says of the difference.

    Attributes:
        what: the setting, as the page names it.
        before, after: make the sources from a folder.
        verdict: of the resume.
        says: a part of the error.
        reads: rows of the first life, at least.
        adds: the source of the next life has more rows.
        soak: it takes long.
    """

    what: str
    before: Callable[[Path], Any]
    after: Callable[[Path], Any]
    verdict: Verdict = "refuses"
    says: str = ""
    reads: int = 20
    adds: bool = False
    soak: bool = False


def memory(**more: Any) -> Any:
    return hb.sources.Memory({**COLUMNS, **more})


def written(folder: Path, ending: str) -> Path:
    """A file of the rows; a `.csv` ends its lines so that a semicolon divides, too."""
    folder.mkdir(exist_ok=True)
    file = folder / f"rows{ending}"
    if file.exists():
        return file
    if ending == ".parquet":
        hb.sources.Parquet(file).write(memory())
    elif ending == ".jsonl":
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == ".norm":
        hb.sources.Norm(file, labels=["label"], slots=["id"]).write(memory())
    elif ending == ".raw":
        hb.sources.Raw(file, slots={"id": 1}).write(memory())
    elif ending == ".svm":
        file.write_text("".join(f"{number % 2} {number}:1\n" for number in IDS))
    else:
        lines = [",".join(COLUMNS)]
        lines += [",".join(map(str, row)) for row in zip(*COLUMNS.values(), strict=True)]
        file.write_text("".join(line + "\n" for line in lines))
    return file


def headers(folder: Path) -> Path:
    """A file without rows."""
    file = folder / "headers.csv"
    file.write_text(",".join(COLUMNS) + "\n")
    return file


def csv(**arguments: Any) -> Callable[[Path], Any]:
    return lambda folder: hb.sources.Csv(written(folder, ".csv"), **arguments)


def files(ending: str, kind: Any, **arguments: Any) -> Callable[[Path], Any]:
    return lambda folder: kind(written(folder, ending), **arguments)


def slots(**arguments: Any) -> Callable[[Path], Any]:
    keys = {"id": hb.sources.Keys(10**6)}
    return lambda folder: hb.sources.Generated(**{"rows": COUNT, "slots": keys, **arguments})


def followed(**arguments: Any) -> Callable[[Path], Any]:
    """A folder with the rows in two files, the first one of 40 rows."""

    def make(folder: Path) -> Any:
        incoming = folder / "incoming"
        incoming.mkdir(exist_ok=True)
        header, *lines = written(folder, ".csv").read_text().splitlines(keepends=True)
        for name, part in (("a.csv", lines[:40]), ("b.csv", lines[40:])):
            if not (incoming / name).exists():
                (incoming / name).write_text(header + "".join(part))
        return hb.sources.Follow(incoming, **arguments)

    return make


def prepared(seed: int = 0, **arguments: Any) -> Callable[[Path], Any]:
    """A preparation of the rows with a split; each seed has a folder of its own."""

    def make(folder: Path) -> Any:
        output = folder / f"prepared{seed}"
        if not output.exists():
            schema = hb.Schema([hb.Label("label"), hb.Id("id")])
            source = hb.sources.Csv(str(written(folder, ".csv")))
            split = ByFold(valid=0.5)
            prepare(Preparation(source, schema, output=str(output), split=split, seed=seed))
        return hb.sources.Prepared(str(output), **arguments)

    return make


def replayed(late: Mapping[str, Any] | None = None, **arguments: Any) -> Callable[[Path], Any]:
    """Views, each followed after 5 s by a purchase of every third id."""
    events = [(1000 + number, number, "view") for number in IDS]
    events += [(1005 + number, number, "buy") for number in IDS if number % 3 == 0]
    events.append((2000, 999, "view"))
    events.sort()
    names = ("at", "id", "kind")
    columns: dict[str, Any] = dict(zip(names, map(list, zip(*events, strict=True)), strict=True))
    columns["ms"] = columns["at"]

    def make(folder: Path) -> Any:
        given = {
            "on": ("id",),
            "column": "kind",
            "event": "view",
            "positive": "buy",
            "within_seconds": 10,
        }
        labels = hb.sources.LateLabels(**{**given, **(late or {})})
        settings = {"time": "at", "unit": "s", "late": labels, **arguments}
        return hb.sources.Replay([hb.sources.Memory(columns)], **settings)

    return make


def joined(
    *labels: str,
    within: Mapping[str, float] | None = None,
    where: Mapping[str, Any] | None = None,
    shared: bool = True,
    finite: bool = False,
    **arguments: Any,
) -> Callable[[Path], Any]:
    """Impressions of a second each; clicks after 3 s, purchases after 12 s, in one stream."""

    def stream(columns: Any, then: int, name: str) -> Any:
        if finite:
            return hb.sources.Memory(columns)
        return FakeStream(columns, then=then, ends=True)

    events = [(1003 + number, number, "click") for number in IDS if number % 3 == 0]
    events += [(1012 + number, number, "buy") for number in IDS if number % 4 == 0]
    events.sort()
    actions = {
        "at": [at for at, _, _ in events],
        "id": [number for _, number, _ in events],
        "kind": [kind for _, _, kind in events],
    }

    def make(folder: Path) -> Any:
        # what comes last closes the windows of the others
        shown = {"id": [*IDS, 900], "at": [*COLUMNS["at"], 2000], "key": [*IDS, 900]}
        shown["surface"] = ["home"] * (COUNT + 1)
        last = {"at": [2000], "id": [901], "kind": ["none"]}
        rows = {name: [*actions[name], *last[name]] for name in actions}
        rows["key"] = rows["id"]
        sources = {"clicked": stream(rows, 7, "clicked")}
        sources["bought"] = sources["clicked"] if shared else stream(rows, 11, "bought")
        windows = {"clicked": 10.0, "bought": 30.0, **(within or {})}
        kinds = {"clicked": "click", "bought": "buy"}
        outcomes = {
            name: hb.sources.Outcome(
                sources[name], windows[name], where=(where or {}).get(name, {"kind": kinds[name]})
            )
            for name in labels or ("clicked", "bought")
        }
        given = {"on": "id", "time": "at", "unit": "s", "rule": hb.sources.AsTheyCome()}
        return hb.sources.Join(stream(shown, 9, "shown"), outcomes, **{**given, **arguments})

    return make


@cache
def broker() -> hb.testing.Broker:
    """A broker with the rows in one partition, in two, and other rows; `ended` ends it."""
    running = hb.testing.Broker()
    running.start()
    for name, first in (("rows", 0), ("halves", 0), ("others", 1000)):
        count = 2 if name == "halves" else 1
        running.create(name, count)
        for partition in range(count):
            numbers = [number for number in IDS if number % count == partition]
            values = [json.dumps({"id": first + number}).encode() for number in numbers]
            running.produce(name, values, partition, [1000 + number for number in numbers])
    return running


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """End the broker if a case began it."""
    yield
    if broker.cache_info().currsize:
        broker().kill()
        broker.cache_clear()


def topic(name: str = "rows", host: str = "127.0.0.1", **arguments: Any) -> Callable[[Path], Any]:
    """A topic in blocks of 15 rows."""

    def make(folder: Path) -> Any:
        servers = broker().servers.replace("127.0.0.1", host)
        blocks = {"block_rows": 15, "linger_seconds": 1.0}
        source = hb.sources.Kafka(servers, name, **{**blocks, **arguments})
        object.__setattr__(source, "_timings", Timings(proof=0.3, patience=0.3))
        return source

    return make


def over(inner: Callable[[Path], Any], change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    return lambda folder: change(inner(folder))


SIDE = hb.sources.Memory({"side": range(5), "word": ["a", "b", "c", "d", "e"]})
OTHER = hb.sources.Memory({"side": range(5), "word": ["v", "w", "x", "y", "z"]})


def nested(**arguments: Any) -> Callable[[Path], Any]:
    """Samples of a join that ends as impressions of a stream of purchases."""

    def make(folder: Path) -> Any:
        inner = joined("bought", finite=True, rule=hb.sources.Wait(), **arguments)(folder)
        clicks = {"id": [*range(0, COUNT, 3), 901], "at": [*range(1003, 1003 + COUNT, 3), 3000]}
        stream = FakeStream(clicks, then=7, ends=True)
        return hb.sources.Join(inner, stream, "id", 10, "at", "s", label="clicked")

    return make


NORM = {"labels": ["label"], "slots": ["id"]}
RAW = {"slots": {"id": 1}}
FOLLOWED = followed()
JOINED = joined()
PREPARED = prepared()
TOPIC = topic()
SOURCES: dict[str, list[SourceCase]] = {
    "Sources that end": [
        SourceCase("`Csv`: `header`", csv(), csv(header=False), says="header"),
        SourceCase("`Csv`: `delimiter`", csv(), csv(delimiter=";"), says="delimiter"),
        SourceCase("`Csv`: `quote`", csv(), csv(quote=None), says="quote"),
        SourceCase("`Csv`: `encoding`", csv(), csv(encoding="latin1"), says="encoding"),
        SourceCase("`Csv`: `null_values`", csv(), csv(null_values=["", "1"]), says="null_values"),
        SourceCase("`Csv`: `columns`", csv(), csv(columns={"id": "string"}), says="columns"),
        SourceCase(
            "`Jsonl`: `columns`",
            files(".jsonl", hb.sources.Jsonl),
            files(".jsonl", hb.sources.Jsonl, columns={"id": "float64"}),
            says="columns",
        ),
        SourceCase(
            "`Libsvm`: `binary`",
            files(".svm", hb.sources.Libsvm),
            files(".svm", hb.sources.Libsvm, binary=False),
            says="binary",
        ),
        *(
            SourceCase(
                f"`{kind.__name__}`: `{name}`",
                files(ending, kind, **before),
                files(ending, kind, **{**before, name: value}),
                says=name,
            )
            for ending, kind, before, name, value in (
                (".norm", hb.sources.Norm, NORM, "labels", ["other"]),
                (".norm", hb.sources.Norm, NORM, "slots", ["other"]),
                (".norm", hb.sources.Norm, NORM, "dense", "other"),
                (".norm", hb.sources.Norm, NORM, "key_bits", 64),
                (".norm", hb.sources.Norm, NORM, "checksum", True),
                (".raw", hb.sources.Raw, RAW, "labels", ["other"]),
                (".raw", hb.sources.Raw, RAW, "slots", {"other": 1}),
                (".raw", hb.sources.Raw, RAW, "label_type", "float32"),
                (".raw", hb.sources.Raw, RAW, "dense_type", "float32"),
                (".raw", hb.sources.Raw, RAW, "num_dense", 1),
                (".raw", hb.sources.Raw, RAW, "key_bits", 64),
                (".raw", hb.sources.Raw, RAW, "dense", "other"),
            )
        ),
        SourceCase("the folder of files", csv(), lambda folder: csv()(folder / "moved"), "takes"),
        SourceCase(
            "the file at the position, or its place in the list",
            lambda folder: hb.sources.Csv([written(folder, ".csv"), written(folder, ".txt")]),
            lambda folder: hb.sources.Csv([written(folder, ".txt"), written(folder, ".csv")]),
            says="file 0 was 'rows.csv'",
        ),
        SourceCase(
            "files after those of the position",
            csv(),
            lambda folder: hb.sources.Csv([written(folder, ".csv"), headers(folder)]),
            "takes",
        ),
        SourceCase("`Generated`: `seed`", slots(), slots(seed=1), says="seed"),
        SourceCase(
            "`Generated`: `slots`, `dense`, `labels`, `distribution`",
            slots(),
            slots(distribution=hb.sources.UniformKeys()),
            says="distribution",
        ),
        SourceCase(
            "`Generated`: `rows`, not below the position", slots(), slots(rows=COUNT), "takes"
        ),
        SourceCase(
            "`Sort`: `by`",
            over(csv(), lambda rows: rows.sort("at")),
            over(csv(), lambda rows: rows.sort("back")),
            says="by='at', got by='back'",
        ),
        SourceCase(
            "`Sort` where there was none",
            lambda folder: memory(),
            lambda folder: memory().sort("back"),
            says="by",
        ),
        SourceCase(
            "`Sort`: the rows that are sorted, or how they are read",
            over(csv(), lambda rows: rows.slice(0, 50).sort("at")),
            over(csv(), lambda rows: rows.slice(10, 60).sort("at")),
            says="source.start",
        ),
        SourceCase(
            "`Slice`: `start` and `stop` around the position",
            over(csv(), lambda rows: rows.slice(0, 60)),
            over(csv(), lambda rows: rows.slice(10, 60)),
            "takes",
        ),
        SourceCase(
            "`Slice`: a `start` behind the position, or a `stop` before it",
            over(csv(), lambda rows: rows.slice(0, 60)),
            over(csv(), lambda rows: rows.slice(50, 60)),
            says="lies after row",
        ),
        SourceCase(
            "`TableJoin`: the side table, `on`",
            over(csv(), lambda rows: rows.join(SIDE, on="side")),
            over(csv(), lambda rows: rows.join(OTHER, on="side")),
            "takes",
        ),
        SourceCase(
            "`Concat`: more sources at the end",
            lambda folder: hb.sources.Concat([csv()(folder)]),
            lambda folder: hb.sources.Concat([csv()(folder), memory().slice(0, 0)]),
            "takes",
        ),
        SourceCase(
            "`Concat`: the source at the position",
            lambda folder: hb.sources.Concat([csv()(folder).sort("at"), memory()]),
            lambda folder: hb.sources.Concat([csv()(folder).sort("back"), memory()]),
            says="by",
        ),
        SourceCase("`Prepared`: another preparation", PREPARED, prepared(seed=5), says="digest"),
        SourceCase("`Prepared`: `part`", PREPARED, prepared(part="valid"), says="part"),
        SourceCase("`Replay`: `time`", replayed(), replayed(time="ms"), says="time"),
        SourceCase("`Replay`: `unit`", replayed(), replayed(unit="ms"), says="unit"),
        SourceCase(
            "`Replay`: `speed`, another one", replayed(speed=10**9), replayed(speed=10**8), "takes"
        ),
        SourceCase(
            "`LateLabels`: `within_seconds`",
            replayed(),
            replayed({"within_seconds": 20}),
            says=r"late.within_seconds=10, got late.within_seconds=20",
        ),
        SourceCase(
            "`LateLabels`: `event`, `positive`, `column`, `on`, `label`",
            replayed(),
            replayed({"positive": "other"}),
            says="late.positive",
        ),
    ],
    "Streams": [
        SourceCase("`Follow`: `pattern`", FOLLOWED, followed(pattern="*.csv"), "takes", reads=45),
        SourceCase("`Follow`: `order`", FOLLOWED, followed(order="time"), "takes"),
        SourceCase(
            "`Follow`: `settle_seconds`, `grows`, `replaced`",
            FOLLOWED,
            followed(grows=True, replaced="read", settle_seconds=0.001),
            "takes",
            soak=True,
        ),
        SourceCase(
            "`Follow`: `format`, inside a file",
            FOLLOWED,
            followed(format=hb.sources.Csv("", null_values=["7"])),
            says="format",
        ),
        SourceCase(
            "`Follow`: `format`, between two files",
            FOLLOWED,
            followed(format=hb.sources.Csv("", null_values=["7"])),
            "takes",
            reads=40,
        ),
        SourceCase(
            "`Follow`: the types that `format` declares",
            FOLLOWED,
            followed(format=hb.sources.Csv("", columns={"id": "string"})),
            says="'id' was read as int64, got a declaration as string",
            reads=40,
        ),
        SourceCase(
            "`Kafka`: `servers` of the same topic",
            TOPIC,
            topic(host="localhost"),
            "takes",
            soak=True,
        ),
        SourceCase(
            "`Kafka`: `topic`, another one", TOPIC, topic("others"), says="not the topic", soak=True
        ),
        SourceCase(
            "`Kafka`: `partitions`, fewer",
            topic("halves"),
            topic("halves", partitions=[0]),
            says=r"partitions \[1\] are not",
            soak=True,
        ),
        SourceCase(
            "`Kafka`: `partitions`, more",
            topic("halves", partitions=[0]),
            topic("halves"),
            "takes",
            adds=True,
            soak=True,
        ),
        SourceCase("`Kafka`: `start`", TOPIC, topic(start="latest"), "takes", reads=15),
        SourceCase(
            "`Kafka`: `block_rows`, `linger_seconds`",
            TOPIC,
            topic(block_rows=7, linger_seconds=0.01),
            "takes",
            reads=15,
        ),
        SourceCase(
            "`Kafka`: `group`, `options`",
            TOPIC,
            topic(group="other", options={"client.id": "other"}),
            "takes",
            reads=15,
        ),
        SourceCase(
            "`Kafka`: `decoder`, inside a block",
            TOPIC,
            topic(decoder=hb.sources.Json({"more": "string"})),
            says="decoder",
            soak=True,
        ),
        SourceCase(
            "`Kafka`: `decoder`, between two blocks",
            TOPIC,
            topic(decoder=hb.sources.Json({"more": "string"})),
            "takes",
            reads=15,
        ),
        SourceCase(
            "`Kafka`: `decoder`, with another type of a column that was read",
            TOPIC,
            topic(decoder=hb.sources.Json({"id": "string"})),
            says="'id' was read as int64, got a declaration as string",
            reads=15,
        ),
        SourceCase(
            "`Kafka`: `tombstones`, inside a block",
            TOPIC,
            topic(tombstones="skip"),
            says="tombs",
            soak=True,
        ),
        SourceCase(
            "`Kafka`: `tombstones`, between two blocks",
            TOPIC,
            topic(tombstones="skip"),
            "takes",
            reads=15,
        ),
        SourceCase(
            "`Join`: the order of the labels",
            joined("clicked", "bought"),
            joined("bought", "clicked"),
            "takes",
        ),
        SourceCase(
            "`Join`: the order of the labels, of several topics",
            joined("clicked", "bought", shared=False),
            joined("bought", "clicked", shared=False),
            "takes",
        ),
        SourceCase("`Join`: a label more or less", JOINED, joined("clicked"), says="bought"),
        SourceCase("`Join`: `rule`", JOINED, joined(rule=hb.sources.Wait()), says="rule"),
        SourceCase(
            "`Join`: `within`",
            JOINED,
            joined(within={"clicked": 20}),
            says="outcomes.clicked.within=10.0, got outcomes.clicked.within=20.0",
        ),
        SourceCase(
            "`Join`: `lateness_seconds`", JOINED, joined(lateness_seconds=5), says="lateness"
        ),
        SourceCase("`Join`: `unit`", JOINED, joined(unit="ms"), says="unit='s', got unit='ms'"),
        SourceCase("`Join`: `time`", JOINED, joined(time="key"), says="time"),
        SourceCase("`Join`: `on`", JOINED, joined(on="key"), says="on"),
        SourceCase("`Join`: `where`", JOINED, joined(where={"bought": {}}), says="where"),
        SourceCase(
            "`Join`: which labels share a source", JOINED, joined(shared=False), says="input"
        ),
        SourceCase("`Join`: `idle_seconds`", JOINED, joined(idle_seconds=5), "takes"),
        SourceCase(
            "`Join`: `spill`", JOINED, joined(spill=hb.sources.Spill(memory_bytes=0)), "takes"
        ),
        SourceCase("`Join`: `keeps_unmatched`", JOINED, joined(keeps_unmatched=True), "takes"),
        SourceCase(
            "`Join` of sources that end: the same",
            joined(finite=True),
            joined(finite=True, within={"bought": 20}),
            says="within",
        ),
        SourceCase(
            "`Join` with a `Join` of sources that end as an input: the inner one's",
            nested(),
            nested(within={"bought": 20}),
            says="within",
        ),
    ],
}


def read(
    source: Any, position: Position | None, count: int, saved: Any = None, expected: int = 0
) -> tuple[list[Any], Position | None, Any]:
    """Read rows until there are `count`; return them, the position, and what a join holds there.

    A topic is read until it was quiet behind the last one of `expected` rows.
    """
    live = hb.sources.Live(tick_seconds=0.001)
    plan = ReadPlan(live=live, wishes=JoinWishes(keeps_open=True, saved=saved))
    rows: list[Any] = []
    after = position
    ticks = 0
    since = time.monotonic()
    with contextlib.closing(source.read(position, 4, plan)) as batches:
        for batch, after in batches:  # noqa: B007 - it is returned
            ticks = 0 if batch.num_rows else ticks + 1
            if batch.num_rows:
                rows += batch.to_pylist()
                since = time.monotonic()
            is_over = ticks > 60
            if isinstance(source, hb.sources.Kafka):  # its ticks are those of its client
                patience = QUIET_SECONDS if len(rows) >= expected else LATE_SECONDS
                is_over = status_of(batches).lag == 0 and time.monotonic() - since > patience
            if len(rows) >= count or is_over:
                break
    held = None
    open_rows = status_of(batches).open_rows
    if open_rows is not None and after is not None:
        held = open_rows.saved_at(after.state, None)
    return rows, after, held


def told(rows: Iterable[Mapping[str, Any]]) -> Counter[Any]:
    """What rows say of each id: the labels of a join, else that they came."""
    names = ("clicked", "bought")
    return Counter(
        (json.dumps(row.get("id", row.get("indices"))), *(row.get(name) for name in names))
        for row in rows
    )


@dataclass(frozen=True)
class FirstLife:
    """What a source yielded in one life; `whole`: what it yields without an end of the life."""

    folder: Path
    whole: Counter[Any]
    first: list[Any]
    position: Position
    held: Any

    def goes_on(self, source: Any, more: int = 0) -> Counter[Any]:
        """Return what is told of the rows of both lives; `more`: rows that the source has more."""
        expected = self.whole.total() + more - len(self.first)
        rest, _, _ = read(source, self.position, 10**6, self.held, expected)
        return told([*self.first, *rest])


@pytest.fixture(scope="module")
def first_life(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FirstLife]:
    """Lives of sources, each one lived once: the same source goes on from its position."""
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def live_once(make: Callable[[Path], Any], reads: int) -> FirstLife:
        source = make(folder)
        expected = 0
        if isinstance(source, hb.sources.Kafka):
            expected = COUNT if source.partitions is None else COUNT // 2
        whole, _, _ = read(source, None, 10**6, expected=expected)
        first, position, held = read(make(folder), None, reads)
        assert 0 < len(first) < len(whole)
        assert position is not None
        position = Position.from_json(json.dumps(position.to_json()))
        life = FirstLife(folder, told(whole), first, position, held)
        assert life.goes_on(make(folder)) == life.whole
        if "settings" in position.state:  # positions of older versions hold none
            old = {name: value for name, value in position.state.items() if name != "settings"}
            assert replace(life, position=Position(old)).goes_on(make(folder)) == life.whole
        return life

    return live_once


def cases_of(cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`, by the words of the page."""
    marks = {True: [pytest.mark.soak], False: []}
    return [pytest.param(case, id=case.what, marks=marks[case.soak]) for case in cases]


ALL_SOURCES = [case for cases in SOURCES.values() for case in cases]


@pytest.mark.parametrize("case", cases_of(ALL_SOURCES))
def test_a_source_with_another_setting_goes_on_right_or_is_refused(
    case: SourceCase, first_life: Callable[..., FirstLife]
) -> None:
    life = first_life(case.before, case.reads)
    after = case.after(life.folder)
    if case.verdict == "refuses":
        with pytest.raises(DataError, match=case.says):
            life.goes_on(after)
        return
    whole = life.whole
    if case.adds:
        whole = told(read(case.after(life.folder), None, 10**6, expected=COUNT)[0])
        assert whole > life.whole
    assert life.goes_on(after, whole.total() - life.whole.total()) == whole


# --- sources in a Dataset, which counts rows from the last position of the source


def rows_of(source: Any, position: str | None, batches: int, **arguments: Any) -> tuple[Any, Any]:
    """Read batches of 4 rows of a source; return the ids, and the position after them."""
    names = source.schema().names
    (name, *_) = [name for name in ("id", "indices", names[-1]) if name in names]
    data = hb.Dataset(source, hb.Schema([hb.Id(name)]), 4, prefetch=0, **arguments)
    if position is not None:
        data.resume(position)
    ids = []
    for batch in islice(data, batches):
        ids += batch.ids[name].values.tolist()
    return Counter(ids), json.dumps(data.position.to_json())


PARTS = [memory().slice(0, 40), memory().slice(40, 60)]
IN_FIRST_ROWS = [
    *(case for case in SOURCES["Sources that end"] if "around the position" not in case.what),
    SOURCES["Streams"][-2],
    SourceCase(
        "`Concat`: the source at the position, after another one",
        lambda folder: hb.sources.Concat([PARTS[0], PARTS[1].sort("at")]),
        lambda folder: hb.sources.Concat([PARTS[0], PARTS[1].sort("back")]),
        says="by",
        reads=48,
    ),
    SourceCase(
        "`Slice` to a later `stop`, of other rows",
        over(csv(), lambda rows: rows.sort("at").slice(0, 20)),
        over(csv(), lambda rows: rows.sort("back").slice(0, 40)),
        says="by",
    ),
    SourceCase(
        "fewer rows than before the position",
        over(csv(), lambda rows: rows.slice(0, 60)),
        over(csv(), lambda rows: rows.slice(0, 10)),
        says="has 10 rows fewer",
    ),
]
OF_CACHES = re.compile("Sort|Slice|Concat.*position|Late|fewer")
CACHED = [case for case in IN_FIRST_ROWS if OF_CACHES.search(case.what)]
HOW = [({}, IN_FIRST_ROWS), ({"cache": True}, CACHED), ({"cache": True, "shuffle": 9}, CACHED)]


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        pytest.param(case, arguments, id="-".join([case.what, *arguments]))
        for arguments, cases in HOW
        for case in cases
    ],
)
def test_a_dataset_that_resumes_in_the_first_rows_of_a_source_looks_at_its_settings(
    case: SourceCase, arguments: Mapping[str, Any], tmp_path: Path
) -> None:
    """A source has a position before its first row, too, not only after a piece of its rows."""
    whole, _ = rows_of(case.before(tmp_path), None, 99, **arguments)
    first, position = rows_of(case.before(tmp_path), None, case.reads // 4, **arguments)
    rest, _ = rows_of(case.before(tmp_path), position, 99, **arguments)
    assert first + rest == whole
    after = case.after(tmp_path)
    if case.verdict == "refuses":
        says = "learned twice, or never" if arguments else case.says
        with pytest.raises(DataError, match=says):
            rows_of(after, position, 99, **arguments)
    else:
        rest, _ = rows_of(after, position, 99, **arguments)
        assert first + rest == whole


# --- datasets


@dataclass(frozen=True)
class DatasetCase:
    """Arguments of a Dataset in two lives; `columns`: of a stream, None = of a source that ends."""

    what: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    verdict: Verdict = "takes"
    says: str = ""
    columns: Mapping[str, Any] | None = None


FAR = {**COLUMNS, "at": [*COLUMNS["at"][:-1], 10**10]}
BAD = {**COLUMNS, "label": [None if number == 22 else number % 2 for number in IDS]}
DATASETS = [
    DatasetCase("`batch_size`", {}, {"batch_size": 3}),
    DatasetCase("`prefetch`", {"prefetch": 0}, {"prefetch": 4}),
    DatasetCase("`drop_last`", {}, {"drop_last": True}),
    DatasetCase("`shuffle`", {"shuffle": 16}, {"shuffle": 8}, "refuses", "another order"),
    DatasetCase(
        "`seed` of a shuffle",
        {"shuffle": 16},
        {"shuffle": 16, "seed": 1},
        "refuses",
        "another order",
    ),
    DatasetCase(
        "`cache` of a shuffle", {"shuffle": 16}, {"shuffle": 16, "cache": True}, "refuses", "order"
    ),
    DatasetCase("`cache` without a shuffle", {}, {"cache": True}),
    DatasetCase("`batch_size` of a stream", {}, {"batch_size": 3}, columns=COLUMNS),
    DatasetCase("`flush_seconds`", {}, {"flush_seconds": 0.5}, columns=COLUMNS),
    DatasetCase(
        "`max_ahead_seconds`",
        {"max_ahead_seconds": 3600},
        {"max_ahead_seconds": 7200},
        "refuses",
        "another order",
        FAR,
    ),
    *(
        DatasetCase(
            "`max_ahead_seconds` of a source that ends" + more, before, after, "refuses", "order"
        )
        for more, before, after in (
            ("", {"max_ahead_seconds": 3600}, {"max_ahead_seconds": 7200}),
            (", where there was none", {}, {"max_ahead_seconds": 3600}),
        )
    ),
    DatasetCase('`on_error`, to "skip"', {}, {"on_error": "skip"}, columns=COLUMNS),
    DatasetCase(
        '`on_error`, to "raise", if a row that was skipped lies near the position',
        {"on_error": "skip"},
        {},
        "refuses",
        "label",
        BAD,
    ),
]


def dataset(columns: Mapping[str, Any] | None, **arguments: Any) -> hb.Dataset:
    source: Any = memory()
    if columns is not None:
        source = FakeStream(columns, then=20, ends=True)
    schema = hb.Schema([hb.Label("label"), hb.Time("at", unit="s"), hb.Id("id")])
    return hb.Dataset(source, schema, **{"batch_size": 5, "prefetch": 0, **arguments})


def ids_of(batches: Iterable[Any]) -> list[int]:
    return [number for batch in batches for number in batch.ids["id"].values.tolist()]


@pytest.mark.parametrize("case", DATASETS, ids=lambda case: case.what)
def test_a_dataset_with_another_argument_goes_on_right_or_is_refused(case: DatasetCase) -> None:
    whole = ids_of(dataset(case.columns, **case.before))
    data = dataset(case.columns, **case.before)
    batches = iter(data)
    first = ids_of(next(batches) for _ in range(5))
    text = json.dumps(data.position.to_json())
    del batches
    after = dataset(case.columns, **case.after)
    if case.verdict == "refuses":
        with pytest.raises(HotbedError, match=case.says):
            ids_of(after.resume(text))
    else:
        assert Counter([*first, *ids_of(after.resume(text))]) == Counter(whole)
    assert Counter([*first, *ids_of(dataset(case.columns, **case.before).resume(text))]) == Counter(
        whole
    )


def test_a_position_of_an_older_version_says_nothing_of_events_ahead() -> None:
    data = dataset(COLUMNS)
    first = ids_of([next(iter(data))])
    state = {**data.position.to_json(), "order": {}}
    rest = dataset(COLUMNS, max_ahead_seconds=10**10).resume(state)
    assert sorted([*first, *ids_of(rest)]) == [*IDS]


# --- tables, columns, models: fields that a resume compares before anything changes


@dataclass(frozen=True)
class FieldCase:
    """A table, a schema or a model of two lives."""

    what: str
    before: Any
    after: Any
    verdict: Verdict = "refuses"


def table(**arguments: Any) -> Any:
    return partial(hb.Table, "id", **{"dim": 4, "rule": hb.Adam(lr=0.1), **arguments})


def column(*transforms: Any, **arguments: Any) -> Any:
    return lambda: hb.Schema([hb.Label("label"), hb.Id("id", transforms=transforms, **arguments)])


def dense(transform: Any) -> Any:
    return schema(
        hb.Label("label"),
        hb.Id("id"),
        hb.Dense("price", transforms=[transform, TRANSFORMS.FillMissing(0)]),
    )


def schema(*columns: Any) -> Any:
    return lambda: hb.Schema(columns)


def model(network: Mapping[str, Any] | None = None, loss: Any = "bce", **arguments: Any) -> Any:
    def make() -> hb.RecModel:
        columns = column()()
        tables = hb.make_tables(columns, 4)
        built = hb.models.DNN(columns, tables, **{"hidden": (4,), **(network or {})})
        return hb.RecModel(built, loss, **{"optimizer": "adam", **arguments})

    return make


def own(lookup: Any, rate: float | None = None, **settings: Any) -> Any:
    """A network of the user's own, with an optimizer of its own if `rate` is given."""

    def make() -> hb.RecModel:
        network = torch.nn.Sequential(lookup(), torch.nn.Linear(4, 1))
        if rate is None:
            return hb.RecModel(network, "bce", "adam")
        network.dense = torch.optim.Adam(hb.dense_parameters(network), rate, **settings)
        return hb.RecModel(network)

    return make


def looks_up(max_norm: float | None = None) -> Any:
    return lambda: hb.Embedding(table()(), max_norm=max_norm)


def pools(pooling: str) -> Any:
    return lambda: hb.EmbeddingBag(table()(), pooling)


class Bags(torch.nn.Module):
    """A model of plain torch."""

    def __init__(self, mode: str, padding_idx: int | None) -> None:
        super().__init__()
        self.item = torch.nn.EmbeddingBag(50, 4, mode=mode, padding_idx=padding_idx)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, item: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.item((item % 50).unsqueeze(1))).squeeze(1)
        return scores


def converted(
    mode: str = "sum", padding_idx: int | None = None, unbounded: Iterable[str] = ()
) -> Any:
    def make() -> hb.RecModel:
        plain = Bags(mode, padding_idx)
        optimizer = torch.optim.Adam(plain.parameters())
        network, combined, _ = hb.auto(plain, optimizer, unbounded=list(unbounded))
        return hb.RecModel(network, "bce", combined)

    return make


LOSSES = hb.losses
TRANSFORMS = hb.transforms
FIELDS: dict[str, list[FieldCase]] = {
    "Tables": [
        FieldCase("`dim`", table(), table(dim=8)),
        FieldCase("`rule`, another kind", table(), table(rule=hb.Adagrad(lr=0.1))),
        FieldCase("`rule`: `lr`", table(), table(rule=hb.Adam(lr=0.2)), "takes"),
        FieldCase("`rule`: `eps`", table(), table(rule=hb.Adam(lr=0.1, eps=1e-4)), "takes"),
        FieldCase("`rule`: `beta1`, `beta2`", table(), table(rule=hb.Adam(lr=0.1, beta1=0.5))),
        FieldCase("`rule`: `scope`", table(), table(rule=hb.Adam(lr=0.1, scope="all"))),
        FieldCase(
            "`rule`: `l1`, `l2` of Ftrl",
            table(rule=hb.Ftrl(lr=0.1, l1=0.1)),
            table(rule=hb.Ftrl(lr=0.1, l1=0.2)),
            "takes",
        ),
        FieldCase("`init`", table(), table(init=hb.Zeros())),
        FieldCase("`seed`", table(), table(seed=7)),
        FieldCase("`dtype`", table(), table(dtype="bfloat16")),
        FieldCase("`capacity`", table(), table(capacity=1000), "takes"),
        FieldCase("`tier`", table(), table(tier=hb.Ssd("/tmp", ram_rows=10)), "takes"),
        FieldCase("`evict`, and its counts", table(), table(evict=hb.Lru(2048)), "takes"),
        FieldCase(
            "`evict`: `Lru` or `Lfu`", table(evict=hb.Lru(2048)), table(evict=hb.Lfu(2048)), "takes"
        ),
        FieldCase(
            "`evict`: seconds of `Ttl`",
            table(evict=hb.Ttl(seconds=10)),
            table(evict=hb.Ttl(seconds=20)),
            "takes",
        ),
        FieldCase("`admit`, another kind", table(), table(admit=hb.MinCount(2))),
        FieldCase(
            "`admit`: the count of `MinCount`",
            table(admit=hb.MinCount(2)),
            table(admit=hb.MinCount(3)),
            "takes",
        ),
        FieldCase(
            "`admit`: `probability` of `Probability`",
            table(admit=hb.Probability(0.5)),
            table(admit=hb.Probability(0.25)),
            "takes",
        ),
        FieldCase(
            "`admit`: `sketch_bytes`",
            table(admit=hb.MinCount(2, sketch_bytes=1 << 20)),
            table(admit=hb.MinCount(2, sketch_bytes=1 << 21)),
        ),
    ],
    "Columns and transforms": [
        FieldCase("the raw column of a feature", column(), column(column="user")),
        FieldCase("its table", column(), column(table="shared")),
        FieldCase("`pooling`", column(), column(pooling="mean")),
        FieldCase("`Hash`: `bins`", column(TRANSFORMS.Hash(10)), column(TRANSFORMS.Hash(20))),
        FieldCase(
            "`Hash`: `seed`", column(TRANSFORMS.Hash(10)), column(TRANSFORMS.Hash(10, seed=1))
        ),
        FieldCase("`Map`: its words", column(TRANSFORMS.Map(["a"])), column(TRANSFORMS.Map(["b"]))),
        FieldCase(
            "`Bucketize`: its boundaries",
            column(TRANSFORMS.Bucketize([1.0])),
            column(TRANSFORMS.Bucketize([2.0])),
        ),
        *(
            FieldCase(f"`{type(before).__name__}`: {names}", column(before), column(after))
            for names, before, after in (
                (
                    "`with_`, `bins`, `seed`",
                    TRANSFORMS.Cross(["a"], 10),
                    TRANSFORMS.Cross(["b"], 10),
                ),
                ("`sql`", TRANSFORMS.Expression("a + 1"), TRANSFORMS.Expression("a + 2")),
                ("`pattern`, `number`", TRANSFORMS.Extract("a(.)"), TRANSFORMS.Extract("b(.)")),
                ("`value`", TRANSFORMS.FillMissing(1), TRANSFORMS.FillMissing(2)),
                ("`by`", TRANSFORMS.Shift(1), TRANSFORMS.Shift(2)),
                ("`delimiter`", TRANSFORMS.Split("|"), TRANSFORMS.Split(",")),
                ("`part`, `unit`, `zone`", TRANSFORMS.TimeOfDay(), TRANSFORMS.TimeOfDay("weekday")),
            )
        ),
        *(
            FieldCase(f"`{type(before).__name__}`: {names}", dense(before), dense(after))
            for names, before, after in (
                ("`low`, `high`", TRANSFORMS.Clip(0, 1), TRANSFORMS.Clip(0, 2)),
                ("`offset`", TRANSFORMS.Log(), TRANSFORMS.Log(2.0)),
                ("`mean`, `std`", TRANSFORMS.Normalize(0.0, 1.0), TRANSFORMS.Normalize(1.0, 1.0)),
                ("`column`, `statistic`", TRANSFORMS.JoinGroupby("a"), TRANSFORMS.JoinGroupby("b")),
                (
                    "`label`, `folds`, `smooth`",
                    TRANSFORMS.TargetEncode("label", smooth=1.0),
                    TRANSFORMS.TargetEncode("label", smooth=2.0),
                ),
            )
        ),
        FieldCase("a transform more or less", column(), column(TRANSFORMS.Hash(10))),
        FieldCase(
            "`Label`: `threshold`",
            schema(hb.Label("label", threshold=1), hb.Id("id")),
            schema(hb.Label("label", threshold=2), hb.Id("id")),
        ),
        FieldCase(
            "`Time`: `unit`",
            schema(hb.Time("at", unit="s"), hb.Id("id")),
            schema(hb.Time("at", unit="ms"), hb.Id("id")),
        ),
        FieldCase(
            "the order of ids", schema(hb.Id("a"), hb.Id("b")), schema(hb.Id("b"), hb.Id("a"))
        ),
    ],
    "Models and losses": [
        FieldCase("the network's arguments", model(), model({"hidden": (8,)})),
        FieldCase("`dropout`", model(), model({"dropout": 0.5}), "takes"),
        FieldCase("the loss, another kind", model(), model(loss=hb.losses.MSE())),
        *(
            FieldCase(
                f"`{type(before).__name__}`: {names}",
                model(loss=before),
                model(loss=after),
                "takes",
            )
            for names, before, after in (
                ("`pos_weight`, `label_smoothing`", LOSSES.BCE(), LOSSES.BCE(pos_weight=2.0)),
                ("`gamma`", LOSSES.Focal(1.0), LOSSES.Focal(2.0)),
                ("`temperature`", LOSSES.Softmax(1.0), LOSSES.Softmax(2.0)),
                (
                    "`weights`, arguments of its losses",
                    LOSSES.MultiTask({"label": LOSSES.BCE()}, {"label": 1.0}),
                    LOSSES.MultiTask({"label": LOSSES.BCE()}, {"label": 2.0}),
                ),
            )
        ),
        FieldCase(
            "`MultiTask`: the loss of a label, another kind",
            model(loss=LOSSES.MultiTask({"label": LOSSES.BCE()})),
            model(loss=LOSSES.MultiTask({"label": LOSSES.MSE()})),
        ),
        FieldCase("`grains`", model(), model(grains=2)),
        FieldCase("`average`", model(average=0.9), model(average=0.99), "takes"),
        FieldCase("metrics", model(), model(metrics={"auc"}), "takes"),
        FieldCase("the dense optimizer: `lr`", model(optimizer=hb.Adam(lr=0.1)), model(), "takes"),
        FieldCase(
            "an optimizer that a network holds: `lr`",
            own(looks_up(), 0.1),
            own(looks_up(), 0.2),
            "takes",
        ),
        FieldCase(
            "an optimizer that a network holds: its other settings",
            own(looks_up(), 0.1),
            own(looks_up(), 0.1, eps=1e-4),
            "keeps",
        ),
        FieldCase(
            "`Embedding` in a network of yours: `max_norm`",
            own(looks_up(0.5)),
            own(looks_up(0.1)),
            "takes",
        ),
        FieldCase(
            "`EmbeddingBag` in a network of yours: `pooling`", own(pools("sum")), own(pools("mean"))
        ),
        *(
            FieldCase(f"a model of `hb.auto`: {what}", converted(**before), converted(**after))
            for what, before, after in (
                ("the `mode` of a bag", {}, {"mode": "mean"}),
                ("`padding_idx`", {}, {"padding_idx": 3}),
                ("`unbounded`", {}, {"unbounded": ["item"]}),
                ("`unbounded` no more", {"unbounded": ["item"]}, {}),
            )
        ),
    ],
}
MACHINE = {"machine.torch": "2.6", "machine.torch_threads": 1}


def meaning_of(make: Any) -> dict[str, Any]:
    value = make()
    if isinstance(value, hb.Table):
        return meaning({"id": describe(value.config)}, None, None)
    if isinstance(value, hb.Schema):
        return meaning({}, value.to_json(), None)
    return meaning({}, None, value.state().model)


@pytest.mark.parametrize(
    "case", [case for cases in FIELDS.values() for case in cases], ids=lambda case: case.what
)
def test_a_field_that_changes_is_taken_or_refused(
    case: FieldCase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    before, after = meaning_of(case.before), meaning_of(case.after)
    assert before != after
    if case.verdict == "refuses":
        with pytest.raises(PersistError, match="in the checkpoint"):
            compare("state", before, after)
        return
    compare("state", before, after)
    assert ("stays" if case.verdict == "keeps" else "resumed with") in caplog.text


def test_rates_of_several_groups_stay_and_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_rate(rate: float) -> hb.RecModel:
        network = torch.nn.Sequential(looks_up()(), torch.nn.Linear(4, 1))
        weight, bias = network[1].parameters()
        groups = [{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": rate}]
        return hb.RecModel(network, "bce", torch.optim.SGD(groups))

    with_rate(0.2).save(tmp_path)
    caplog.set_level(logging.INFO, "hotbed")
    resumed = with_rate(0.3).restore(tmp_path)
    assert "lr of group 1 stays 0.2, received 0.3" in caplog.text
    assert [group["lr"] for group in resumed.learner.dense.param_groups] == [0.1, 0.2]


def test_another_machine_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    compare("state", MACHINE, {**MACHINE, "machine.torch_threads": 2})
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# --- callbacks and publishers


@dataclass(frozen=True)
class CallbackCase:
    """Callbacks of two lives, made from a folder; `says`: a part of the log of the second one."""

    what: str
    before: Callable[[Path], list[Any]]
    after: Callable[[Path], list[Any]]
    verdict: Verdict = "takes"
    says: str = ""
    soak: bool = False


def callbacks(*made: Callable[[], Any], **checkpoint: Any) -> Callable[[Path], list[Any]]:
    def make(folder: Path) -> list[Any]:
        saves = {"every_steps": 2, "wait": True, **checkpoint}
        return [*(one() for one in made), hb.callbacks.Checkpoint(folder / "states", **saves)]

    return make


def publishing(name: str, **arguments: Any) -> Callable[[Path], list[Any]]:
    def make(folder: Path) -> list[Any]:
        publisher = hb.PublishDirectory(folder / name, **arguments)
        return callbacks(publish=publisher)(folder)

    return make


def publishing_topic(name: str) -> Callable[[Path], list[Any]]:
    def make(folder: Path) -> list[Any]:
        with contextlib.suppress(Exception):  # an earlier life made it
            broker().create(name)
        return callbacks(publish=hb.PublishTopic(broker().servers, name))(folder)

    return make


def cosine(steps: int) -> Callable[[], Any]:
    rate = torch.optim.lr_scheduler.CosineAnnealingLR
    return lambda: hb.callbacks.LearningRate(partial(rate, T_max=steps))


def exponential() -> Any:
    rate = torch.optim.lr_scheduler.ExponentialLR
    return hb.callbacks.LearningRate(partial(rate, gamma=0.9))


C = hb.callbacks
EVICTED = callbacks(partial(C.Evict, step_interval=2))
EVICTED_BY_TIME = callbacks(partial(C.Evict, seconds_interval=3))
STOPPED = callbacks(partial(C.EarlyStopping, "auc"))
COSINE = callbacks(cosine(10))
WINDOWS = callbacks(partial(C.Windows, samples=10))
PUBLISHED = publishing("published")
CALLBACKS = [
    CallbackCase(
        "`Checkpoint`: `every_steps`, `every_seconds`, `full_every`, `keep`, `wait`",
        callbacks(),
        callbacks(every_steps=3, every_seconds=60, full_every=1, keep=5, wait=False),
    ),
    CallbackCase(
        "`Evict`: `step_interval`, `seconds_interval`, `lateness_seconds`",
        EVICTED,
        callbacks(partial(C.Evict, seconds_interval=3, lateness_seconds=1)),
    ),
    CallbackCase(
        "`Evict`: `clock`",
        EVICTED_BY_TIME,
        callbacks(partial(C.Evict, seconds_interval=3, clock="wall")),
    ),
    *(
        CallbackCase(
            f"`{kind.__name__}`: `metric`, `mode`",
            callbacks(partial(kind, "auc")),
            callbacks(partial(kind, "loss")),
            "begins anew",
            f"{kind.__name__}: judged",
        )
        for kind in (C.EarlyStopping, C.BestWeights, C.ReducePlateau)
    ),
    CallbackCase(
        "`EarlyStopping`, `ReducePlateau`: `patience`, `min_delta`, `factor`",
        STOPPED,
        callbacks(partial(C.EarlyStopping, "auc", patience=5, min_delta=0.1)),
    ),
    CallbackCase(
        "`LearningRate`: a schedule of `hb.optim.schedule`",
        callbacks(partial(C.LearningRate, hb.optim.schedule.Warmup(10))),
        callbacks(partial(C.LearningRate, hb.optim.schedule.Warmup(20))),
    ),
    CallbackCase(
        "`LearningRate`: arguments of a scheduler of torch",
        COSINE,
        callbacks(cosine(20)),
        "keeps",
        "LearningRate: ",
    ),
    CallbackCase(
        "`LearningRate`: another kind of scheduler",
        COSINE,
        callbacks(exponential),
        "begins anew",
        "another kind of schedule begins at step 4",
    ),
    CallbackCase(
        "`Windows`: `seconds`, `samples`, `metrics`: the open window",
        callbacks(partial(C.Windows, samples=1000)),
        callbacks(partial(C.Windows, seconds=10, metrics=("auc",))),
        "begins anew",
        "Windows: a window begins anew",
    ),
    CallbackCase("`Windows`: `most`", WINDOWS, callbacks(partial(C.Windows, samples=10, most=4))),
    CallbackCase(
        "`History`: `every_steps`",
        callbacks(partial(C.History)),
        callbacks(partial(C.History, every_steps=3)),
    ),
    CallbackCase(
        "a callback more or less",
        EVICTED,
        callbacks(partial(C.Windows, samples=10)),
        says="run.callbacks was",
    ),
    CallbackCase(
        "`PublishDirectory`: `path`, or a publisher where there was none: a full comes first",
        PUBLISHED,
        publishing("other"),
    ),
    CallbackCase(
        "`PublishDirectory`: `keep`", PUBLISHED, publishing("published", keep=5), soak=True
    ),
    CallbackCase("no publisher any more", PUBLISHED, callbacks(), soak=True),
    CallbackCase(
        "`PublishTopic`: `servers`, `topic`: a full comes first",
        publishing_topic("versions"),
        publishing_topic("versions-elsewhere"),
        soak=True,
    ),
    CallbackCase(
        "`ClipGradients`: `max_norm`",
        callbacks(partial(C.ClipGradients, 1.0)),
        callbacks(partial(C.ClipGradients, 2.0)),
        soak=True,
    ),
]


class Learned:
    """The ids that a run learns."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Any) -> None:
        self.ids += ids_of([run.example.batch])


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Path, list[int]]]:
    """Runs of some steps in one folder, each one run once: their folder, and the ids they learned."""
    folder = tmp_path_factory.mktemp("runs") / "run"

    @cache
    def run_once(make: Callable[[Path], list[Any]]) -> tuple[Path, list[int]]:
        shutil.rmtree(folder, ignore_errors=True)
        learned = Learned()
        live(learned, make(folder), 4)
        kept = tmp_path_factory.mktemp("kept") / "run"
        shutil.copytree(folder, kept)
        return kept, learned.ids

    def restored(make: Callable[[Path], list[Any]]) -> tuple[Path, list[int]]:
        kept, ids = run_once(make)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)
        return folder, ids

    return restored


def live(learned: Learned, given: list[Any], steps: int | None) -> None:
    torch.manual_seed(0)
    data = dataset(None)
    network = hb.models.LR(data.schema, hb.make_tables(data.schema, 1))
    recommender = hb.RecModel(network, "bce", "adam", {"auc"})
    recommender.online_train(data, [learned, *given], max_steps=steps, progress=False)


@pytest.mark.parametrize("case", cases_of(CALLBACKS))
def test_a_run_with_other_callbacks_learns_each_row_once(
    case: CallbackCase,
    first_run: Callable[[Any], tuple[Path, list[int]]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a graph takes seconds
    monkeypatch.setattr("hotbed.training.publishing.versions._graph", lambda run: None)
    folder, ids = first_run(case.before)
    learned = Learned()
    caplog.set_level(logging.INFO, "hotbed")
    caplog.clear()
    live(learned, case.after(folder), None)
    assert sorted([*ids, *learned.ids]) == [*IDS]
    assert case.says in caplog.text
    if "publisher where" in case.what:
        published = hb.checkpoints.open_checkpoint(folder / "other")
        assert published.links[0].manifest.kind == "full"
    if "PublishTopic" in case.what:  # a follower begins with a full
        feed = TopicFeed(broker().servers, "versions-elsewhere", folder / "followed")
        assert list(hb.Follower(feed).poll())


# --- the page


def tables() -> str:
    """The tables as the page has them."""
    rows: dict[str, list[tuple[str, Verdict]]] = {}
    for title, sources in SOURCES.items():
        rows[title] = [(case.what, case.verdict) for case in sources]
    rows["Dataset"] = [(case.what, case.verdict) for case in DATASETS]
    for title, fields in FIELDS.items():
        rows[title] = [(case.what, case.verdict) for case in fields]
    rows["The machine"] = [("torch's version and threads, the instruction set", "warns")]
    rows["Callbacks and publishers"] = [(case.what, case.verdict) for case in CALLBACKS]
    lines: list[str] = []
    for title, cases in rows.items():
        lines += ["", f"**{title}**", "", "| changed | a resume |", "|---|---|"]
        lines += [f"| {what} | {verdict} |" for what, verdict in cases]
    return "\n".join([BEGIN, *lines, "", END])


WITHOUT_ROWS = {
    "Baselines": "shows, beside a model that it does not change",
    "BySegment": "shows, beside a model that it does not change",
    "Memory": "its rows are its only argument",
    "Parquet": "its files are its only argument",
    "RequestLog": "reads as `Follow`, `Parquet` or `Kafka`, whose settings have rows",
    "CrossEntropy": "has no arguments",
    "InBatchSoftmax": "has no arguments",
    "MSE": "has no arguments",
    "Pairwise": "has no arguments",
    "ProgressBar": "shows, and keeps nothing for a resume",
    "Prometheus": "shows, and keeps nothing for a resume",
    "StatusFile": "shows, and keeps nothing for a resume",
    "TensorBoard": "shows, and keeps nothing for a resume",
    "Validate": "for a fit, whose results it shows; what judges them has a row",
}
"""Public names that take no setting to a resume, with the reason."""


def test_each_public_part_has_a_row_or_a_reason() -> None:
    bases = (hb.sources.Source, TRANSFORMS.Transform, LOSSES.Loss, Admission, Eviction, Publisher)
    modules = (hb, hb.sources, TRANSFORMS, LOSSES)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    parts = {name for name, value in public.items() if isinstance(value, type)}
    parts = {name for name in parts if issubclass(public[name], bases)}
    parts = {name for name in parts if not inspect.isabstract(public[name])}
    parts |= {"MultiTask", *C.__all__}
    named = set(re.findall(r"`(\w+)`", tables()))
    assert sorted(parts - named - set(WITHOUT_ROWS)) == []
    assert sorted(set(WITHOUT_ROWS) - parts) == []


def page() -> str:
    """The page with the tables of today."""
    text = PAGE.read_text()
    first, last = text.index(BEGIN), text.index(END) + len(END)
    return text[:first] + tables() + text[last:]


def test_the_page_has_the_tables_of_these_cases() -> None:
    assert PAGE.read_text() == page(), f"run: python {Path(__file__).relative_to(PAGE.parents[1])}"


if __name__ == "__main__":
    PAGE.write_text(page())
