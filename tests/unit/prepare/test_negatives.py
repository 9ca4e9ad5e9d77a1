# SPDX-License-Identifier: Apache-2.0
"""Negatives: only items that the rule of exposure allows, drawn as promised, for all buckets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data import Label, Schema
from hotbed.data.encode import Encoder
from hotbed.errors import ConfigError, DataError
from hotbed.prepare.places import Purpose, hash_copies, hash_places
from hotbed.prepare.sampling.catalogue import Catalogue, item_rows, items_of
from hotbed.prepare.sampling.negatives import (
    Drawn,
    Negatives,
    draw_bucket,
    expand,
    label_of,
    user_rows,
    with_label,
)
from hotbed.prepare.sampling.order import Order
from hotbed.prepare.shuffle import BucketShuffle, Side

pytestmark = pytest.mark.core

LABEL = Label("label")
Row = dict[str, Any]


class Files:
    """Runs all steps over chunks of rows, as the stages of a preparation do."""

    def __init__(self, folder: Path, negatives: Negatives, buckets: int = 1) -> None:
        self.folder = folder
        self.negatives = negatives
        self.buckets = buckets
        self.drawn: list[Drawn] = []

    def run(self, chunks: list[pa.RecordBatch], valid: list[np.ndarray]) -> list[Row]:
        """Return all rows with their negatives; each chunk is a partition."""
        time = "time" if "time" in chunks[0].schema.names else None
        order = Order(time, "s")
        catalogue = self._catalogue(chunks, order, valid)
        side = self._draw(chunks, order, valid, catalogue)
        rows: list[Row] = []
        for number, (chunk, is_valid) in enumerate(zip(chunks, valid, strict=True)):
            items = side.reader(number).read(0, chunk.num_rows).column("items").combine_chunks()
            labelled = with_label(chunk, LABEL)
            expanded = expand(self.negatives, labelled, LABEL, order, catalogue, items)
            parts = is_valid[expanded.origins]
            extra = zip(expanded.copies.tolist(), parts.tolist(), strict=True)
            for row, (copy, part) in zip(expanded.rows.to_pylist(), extra, strict=True):
                rows.append(row | {"copy": copy, "valid": part})
        return rows

    def _catalogue(
        self, chunks: list[pa.RecordBatch], order: Order, valid: list[np.ndarray]
    ) -> Catalogue:
        shuffle = BucketShuffle(self.folder / "items", self.buckets)
        for number, (chunk, is_valid) in enumerate(zip(chunks, valid, strict=True)):
            with shuffle.writer(number) as writer:
                writer.write(*item_rows(self.negatives.of_item, chunk, order, is_valid))
        tables = [items_of(shuffle.read(bucket)) for bucket in shuffle.buckets()]
        Catalogue.write(self.folder / "catalogue", tables, self.negatives.exponent)
        return Catalogue.open(self.folder / "catalogue")

    def _draw(
        self,
        chunks: list[pa.RecordBatch],
        order: Order,
        valid: list[np.ndarray],
        catalogue: Catalogue,
    ) -> Side:
        shuffle = BucketShuffle(self.folder / "users", self.buckets)
        first = 0
        for number, (chunk, is_valid) in enumerate(zip(chunks, valid, strict=True)):
            hashes = hash_places(0, np.arange(first, first + chunk.num_rows), 0, Purpose.NEGATIVES)
            first += chunk.num_rows
            labelled = with_label(chunk, LABEL)
            rows = user_rows(self.negatives, labelled, LABEL, order, is_valid, hashes)
            with shuffle.writer(number) as writer:
                writer.write(*rows)
        side = Side(self.folder / "side", self.buckets)
        for number in shuffle.buckets():
            bucket = shuffle.read(number)
            drawn = draw_bucket(self.negatives, catalogue, bucket)
            side.write(number, bucket, {"items": drawn.items})
            self.drawn.append(drawn)
        return side


Event = tuple[int | None, str | None, int]


def batch(rows: list[Event]) -> pa.RecordBatch:
    """Return events (user, item, time); each price of an item holds for a hundred seconds."""
    return pa.record_batch(
        {
            "user": pa.array([user for user, _, _ in rows], pa.int64()),
            "item": pa.array([item for _, item, _ in rows], pa.string()),
            "time": pa.array([time for _, _, time in rows], pa.int64()),
            "genre": pa.array([item and [item, "all"] for _, item, _ in rows]),
            "price": pa.array([item and f"{item}{time // 100}" for _, item, time in rows]),
            "place": pa.array(range(len(rows))),
        }
    )


events_of_users = st.lists(
    st.tuples(
        st.integers(0, 4) | st.none(),
        st.sampled_from("abcdef") | st.none(),
        st.integers(0, 6).map(lambda number: number * 50),
    ),
    min_size=1,
    max_size=40,
).filter(lambda rows: any(item for _, item, _ in rows))


def allowed(rows: list[Event], row: Event, seen: str, items: set[str]) -> set[str]:
    """Return which of `items` may be negatives of `row`."""
    own = [(item, time) for user, item, time in rows if user == row[0]]
    if seen == "never":
        return items - {item for item, _ in own}
    at_that_time = {item for item, time in own if time == row[2]}
    if seen == "any":
        return items - at_that_time
    earlier = {item for item, time in own if time < row[2]}
    pool = items & earlier if row[1] in earlier else items - earlier
    return pool - at_that_time


def price_at(rows: list[Event], item: str, time: int, seen: str) -> str:
    """Return the latest price of an item at or before a time, else its first one."""
    times = [other for _, name, other in rows if name == item]
    if seen == "never":
        return f"{item}{times[0] // 100}"  # of the first row of the file
    return f"{item}{max([t for t in times if t <= time], default=min(times)) // 100}"


@given(
    rows=events_of_users,
    cut=st.integers(0, 40),
    buckets=st.integers(1, 4),
    draw=st.sampled_from(["uniform", "popularity"]),
    seen=st.sampled_from(["matched", "any", "never"]),
    seed=st.integers(0, 3),
)
def test_negatives_are_items_of_the_part_that_the_rule_of_exposure_allows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Event],
    cut: int,
    buckets: int,
    draw: Any,
    seen: Any,
    seed: int,
) -> None:
    columns = ["genre", "price"]
    negatives = Negatives("user", "item", 3, draw, item_columns=columns, seen=seen)
    whole = batch(rows)
    if seen == "never":  # the stages pass no order then
        whole = whole.drop_columns(["time"])
    is_valid = np.random.default_rng(seed).random(len(rows)) < 0.3
    folder = tmp_path_factory.mktemp("negatives")
    in_one = Files(folder / "one", negatives)
    expanded = in_one.run([whole], [is_valid])
    chunks = [whole.slice(0, cut), whole.slice(cut)]
    in_two = Files(folder / "two", negatives, buckets)
    assert in_two.run(chunks, [is_valid[:cut], is_valid[cut:]]) == expanded

    items: dict[bool, set[str]] = {False: set(), True: set()}
    for (_, item, _), part in zip(rows, is_valid.tolist(), strict=True):
        items[part] |= {item} if item else set()
    counts: Counter[int] = Counter()
    for row in expanded:
        assert row["label"] == (not row["copy"])
        user, original, time = rows[row["place"]]
        assert row["user"] == user
        assert row["valid"] == is_valid[row["place"]]
        if not row["copy"]:
            assert row["item"] == original
            continue
        counts[row["place"]] += 1
        assert row["item"] in allowed(rows, rows[row["place"]], seen, items[row["valid"]])
        assert row["genre"] == [row["item"], "all"]
        assert row["price"] == price_at(rows, row["item"], time, seen)
    kept = []
    num_without = 0
    for place, (row, part) in enumerate(zip(rows, is_valid.tolist(), strict=True)):
        is_whole = None not in row[:2]
        has_some = is_whole and bool(allowed(rows, row, seen, items[part]))
        assert counts[place] == 3 * has_some
        num_without += is_whole and not has_some
        if has_some or seen == "never":
            kept.append(place)
    assert [row["place"] for row in expanded if not row["copy"]] == kept
    assert in_one.drawn[0].num_items == counts.total()
    assert sum(drawn.num_without for drawn in in_two.drawn) == num_without


@pytest.mark.parametrize("draw", ["uniform", "popularity"])
def test_items_are_drawn_as_often_as_their_rows_say(tmp_path: Path, draw: Any) -> None:
    generator = np.random.default_rng(1)
    items = np.minimum(generator.geometric(0.3, 60_000), 9).astype(str)
    items[:200] = "known"
    users = np.arange(60_000)
    users[:200] = 0  # one user, who has "known" alone
    chunk = pa.record_batch({"user": users, "item": items})
    files = Files(tmp_path, Negatives("user", "item", 5, draw))
    rows = files.run([chunk], [np.zeros(60_000, bool)])
    own = [row["item"] for row in rows if row["copy"] and row["user"]]
    assert len(own) == 5 * 59_800
    counts = Counter(items.tolist())
    powers = {item: counts[item] ** (0.75 if draw == "popularity" else 0) for item in counts}
    expected: Counter[str] = Counter()
    for item, count in Counter(items[200:].tolist()).items():  # each of these knows one item
        rest = {other: power for other, power in powers.items() if other != item}
        for other, power in rest.items():
            expected[other] += 5 * count * power / sum(rest.values())
    for item, count in expected.items():
        # six standard deviations of a binomial count
        assert Counter(own)[item] == pytest.approx(count, abs=6 * count**0.5)


def test_rows_that_are_not_positive_get_no_negatives_and_are_never_drawn(tmp_path: Path) -> None:
    negatives = Negatives("user", "item", 2)
    items = ["a", "b", "c", "d"]
    chunk = pa.record_batch({"user": [1, 1, 2, 2], "item": items, "label": [1, 0, 0, 1]})
    rows = Files(tmp_path, negatives).run([chunk], [np.zeros(4, bool)])
    copies = [(row["user"], row["item"]) for row in rows if row["copy"]]
    assert {item for user, item in copies if user == 1} <= {"c", "d"}
    assert [user for user, _ in copies] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("label", "values"),
    [
        (Label("label", threshold=4), [4.5]),
        (Label("label", threshold=-1), [3]),
        (Label("label", positive="yes"), ["yes"]),
        (Label("label", positive="0"), ["0"]),
        (Label("label", positive="1"), [1]),
        (Label("label"), [True]),
        (Label("label"), ["1"]),
    ],
)
def test_the_raw_label_of_a_negative_is_encoded_as_zero(
    tmp_path: Path, label: Label, values: list[Any]
) -> None:
    chunk = pa.record_batch({"user": [1], "item": ["a"], "label": values})
    item = {"key": [5], "time": [0], "train": [1], "valid": [0], "value item": ["b"]}
    Catalogue.write(tmp_path, [pa.table(item)], 0)
    items = pa.FixedSizeListArray.from_arrays(pa.array([0, 0]), 2)
    catalogue = Catalogue.open(tmp_path)
    expanded = expand(Negatives("user", "item", 2), chunk, label, Order(), catalogue, items)
    labels = Encoder(Schema([label]))(expanded.rows).labels["label"]
    assert labels.tolist() == [1, 0, 0]
    assert expanded.rows.column("item").to_pylist() == ["a", "b", "b"]


def test_threads_open_catalogues_without_the_parser_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 raises SystemError at times if several threads call `ast.parse` at once."""
    item = {"key": [5], "time": [0], "train": [1], "valid": [0], "value item": ["b"]}
    Catalogue.write(tmp_path, [pa.table(item)], 0)
    monkeypatch.delattr("ast.parse")
    assert Catalogue.open(tmp_path).places(np.array([5])).tolist() == [0]


