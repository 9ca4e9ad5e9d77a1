# SPDX-License-Identifier: Apache-2.0
"""Whatever the clock did and however often a reader died: later lives hand out the very batches of
earlier ones.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.connectors import DeadLetters, Journal, Json, LateLabels, Live, Memory, Replay
from hotbed.connectors.files import first_line
from hotbed.connectors.messages import decode_messages
from hotbed.data import Batch, Dataset, Dense, Id, Schema, Time
from hotbed.testing import FakeStream

pytestmark = pytest.mark.core
SCHEMA = Schema([Id("row"), Dense("x"), Time("at", unit="s")])


@dataclass(frozen=True)
class Life:
    """What happens to one process: what its clock decides, how often it looks up, what is saved,
    and when it dies.
    """

    takes: tuple[int, ...]
    clock_step: float
    items: int
    checkpoints: frozenset[int]
    prefetch: int
    torn: int


lives = st.lists(
    st.builds(
        Life,
        takes=st.lists(st.integers(0, 12), max_size=12).map(tuple),
        clock_step=st.sampled_from([0.0, 0.3, 5.0]),
        items=st.integers(1, 25),
        checkpoints=st.frozensets(st.integers(0, 25), max_size=5),
        prefetch=st.sampled_from([0, 0, 2]),
        torn=st.integers(0, 40),
    ),
    min_size=1,
    max_size=6,
)


def log(bad: frozenset[int], future: frozenset[int]) -> dict[str, list[Any]]:
    rows = range(100)
    return {
        "row": list(rows),
        "x": [None if row in bad else float(row) for row in rows],
        "at": [10**9 if row in future else row for row in rows],
    }


def run(
    life: Life, stream: FakeStream, folder: Path, flush: float | None, position: Any, ends: bool
) -> Any:
    """The batches of one life and the last position saved in it; the journal is as a crash leaves
    it.
    """
    seconds = [1000.0]

    def clock() -> float:
        seconds[0] += life.clock_step
        return seconds[0]

    journal = Journal(folder / "journal")
    dataset = Dataset(
        stream,
        SCHEMA,
        7,
        on_error="skip",
        prefetch=life.prefetch,
        flush_seconds=flush,
        max_ahead_seconds=10**6,
    )
    dataset.live = Live(
        journal, DeadLetters(folder / "dead.jsonl"), clock=clock, tick_seconds=0.001
    )
    items = dataset.resume(position).stream()
    batches = []
    for number, item in enumerate(items if ends else islice(items, life.items)):
        if isinstance(item, Batch) and item.position is not None:
            batches.append(item)
            if number in life.checkpoints:
                position = json.dumps(item.position.to_json())
                dataset.commit(item.position)
    items.close()
    journal.close()
    with open(folder / "journal", "ab") as file:  # killed while it wrote
        file.write(b'00000000 ["block", 7, {"take": 9}]'[: life.torn])
    return batches, position


@given(
    lives=lives,
    flush=st.sampled_from([None, 0.0, 1.0]),
    bad=st.frozensets(st.integers(0, 99), max_size=6),
    future=st.frozensets(st.integers(0, 99), max_size=6),
)
def test_a_batch_once_handed_out_is_handed_out_again(
    lives: list[Life], flush: float | None, bad: frozenset[int], future: frozenset[int]
) -> None:
    seen: dict[int, list[int]] = {}
    position: Any = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, life in enumerate([*lives, Life((), 0.0, 0, frozenset(), 0, 0)]):
            last = number == len(lives)
            stream = FakeStream(log(bad, future), life.takes, then=5 if last else 0, ends=last)
            batches, position = run(life, stream, Path(folder), flush, position, last)
            for batch in batches:
                rows = batch.ids["row"].values.tolist()
                assert seen.setdefault(batch.position["rows"], rows) == rows
        letters = (
            [json.loads(line) for line in (Path(folder) / "dead.jsonl").read_text().splitlines()]
            if bad | future
            else []
        )
    assert [row for end in sorted(seen) for row in seen[end]] == [
        row for row in range(100) if row not in bad | future
    ]
    assert sorted(letter["place"]["row"] for letter in letters) == sorted(bad | future)


events = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["view", "buy", "cart"]), st.integers(0, 2)),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(events, min_size=1, max_size=3),
    window=st.integers(1, 8),
    at=st.integers(0, 60),
    size=st.integers(1, 9),
    run=st.integers(1, 30),
)
def test_a_replay_goes_on_anywhere_and_its_labels_are_true(
    monkeypatch: pytest.MonkeyPatch, parts: Any, window: int, at: int, size: int, run: int
) -> None:
    sources, everything = [], []
    for number, part in enumerate(parts):
        now, rows = 0, []
        for gap, kind, key in part:
            now += gap
            rows.append((now, kind, key, 1000 * number + len(rows)))
        everything += [(row[0], number, row) for row in rows]
        sources.append(
            Memory(
                {
                    name: [row[i] for row in rows]
                    for i, name in enumerate(("at", "kind", "key", "n"))
                }
            )
            if rows
            else Memory({"at": [0], "kind": ["cart"], "key": [9], "n": [-1]})
        )
    monkeypatch.setattr("hotbed.connectors.merge.READ_ROWS", run)
    late = LateLabels(("key",), "kind", "view", "buy", within_seconds=window)
    replay = Replay(sources, time="at", unit="s", late=late)
    whole = [(row, after) for batch, after in replay.read(None, 1) for row in batch.to_pylist()]
    order = [row for _, _, row in sorted(everything, key=lambda event: event[:2])]
    ends = order[-1][0] if order else 0
    expected = {}
    for place, (time, kind, key, n) in enumerate(order):
        buys = [other[0] for other in order[place + 1 :] if other[1] == "buy" and other[2] == key]
        if kind == "view" and (bought := bool(buys) and buys[0] - time <= window) | (
            ends - time > window
        ):
            expected[n] = float(bought)
    assert {row["n"]: row["label"] for row, _ in whole} == expected
    assert len(whole) == len(expected)
    if whole:
        _, after = whole[at % len(whole)]
        rest = [found for batch, _ in replay.read(after, size) for found in batch.to_pylist()]
        assert rest == [found for found, _ in whole[at % len(whole) + 1 :]]


TEXTS = [
    *['{"a": 1, "b": {"c": 2}}', '{"a": null, "l": []}', '{"f": 3, "s": "x"}', ' {"f": 1.5}\r\n'],
    *[
        '{"a": 1.5}',
        '{"a": "1"}',
        '{"l": [null, 7]}',
        '{"n": null}',
        '{"n": 1}',
        '{"a": 7e2}',
        "{}",
    ],
    *[
        "",
        "3",
        "null",
        "[]",
        '{"a": 1}{"a": 2}',
        '{"a": 1} 2',
        '{"a": 1}\0',
        '{"s": "\n"}',
        "{" * 9,
    ],
    # with the next one, each is as many objects as messages
    *['{"a": 1, "b":', '{}}{"a": 2}', '{"l": [{}', ']}{"a": 1}', '{"s": "', '"}{"a": 3}', "}{"],
]
COLUMNS = pa.schema(
    {
        "a": pa.int64(),
        "f": pa.float64(),
        "s": pa.string(),
        "l": pa.list_(pa.int64()),
        "n": pa.null(),
        "b": pa.struct({"c": pa.int64()}),
    }
)


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=12), st.data())
def test_messages_have_the_rows_and_errors_of_each_alone_however_they_are_cut(
    texts: list[str], data: st.DataObject
) -> None:
    values = [text.encode() for text in texts]
    place = data.draw(st.integers(0, len(values)))
    decoder = Json()
    batches, counts, bad = decode_messages(decoder, values, COLUMNS)
    parts = [decode_messages(decoder, part, COLUMNS) for part in (values[:place], values[place:])]
    alone = [decode_messages(decoder, [value], COLUMNS) for value in values]
    for several in (parts, alone):
        rows = [row for part, _, _ in several for batch in part for row in batch.to_pylist()]
        assert [row for batch in batches for row in batch.to_pylist()] == rows
        assert {batch.schema for part, _, _ in several for batch in part} <= {COLUMNS}
        assert counts == [count for _, part, _ in several for count in part]
    faults = {n: first_line(fault) for n, (_, _, one) in enumerate(alone) for fault in one.values()}
    assert {number: first_line(error) for number, error in bad.items()} == faults
