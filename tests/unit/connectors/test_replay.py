# SPDX-License-Identifier: Apache-2.0
"""Replay: events of several sources in the order of time; labels that come late, each at the moment
it is known.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hotbed import config
from hotbed.connectors import (
    Csv,
    LateLabels,
    Live,
    Memory,
    Position,
    ReadPlan,
    Replay,
    Skips,
    Source,
    merge,
)
from hotbed.data import Batch, Dataset, Id, Label, Schema, Time
from hotbed.errors import ConfigError, DecodeError, SchemaError
from hotbed.testing import FakeStream

pytestmark = pytest.mark.core
LATE = LateLabels(
    on=("user", "item"), column="kind", event="view", positive="buy", within_seconds=10
)


def events(*rows: tuple[int, str, int, int]) -> Memory:
    """(seconds, kind, user, item)."""
    names = ("at", "kind", "user", "item")
    return Memory({name: [row[i] for row in rows] for i, name in enumerate(names)})


def read(
    source: Source, position: Any = None, rows: int = 3
) -> list[tuple[dict[str, Any], Position]]:
    """Every row with the position after it (batches of one row)."""
    start = None if position is None else Position.from_json(position)
    found = []
    for batch, after in source.read(start, rows):
        found += [(row, after) for row in batch.to_pylist()]
    return found


def test_events_of_several_sources_come_by_time_and_ties_by_source() -> None:
    first = Memory({"at": [1, 3, 3, 9], "from": ["a1", "a3", "a3'", "a9"], "x": [1, 2, 3, 4]})
    second = Memory({"at": [0, 3, 4], "from": ["b0", "b3", "b4"]})
    empty = Memory({"at": [5], "from": ["c5"]}).slice(0, 0)
    merged = Replay([first, second, empty], time="at", unit="s")
    assert [row["from"] for row, _ in read(merged)] == ["b0", "a1", "a3", "a3'", "b3", "b4", "a9"]
    assert [row["x"] for row, _ in read(merged)] == [None, 1, 2, 3, None, None, 4]
    assert merged.schema().names == ["at", "from", "x"]


def test_ties_come_by_source_also_where_a_source_shows_them_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merge, "READ_ROWS", 3)
    first = Memory({"at": [1] * 10 + [2], "n": [*range(10), 99]})
    second = Memory({"at": [1] * 9, "n": list(range(100, 109))})
    assert [row["n"] for row, _ in read(Replay([first, second], time="at"))] == [
        *range(10),
        *range(100, 109),
        99,
    ]


def test_a_source_that_is_not_in_order_keeps_its_own_order() -> None:
    merged = Replay(
        [Memory({"at": [5, 1, 6], "n": [1, 2, 3]}), Memory({"at": [2, 5, 7], "n": [10, 11, 12]})],
        time="at",
    )
    assert [row["n"] for row, _ in read(merged)] == [10, 1, 2, 11, 3, 12]


@pytest.fixture(params=[23, 65_536])
def run_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a replay has of a source at a time: no result may depend on it."""
    monkeypatch.setattr(merge, "READ_ROWS", request.param)