def test_hashes_of_copies_are_their_own() -> None:
    hashes = hash_places(0, np.arange(1000), 0, Purpose.DOWN_SAMPLE)
    copies = [hash_copies(hashes, np.full(1000, number)) for number in range(4)]
    assert (copies[0] == hashes).all()
    assert len(np.unique(copies)) == 4000


def test_negatives_need_one_plain_label() -> None:
    with pytest.raises(ConfigError, match="expected a schema with one label, got \\[\\]"):
        label_of(Schema([]))
    with pytest.raises(ConfigError, match="the source has no column 'label', got a label with"):
        with_label(batch([(1, "a", 0)]), Label("label", threshold=4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"per_positive": 0}, r"negatives\.per_positive: must be an integer >= 1, got 0"),
        ({"power": -1}, r"negatives\.power: must be a finite number >= 0, got -1"),
        ({"seen": "twice"}, r"negatives\.seen: unknown value, got 'twice'\. Give one of 'matched'"),
        ({"item": "user"}, r"negatives\.item: expected another column than that of users"),
    ],
)
def test_wrong_negatives_are_an_error(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Negatives(**{"user": "user", "item": "item"} | keys)


def test_a_source_without_items_is_an_error(tmp_path: Path) -> None:
    files = Files(tmp_path, Negatives("user", "item"))
    with pytest.raises(DataError, match="expected items to draw, got no row with an item"):
        files.run([batch([(1, None, 0)])], [np.zeros(1, bool)])
