# SPDX-License-Identifier: Apache-2.0
"""Requests in which the columns of one history have lists of different lengths are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import DataError, DecodeError, SchemaError

from .conftest import Running

SCHEMA = hb.Schema(
    [
        hb.Label("label"),
        hb.Time("at"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("shop"),
        hb.Id("items", table="item", pooling="none"),
        hb.Id("shops", table="shop", pooling="none"),
        hb.History("kept_items", of=["item"], by="user", where={"label": 1}, length=8),
        hb.History("kept_shops", of=["shop"], by="user", where={"label": 1}, length=8),
    ]
)
HISTORIES = [{"items": "item", "shops": "shop"}, {"kept_items": "item", "kept_shops": "shop"}]
ROWS: dict[str, Any] = {
    "at": [1, 2, 3, 4],
    "user": [7, 7, 7, 8],
    "item": [1, 2, 3, 4],
    "shop": [8, 7, 6, 5],
    "items": [[1, 2], [], [3, 4, 5], [2]],
    "shops": [[8, 7], [], [6, 5, 4], [7]],
}
CANDIDATES = {"item": [1, 2, 3], "shop": [8, 7, 6]}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"items": [[1], [], [2, 3]], "shops": [[1], [2], [3]]},
        {"user": 7},
        "candidate 2: columns 'items' and 'shops' are one history, got lists of 0 and 1 entries",
    ),
    (
        {"items": [[1], [2], [3]], "shops": [[1], [2], [3, 4]]},
        {"user": 7},
        "candidate 3: columns 'items' and 'shops' are one history, got lists of 1 and 2 entries",
    ),
    (
        {},
        {"user": 7, "items": [1, 2], "shops": [1]},
        "candidate 1: columns 'items' and 'shops' are one history, got lists of 2 and 1 entries",
    ),
    (
        {"shops": [[1, 2], [3, 4], []]},
        {"user": 7, "items": [1, 2]},
        "candidate 3: columns 'items' and 'shops' are one history, got lists of 2 and 0 entries",
    ),
    (
        {},
        {"user": 7, "items": [1], "shops": [1], "kept_items": [1, 2]},
        "candidate 1: columns 'kept_items' and 'kept_shops' are one history, got lists of 2 and 3",
    ),
]


@pytest.fixture(scope="module")
def of_several_columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = hb.make_tables(SCHEMA, dim=4)
    network = hb.models.DIN(SCHEMA, tables, histories=HISTORIES, attention="dot", hidden=(8,))
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.02))
    rows = hb.sources.Memory({**ROWS, "label": [1, 1, 1, 0]})
    model.fit(hb.Dataset(rows, SCHEMA, 4), progress=False)
    exported: Path = model.export(tmp_path_factory.mktemp("together") / "exported")
    return exported


def test_session_refuses_lists_of_different_lengths_in_one_history(
    of_several_columns: Path,
) -> None:
    session = hb.InferenceSession(of_several_columns)
    for lists, context, message in REFUSED:
        with pytest.raises(DecodeError, match=re.escape(message)):
            session.predict({**CANDIDATES, **lists}, context)
    rows = hb.sources.Memory({**ROWS, "shops": [[8, 7], [], [6, 5], [7]]})
    with pytest.raises(DecodeError, match=r"row 3: candidate 3: columns 'items' and 'shops'"):
        list(session.predict_source(rows))


def test_session_scores_lists_of_equal_lengths_alike_wherever_they_are(
    of_several_columns: Path,
) -> None:
    session = hb.InferenceSession(of_several_columns)
    lists = {"items": [1, 2], "shops": [8, 7]}
    expected = session.predict(CANDIDATES, {"user": 7, **lists})
    assert len(set(expected.tolist())) == 3
    shops = {"shops": [lists["shops"]] * 3}
    in_part = session.predict({**CANDIDATES, **shops}, {"user": 7, "items": lists["items"]})
    brought = {"user": 7, **lists, "kept_items": [1, 2, 3]}
    np.testing.assert_allclose(in_part, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(session.predict(CANDIDATES, brought), expected, rtol=0, atol=1e-6)


def test_session_refuses_wrong_times_and_text_in_a_history(of_several_columns: Path) -> None:
    session = hb.InferenceSession(of_several_columns)
    lists = {"items": [[1]] * 3, "shops": [[1]] * 3}
    ids = {"user": [7] * 3, **CANDIDATES, **lists}
    for times in ([1, 2], [0.5], 5):
        with pytest.raises(DataError, match=r"time: expected whole microseconds of shape \[3\]"):
            session.ask_encoded(None, ids, np.array(times))
    text = {"kept_items": [["1"]] * 3, "kept_shops": [[1]] * 3}
    with pytest.raises(SchemaError, match=r"column 'kept_items': it held integer values"):
        session.predict({**CANDIDATES, **lists, **text}, {"user": 7})


def test_server_refuses_lists_of_different_lengths_in_one_history(of_several_columns: Path) -> None:
    running = Running(of_several_columns, grpc_port=None)
    lists = {"items": np.array([[1, 2]] * 3), "shops": np.array([[1]] * 3)}
    message = "candidate 1: columns 'items' and 'shops' are one history, got lists of 2 and 1"
    with (
        hb.Client(f"http://{running.http}") as client,
        pytest.raises(DataError, match=re.escape(message)),
    ):
        client.predict("m", {**CANDIDATES, **lists}, {"user": 7})
    running.close()