@pytest.mark.parametrize("late", [None, LATE])
def test_reading_goes_on_after_any_row_with_any_batch_size(
    late: LateLabels | None, run_rows: None
) -> None:
    kinds, table = ("view", "view", "buy", "other"), []
    for i in range(400):
        table.append((i // 3 + (7 * i) % 5, kinds[(i * i + i // 7) % 4], i % 5, i % 3))
    parts = [events(*table[start::3]) for start in range(3)]
    source = Replay(parts, time="at", unit="s", late=late)
    whole = read(source, rows=1)
    assert len(whole) > 150
    assert [row for row, _ in read(source, rows=1000)] == [row for row, _ in whole]
    for number in range(0, len(whole), 7):
        text = json.dumps(whole[number][1].to_json())
        rest = read(source, text, rows=1 if number % 2 else 17)
        assert [row for row, _ in rest] == [row for row, _ in whole[number + 1 :]], number
        if number % 2 and rest:
            assert [after for _, after in rest][-1] == whole[-1][1]


def test_a_label_comes_with_the_purchase_or_when_its_window_has_passed() -> None:
    source = events(
        (0, "view", 1, 1),
        (1, "view", 1, 2),
        (2, "view", 2, 1),
        (3, "buy", 1, 2),
        (10, "buy", 1, 1),
        (12, "view", 3, 3),
        (13, "buy", 2, 1),
        (30, "buy", 3, 3),
        (31, "view", 4, 4),
    )
    found = [
        (row["at"], row["label"])
        for row, _ in read(Replay([source], time="at", unit="s", late=LATE))
    ]
    # The view of 0 is bought at the last moment, that of 2 a second too late, that of 31 has no
    # known label.
    assert found == [(1, 1.0), (0, 1.0), (2, 0.0), (12, 0.0)]


def test_every_view_before_a_purchase_is_positive_and_views_after_it_are_not() -> None:
    source = events(
        (0, "view", 1, 1),
        (1, "view", 1, 1),
        (2, "buy", 1, 1),
        (2, "view", 1, 1),
        (3, "cart", 1, 1),
        (20, "end", 0, 0),
    )
    found = [
        (row["at"], row["label"])
        for row, _ in read(Replay([source], time="at", unit="s", late=LATE))
    ]
    assert found == [(0, 1.0), (1, 1.0), (2, 0.0)]


def by_hand(rows: list[dict[str, str]], window: int) -> list[tuple[str, str, str, float]]:
    """The same join, event by event."""
    queue: deque[dict[str, Any]] = deque()
    views: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    out = []
    for row in rows:
        key = row["user_id"], row["product_id"]
        now = dt.datetime.fromisoformat(row["event_time"].replace(" UTC", "+00:00")).timestamp()
        while queue and now - queue[0]["now"] > window:
            view = queue.popleft()
            if not view["known"]:
                out.append((view["event_time"], view["user_id"], view["product_id"], 0.0))
                view["known"] = True
        if row["event_type"] == "view":
            view = {**row, "now": now, "known": False}
            queue.append(view)
            views[key].append(view)
        if row["event_type"] == "purchase":
            for view in views[key]:
                if not view["known"]:
                    out.append((view["event_time"], view["user_id"], view["product_id"], 1.0))
                    view["known"] = True
    return out


def test_real_shop_events_get_the_labels_that_a_slow_join_gives(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "READ_ROWS", 3000)
    file = shared_data / "rees46" / "2019-Oct.head.csv"
    late = LateLabels(
        ("user_id", "product_id"), "event_type", "view", "purchase", within_seconds=300
    )
    source = Replay([Csv(file)], time="event_time", unit="iso", late=late)
    with open(file) as text:
        expected = by_hand(list(csv.DictReader(text)), 300)
    whole = read(source, rows=500)
    columns = ("event_time", "user_id", "product_id")
    assert [(*(str(row[c]) for c in columns), row["label"]) for row, _ in whole] == expected
    assert 100 < sum(row["label"] for row, _ in whole) < 400
    assert len(whole) > 12_000
    for number in range(250, len(whole), 3000):
        after = whole[number][1]
        last = max(i for i, (_, p) in enumerate(whole) if p == after)
        assert [row for row, _ in read(source, after.to_json(), 700)] == [
            row for row, _ in whole[last + 1 :]
        ]


def test_a_dataset_of_real_shop_events_resumes_at_any_batch(shared_data: Path) -> None:
    late = LateLabels(
        ("user_id", "product_id"), "event_type", "view", "purchase", within_seconds=300
    )
    source = Replay(
        [Csv(shared_data / "rees46" / "2019-Oct.head.csv")],
        time="event_time",
        unit="iso",
        late=late,
    )
    schema = Schema(
        [
            Label("label"),
            Time("event_time", unit="iso"),
            Id("user_id"),
            Id("product_id"),
            Id("brand"),
        ]
    )
    batches = list(Dataset(source, schema, 500))
    for number in (0, 5, len(batches) - 2):
        rest = list(Dataset(source, schema, 500).resume(batches[number].position or {}))
        assert [b.ids["user_id"].values.tolist() for b in rest] == [
            b.ids["user_id"].values.tolist() for b in batches[number + 1 :]
        ]


class Clock:
    """Seconds that pass with each look."""

    def __init__(self, step: float) -> None:
        self.seconds, self.step = 0.0, step

    def __call__(self) -> float:
        self.seconds += self.step
        return self.seconds


def test_a_speed_lets_events_pass_as_their_times_do_with_ticks_between() -> None:
    source = Replay(
        [Memory({"at": [0, 10, 20, 30, 600], "n": [0, 1, 2, 3, 4]})], time="at", unit="s", speed=60
    )
    live = Live(tick_seconds=0.0, clock=Clock(0.1))  # six seconds of data at each look
    seen: list[Any] = []
    for batch, position in source.read(None, 100, ReadPlan(live=live)):
        seen.append(batch.column("n").to_pylist() if batch.num_rows else None)
        assert (
            batch.num_rows == 0 or position["now"] == batch.column("at").to_pylist()[-1] * 1_000_000
        )
    assert [row for rows in seen if rows for row in rows] == [0, 1, 2, 3, 4]
    assert seen.count(None) > 40
    assert len([rows for rows in seen if rows]) >= 4


def test_a_paced_replay_is_a_stream_that_ends_and_resumes() -> None:
    source = Replay(
        [Memory({"at": list(range(20)), "n": list(range(20))})], time="at", unit="s", speed=1000
    )
    dataset = Dataset(
        source, Schema([Id("n"), Time("at", unit="s")]), 4, flush_seconds=60, prefetch=0
    )
    dataset.live = replace(dataset.live, tick_seconds=0.001)
    batches = [batch for batch in dataset.stream() if isinstance(batch, Batch)]
    assert [b.ids["n"].values.tolist() for b in batches] == [
        list(range(i, i + 4)) for i in range(0, 20, 4)
    ]
    rest = list(Dataset(source, dataset.schema, 4).resume(batches[1].position or {}))
    assert [b.ids["n"].values.tolist() for b in rest] == [
        list(range(i, i + 4)) for i in range(8, 20, 4)
    ]
    dataset.commit(batches[1].position or Position({}))


def test_a_time_that_cannot_be_read_is_named_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("at,n\n2024-01-01,0\nyesterday,1\n2024-01-02,2\n")
    source = Replay([Csv(tmp_path / "a.csv")], time="at", unit="iso")
    with pytest.raises(
        DecodeError, match=r"a.csv, line 3: column 'at' does not hold a time of unit 'iso'"
    ):
        read(source)
    skips = Skips()
    found = [
        row for batch, _ in source.read(plan=ReadPlan(skips=skips)) for row in batch.to_pylist()
    ]
    assert [row["n"] for row in found] == [0, 2]
    assert skips.counts == {"value": 1}


def test_wrong_arguments_are_named() -> None:
    source = Memory({"at": [1], "n": [1]})
    with pytest.raises(SchemaError, match=r"columns \['time'\] are absent, got \['at', 'n'\]"):
        read(Replay([source], time="time"))
    with pytest.raises(
        SchemaError, match=r"replay\.sources\[1\]: column 'n' must be int64, .* got string"
    ):
        read(Replay([source, Memory({"at": [1], "n": ["x"]})], time="at"))
    with pytest.raises(ConfigError, match=r"replay\.(sources|speed): must"):
        Replay([source], time="at", speed=0)
    with pytest.raises(ConfigError, match=r"needs sources that end, .*hb\.sources\.Join"):
        Replay([FakeStream({"at": [1]})], time="at")
    with pytest.raises(ConfigError, match="late labels: within_seconds: must be a finite number"):
        LateLabels(("user",), "kind", "view", "buy", within_seconds=0)


def test_late_labels_compare_any_encoding_and_refuse_other_types() -> None:
    late = LateLabels(("user",), "kind", "view", "buy", within_seconds=10)
    events = {"at": [1, 2, 30], "user": [1, 1, 2], "kind": ["view", "buy", "view"]}

    def labels(**columns: Any) -> list[Any]:
        source = Memory(pa.table({name: pa.array(column) for name, column in columns.items()}))
        batches = Replay([source], time="at", unit="s", late=late).read()
        return [label for batch, _ in batches for label in batch.column("label").to_pylist()]

    words = pa.array(events["kind"]).dictionary_encode()
    assert labels(**{**events, "kind": words, "user": words.slice(0, 3)}) == [0.0]
    assert labels(**{**events, "kind": words}) == labels(**events) == [1.0]
    with pytest.raises(SchemaError, match=r"column 'kind' must be text, .* got int64"):
        labels(**{**events, "kind": [1, 2, 1]})
    with pytest.raises(SchemaError, match=r"the key 'user' must hold single values, got list<"):
        labels(**{**events, "user": [[1], [1], [2]]})


@pytest.mark.parametrize(
    ("users", "missing"),
    [
        (pa.array([1, None, None, 1, None]), None),
        (pa.array(["a", "", "", "a", None]), ""),
        (pa.array(["a", "", "", "a", None]).dictionary_encode(), ""),
        (pa.array([b"a", b"", b"", b"a", None], pa.large_binary()), b""),
        (pa.array([1.0, float("nan"), float("nan"), 1.0, None]), float("nan")),
    ],
    ids=["null", "text", "dictionary", "bytes", "nan"],
)
def test_events_without_a_key_are_bad_rows_and_other_rows_need_none(
    users: pa.Array, missing: Any
) -> None:
    kinds = ["view", "view", "buy", "buy", "search"]
    log = pa.table({"at": [1, 2, 3, 4, 5], "user": users, "kind": kinds})
    late = LateLabels(("user",), "kind", "view", "buy", within_seconds=10)
    source = Replay([Memory(log)], "at", late=late)
    with pytest.raises(DecodeError, match="memory, row 2: column 'user' of an event holds no key"):
        read(source)
    skips = Skips()
    samples = [
        row for batch, _ in source.read(plan=ReadPlan(skips=skips)) for row in batch.to_pylist()
    ]
    assert [(row["at"], row["label"]) for row in samples] == [(1, 1.0)]
    assert skips.counts == {"value": 2}
    older = Position({"at": [{}], "emitted": 0})  # it may count such samples
    assert len([row for batch, _ in source.read(older) for row in batch.to_pylist()]) >= 1


def test_a_recorded_event_of_the_future_is_a_bad_row_for_a_whole_reading() -> None:
    """It would let the rest of its source come last, so that their views are negatives."""
    begin, far = 1_700_000_000, 4_102_444_800
    views = [(begin + 60 * n, "view", n, 0) for n in range(40)]
    buys = [(time + 5, "buy", n, 0) for time, _, n, _ in views[::2]]
    end = (begin + 9_000, "other", 0, 0)
    buys.insert(3, (far, "buy", 1, 0))
    source = Replay([events(*views, end), events(*buys)], "at", late=LATE)
    clock = [begin + 9_000.0]
    live = Live(clock=lambda: clock[0])
    with pytest.raises(DecodeError, match="row 4: column 'at' holds a time ahead of the clock"):
        list(source.read(plan=ReadPlan(live=live)))
    plan = ReadPlan(skips=Skips(), live=live)
    items = list(source.read(None, 7, plan))
    clock[0] = far + 1.0
    rest = [row for batch, _ in source.read(items[2][1], 7, plan) for row in batch.to_pylist()]
    samples = [row for batch, _ in items for row in batch.to_pylist()]
    assert rest == samples[21:]
    assert {row["user"]: row["label"] for row in samples} == {
        n: float(n % 2 == 0) for n in range(40)
    }
    no_limit = replace(plan, max_ahead_seconds=1e10)
    assert (
        len([row for batch, _ in source.read(None, 7, no_limit) for row in batch.to_pylist()]) > 0
    )


@pytest.mark.parametrize("factors", [(1, 1000), (1000, 1), (1000, 1000)])
def test_a_wrong_unit_of_a_source_is_refused(factors: tuple[int, int]) -> None:
    times = [range(1_700_000_000, 1_700_000_100), range(1_700_000_005, 1_700_000_105)]
    for unit, factor in (("s", 1), ("ms", 1000)):
        sides = [
            Memory({"at": [time * own for time in side]})
            for own, side in zip(factors, times, strict=True)
        ]
        source = Replay(sides, "at", unit)
        if factors == (factor, factor):
            assert len(read(source)) == 200
        else:
            with pytest.raises(SchemaError, match=r"years apart|is the year"):
                list(source.read(plan=ReadPlan(skips=Skips())))


def test_late_labels_without_a_sample_to_their_end_say_so(caplog: pytest.LogCaptureFixture) -> None:
    source = Replay([events((0, "view", 1, 1), (90, "view", 1, 2))], "at", "us", late=LATE)
    assert read(source) == []
    assert "no sample comes of 2 events 'view'" in caplog.text
    assert "1970-01-01T00:00:00.000090+00:00 (unit 'us')" in caplog.text
    caplog.clear()
    assert len(read(replace(source, unit="s"))) == 1
    assert not caplog.text


def test_a_clock_that_is_set_back_stops_no_replay() -> None:
    seconds = iter([10.0, 10.5, -3600.0, *(-3600 + n / 2 for n in range(1, 40))])
    live = Live(tick_seconds=0.0, clock=lambda: next(seconds))
    source = Replay([Memory({"at": [0, 1, 5, 9]})], "at", speed=1)
    assert sum(batch.num_rows for batch, _ in source.read(plan=ReadPlan(live=live))) == 4


def test_a_replay_is_written_in_a_job(tmp_path: Path) -> None:
    source = Replay((Csv(str(tmp_path / "a.csv")),), time="at", unit="s", late=LATE)
    assert config.build(config.describe(source), Source) == source
