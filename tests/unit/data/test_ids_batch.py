# SPDX-License-Identifier: Apache-2.0
"""Ids and Batch: slices, orders and concatenations keep every id with its sample."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data import Batch, Ids
from hotbed.data.columns import distinct_ids

pytestmark = pytest.mark.core
bags = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=12)


def make(lists: list[list[int]], weighted: bool = True) -> Ids:
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    values = np.array([v for bag in lists for v in bag], np.int64)
    return Ids(values, offsets, np.arange(len(values), dtype=np.float32) if weighted else None)


def bags_of(ids: Ids) -> list[list[int]]:
    ids = ids.with_offsets()
    return [
        ids.values[a:b].tolist() for a, b in zip(ids.offsets[:-1], ids.offsets[1:], strict=True)
    ]


def weights_of(ids: Ids) -> list[list[float]]:
    return bags_of(Ids(ids.weights, ids.with_offsets().offsets))


@given(lists=bags, data=st.data())
def test_slice_take_and_concat_keep_bags_whole(lists: list[list[int]], data: st.DataObject) -> None:
    ids = make(lists)
    assert len(ids) == len(lists)
    start, stop = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    assert bags_of(ids[start:stop]) == lists[start:stop]
    order = np.array(data.draw(st.permutations(range(len(lists)))), np.int64)
    taken = ids.take(order)
    assert bags_of(taken) == [lists[i] for i in order]
    assert weights_of(taken) == [weights_of(ids)[i] for i in order]
    both = Ids.concat([ids[:start], ids[start:]])
    assert bags_of(both) == lists
    assert weights_of(both) == weights_of(ids)
    assert ids.lengths().tolist() == [len(bag) for bag in lists]


def test_one_id_a_sample_needs_no_offsets_and_mixes_with_bags() -> None:
    single, jagged = Ids(np.array([1, 2])), make([[], [3, 4]], weighted=False)
    assert Ids.concat([single, single]).offsets is None
    assert bags_of(Ids.concat([single, jagged])) == [[1], [2], [], [3, 4]]
    assert bags_of(single.take(np.array([1, 1, 0]))) == [[2], [2], [1]]
    assert single[1:].offsets is None


def batch(n: int, start: int = 0) -> Batch:
    rows = np.arange(start, start + n)
    return Batch(
        {"user": Ids(rows), "genres": make([[i] * (i % 3) for i in rows.tolist()])},
        {
            "price": rows.astype(np.float32),
            "embedding": np.stack([rows, rows], 1).astype(np.float32),
        },
        {"label": (rows % 2).astype(np.float32)},
        np.ones(n, np.float32),
        rows * 10,
    )


def test_a_batch_is_cut_ordered_and_joined_in_all_its_columns() -> None:
    whole = batch(10)
    assert len(whole) == whole.num_samples == 10
    again = Batch.concat([whole[:4], whole[4:4], whole[4:]]).take(np.arange(10)[::-1])
    assert again.ids["user"].values.tolist() == list(range(9, -1, -1))
    assert again.dense["embedding"][0].tolist() == [9, 9]
    assert again.labels["label"][0] == 1
    assert again.time.tolist()[:2] == [90, 80]
    assert again.weight.sum() == 10
    assert bags_of(again.ids["genres"])[1] == [8, 8]


def test_map_arrays_reaches_every_array() -> None:
    seen: list[np.ndarray] = []

    def note(array: np.ndarray) -> np.ndarray:
        seen.append(array)
        return array

    mapped = batch(3).map_arrays(note)
    assert len(seen) == 1 + 3 + 2 + 1 + 1 + 1
    assert mapped.num_samples == 3


def test_grain_ends_belong_to_all_samples_in_their_order() -> None:
    divided = dataclasses.replace(batch(6), grain_ends=(1, 1, 4, 6))
    assert divided.map_arrays(np.copy).grain_ends == (1, 1, 4, 6)
    assert divided.at(None).grain_ends == (1, 1, 4, 6)
    assert divided[:6].grain_ends == divided.take(np.arange(6)).grain_ends == ()


def test_an_empty_batch_is_a_batch() -> None:
    assert batch(0).num_samples == 0
    assert batch(5)[7:9].num_samples == 0
    assert Batch.concat([batch(0), batch(2)]).num_samples == 2


@given(st.lists(st.integers(-2, 2) | st.integers(-(2**63), 2**63 - 1)))
def test_distinct_ids_are_numbered_as_they_first_occur(ids: list[int]) -> None:
    distinct, numbers = distinct_ids(np.array(ids, np.int64))
    expected = list(dict.fromkeys(ids))
    assert distinct.tolist() == expected
    assert numbers.tolist() == [expected.index(number) for number in ids]
