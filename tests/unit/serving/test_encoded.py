# SPDX-License-Identifier: Apache-2.0
"""Encoded values score as the raw columns that they come from, and are checked as those are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotbed as hb
from hotbed.errors import DataError, RowShapeError
from hotbed.serving.encoded import EncodedRequests

from .conftest import draw

ASKED = draw(50, 11)


@pytest.fixture(scope="module")
def batch(session: hb.InferenceSession) -> hb.Batch:
    return hb.Encoder(session.model.schema)(pa.table(ASKED), labels=False)


def test_encoded_values_score_as_the_columns_they_come_from(
    session: hb.InferenceSession, batch: hb.Batch
) -> None:
    expected = session.ask(ASKED)
    genres = batch.ids["genres"]
    lists = [genres[row : row + 1].values.tolist() for row in range(50)]
    price = batch.dense["price"]
    ids = {**batch.ids, "item": batch.ids["item"].values}
    for dense, features in (
        (batch.dense, batch.ids),
        (price.reshape(50, 1), {**ids, "genres": lists}),
        ({"price": price.tolist()}, ids),
    ):
        answer = session.ask_encoded(dense, features)
        assert answer.version == expected.version
        assert (answer.outputs["prediction"] == expected.outputs["prediction"]).all()
    nothing = session.ask_encoded(price[:0].reshape(0, 1), {name: [] for name in ids})
    assert nothing.outputs["prediction"].shape == (0,)


@pytest.mark.parametrize(
    ("dense", "changed", "message"),
    [
        (
            np.zeros((50, 2)),
            {},
            r"dense: expected numbers of shape \[n, 1\], got float64 \[50, 2\]",
        ),
        (np.zeros(50), {}, r"got float64 \[50\]"),
        (np.full((50, 1), np.nan), {}, "'price': expected finite"),
        ({"pric": np.zeros(50)}, {}, "'pric'.*Did you mean 'price'"),
        (None, {}, r"\['price'\] are missing"),
        (np.zeros((49, 1)), {}, "differ in length"),
        (np.zeros((50, 1)), {"usr": np.zeros(50, int)}, "'usr'.*Did you mean 'user'"),
        (np.zeros((50, 1)), {"user": ["a"] * 50}, "held integer values"),
        (np.zeros((50, 1)), {"user": np.zeros(50)}, "'user': expected integers"),
        (np.zeros((50, 1)), {"user": np.zeros((50, 2), int)}, "user"),
        (np.zeros((50, 1)), {"user": hb.Ids(np.arange(100), np.arange(0, 101, 2))}, "held single"),
    ],
)
def test_values_that_do_not_fit_are_rejected_by_name(
    session: hb.InferenceSession, batch: hb.Batch, dense: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        session.ask_encoded(dense, {**batch.ids, **changed})


@pytest.mark.parametrize(
    "offsets",
    [[0, 2, 1, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 5], [], [[0, 4]], [0.0, 1.0, 2.0, 4.0]],
)
def test_wrong_offsets_are_rejected(offsets: list[Any]) -> None:
    encode = EncodedRequests(hb.Schema([hb.Id("words")]))
    with pytest.raises(DataError, match=r"'words': expected .*offsets"):
        encode(None, {"words": hb.Ids(np.arange(4), np.array(offsets))})


def test_padding_length_weights_and_widths_hold_for_encoded_values() -> None:
    schema = hb.Schema(
        [
            hb.Id("seen", padding=0, max_length=2, column="raw", pooling="none"),
            hb.Id("tags", weights="raw_weights", transforms=[hb.transforms.Split("|")]),
            hb.Dense("image", width=2),
            hb.Dense("price", [hb.transforms.Normalize()]),
        ]
    )
    encode = EncodedRequests(schema)
    tags = hb.Ids(np.array([5, 6, 7]), np.array([0, 2, 3]), np.array([0.5, 1.0, 2.0], np.float32))
    seen = hb.Ids(np.array([1, 0, 2, 3]), np.array([0, 4, 4]))
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    request = encode(matrix, {"seen": seen, "tags": tags})
    assert request.ids["seen"].values.tolist() == [2, 3]
    assert request.ids["seen"].offsets.tolist() == [0, 2, 2]
    assert request.ids["tags"].weights.tolist() == [0.5, 1.0, 2.0]
    assert request.dense["image"].tolist() == [[0, 1], [3, 4]]
    assert request.dense["price"].tolist() == [2, 5]
    with pytest.raises(DataError, match="'seen': its ids have no weights"):
        encode(matrix, {"seen": hb.Ids(seen.values, seen.offsets, np.ones(4)), "tags": tags})
    with pytest.raises(DataError, match="one weight an id, got 1 weights for 3 ids"):
        encode(matrix, {"seen": seen, "tags": hb.Ids(tags.values, tags.offsets, np.ones(1))})


def test_ids_of_samples_unstack_into_features() -> None:
    ids = hb.Ids(np.arange(6), np.array([0, 1, 3, 3, 6]), np.arange(6) / 2)
    first, second = ids.unstack(2)
    assert (first.values.tolist(), first.offsets.tolist()) == ([0], [0, 1, 1])
    assert (second.values.tolist(), second.offsets.tolist()) == ([1, 2, 3, 4, 5], [0, 2, 5])
    assert second.weights.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
    flat = hb.Ids(np.arange(4)).unstack(2)
    assert [part.values.tolist() for part in flat] == [[0, 2], [1, 3]]
    with pytest.raises(RowShapeError, match="entries for 3 features, got 4 entries, 1 more"):
        ids.unstack(3)
    for offsets in ([0, 2, 1, 6], [1, 2, 3, 6], [0, 1, 2, 5], [0, 1, 2, 7], []):
        with pytest.raises(RowShapeError, match="expected offsets that rise from 0 to 6"):
            hb.Ids(np.arange(6), np.array(offsets, np.int64)).unstack(3)
