# SPDX-License-Identifier: Apache-2.0
"""Only whole numbers become ids: a fraction is refused, at every door and in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
import torch

import hotbed as hb
from hotbed.errors import ConfigError, DataError, RowShapeError
from hotbed.serving.request import RequestEncoder

from .conftest import Held, Running, draw
from .test_grpc import call, typed
from .test_http import ask, user

FRACTIONS = {
    "fractions": [1.5, 2.9, -0.5],
    "integral floats": [1.0, 2.0, 0.0],
    "one among integers": [1, 2.0, 0],
}


@pytest.mark.parametrize("ids", FRACTIONS.values(), ids=list(FRACTIONS))
@pytest.mark.parametrize("datatype", ["INT64", "INT32", "UINT64", "FP32", "FP64"])
def test_rest_refuses_ids_that_are_floats(
    running: Running, datatype: str, ids: list[float]
) -> None:
    shape = [len(ids)]
    status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", user(datatype, shape, ids))
    assert (status, b"user" in answer) == (400, True), answer


@pytest.mark.parametrize(
    "datatype, field, values",
    [
        ("INT64", "fp32_contents", [7.5]),
        ("INT64", "fp64_contents", [7.0]),
        ("INT64", "bool_contents", [True]),
        ("INT8", "uint_contents", [1]),
        ("FP32", "fp32_contents", [7.0]),
        ("UINT8", "uint_contents", [300]),
    ],
)
def test_grpc_refuses_contents_of_another_type(
    running: Running, datatype: str, field: str, values: list[Any]
) -> None:
    request = typed({name: values for name, values in draw(3, 10).items() if name != "user"})
    request.inputs.add(name="user", datatype=datatype, shape=[1], contents={field: values})
    with pytest.raises(grpc.RpcError, match="user") as refused:
        call(running, "ModelInfer", request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("ids", FRACTIONS.values(), ids=list(FRACTIONS))
def test_a_session_and_a_client_refuse_ids_that_are_floats(
    running: Running, session: hb.InferenceSession, ids: list[float]
) -> None:
    columns = draw(len(ids), 5)
    with hb.Client(f"http://{running.http}") as client:
        for predict in (session.predict, lambda columns: client.predict("m", columns)):
            for values in (
                ids,
                np.array(ids),
                np.array(ids, np.float32),
                pa.array(ids, pa.float64()),
            ):
                with pytest.raises(DataError, match="user"):
                    predict({**columns, "user": values})


@pytest.fixture(scope="module")
def lookups(
    exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[Any], Any]]:
    """Everything that takes ids as they are."""
    server = hb.ParameterServer()
    version = server.load("m", exported)
    table = hb.Table("user", dim=4)
    return {
        "Table.find": table.find,
        "Table.find_or_insert": table.find_or_insert,
        "Table.lookup": table.lookup,
        "Table.remove": table.remove,
        "ParameterServer.lookup": lambda ids: server.lookup("m", "user", ids)[0],
        "ModelVersion.find": lambda ids: version.find({"user": ids})["user"],
        "EmbeddingBag": lambda ids: hb.EmbeddingBag(table)(hb.Ids(ids, np.array([0, len(ids)]))),
        "Embedding": lambda ids: hb.Embedding(table)(hb.Ids(ids)),
    }


DOORS = [
    "Table.find",
    "Table.find_or_insert",
    "Table.lookup",
    "Table.remove",
    "ParameterServer.lookup",
    "ModelVersion.find",
    "EmbeddingBag",
    "Embedding",
]


@pytest.mark.parametrize("door", DOORS)
def test_lookups_refuse_what_is_not_a_whole_number_of_64_bits(door: str, lookups: Any) -> None:
    nested = [[1]]
    huge = [2**64]
    for ids in (
        *FRACTIONS.values(),
        np.array([1.5]),
        torch.tensor([1.5]),
        nested,
        huge,
        [-(2**63) - 1],
        ["1"],
        [None],
    ):
        with pytest.raises(RowShapeError):
            lookups[door](ids)


@pytest.mark.parametrize("door", [door for door in DOORS[:6] if door != "Table.remove"])
def test_lookups_take_lists_of_all_64_bits(door: str, lookups: Any) -> None:
    signed = lookups[door](np.array([1, -1, -(2**63)]))
    unsigned = lookups[door]([1, 2**64 - 1, 2**63])
    assert (unsigned == signed).all()
    assert len(lookups[door]([])) == 0


def test_a_parameter_server_elsewhere_refuses_fractions(exported: Path, tmp_path: Path) -> None:
    held = Held(tmp_path / "rows", f"m={exported}")
    version = hb.ParameterServer.connect(f"grpc://127.0.0.1:{held.port}").model("m")
    for ids in ([1.5], np.array([1.5])):
        with pytest.raises(RowShapeError, match="ids"):
            version.find({"user": ids})


@pytest.mark.parametrize("columns", [None, 7, [1, 2], "user"])
def test_columns_that_are_not_a_mapping_are_refused_by_session_and_client(
    running: Running, session: hb.InferenceSession, columns: Any
) -> None:
    with hb.Client(f"http://{running.http}") as client:
        for predict in (session.predict, lambda *columns: client.predict("m", *columns)):
            with pytest.raises(DataError, match="columns"):
                predict(columns)
            with pytest.raises(DataError, match="context"):
                predict(draw(2, 1), columns or 0)


def test_ids_beyond_64_bits_are_refused_by_session_and_client(
    running: Running, session: hb.InferenceSession
) -> None:
    with hb.Client(f"http://{running.http}") as client:
        for predict in (session.predict, lambda *columns: client.predict("m", *columns)):
            for id in (2**64, -(2**63) - 1):
                with pytest.raises(DataError, match="user"):
                    predict({**draw(2, 1), "user": [1, id]})
                with pytest.raises(DataError, match="user"):
                    predict(
                        {name: values for name, values in draw(2, 1).items() if name != "user"},
                        {"user": id},
                    )


def test_ids_from_2_to_the_63_are_read_from_json_whatever_was_told(
    running: Running, session: hb.InferenceSession
) -> None:
    """Half of a long request is decoded before the first of them is seen."""
    users = [7] * 5000 + [2**63, 2**64 - 1]
    for ids in (users[-3:], users[-4097:]):
        expected = session.predict({**draw(len(ids), 1), "user": np.array(ids, np.uint64)})
        body = [*user("INT64", [len(ids)], ids)["inputs"]]
        for name, kind in {"item": "BYTES", "genres": "BYTES", "price": "FP32"}.items():
            values = np.asarray(draw(len(ids), 1)[name]).tolist()
            body = [entry for entry in body if entry["name"] != name]
            body.append({"name": name, "datatype": kind, "shape": [len(ids)], "data": values})
        if len(ids) > 4096:
            body = [{**entry, "shape": [len(ids) - 1], "data": entry["data"][1:]} for entry in body]
            expected = expected[1:]
        status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", {"inputs": body})
        assert status == 200, answer
        assert json.loads(answer)["outputs"][0]["data"] == pytest.approx(expected, abs=1e-6)
    status, _, answer = ask(
        running.http, "POST", "/v2/models/m/infer", user("INT64", [3], [-1, 2**63, 0])
    )
    assert (status, b"the values are not INT64" in answer) == (400, True), answer


def test_lists_for_a_column_of_single_values_are_refused_at_every_door(
    running: Running, session: hb.InferenceSession
) -> None:
    """Two ids would be pooled as one, without a word."""
    columns = {**draw(3, 1), "user": np.array([[1, 2], [3, 4], [5, 6]])}
    with hb.Client(f"http://{running.http}") as client:
        for predict in (session.predict, lambda *columns: client.predict("m", *columns)):
            with pytest.raises(DataError, match=r"column 'user': .* single values"):
                predict(columns)
        with pytest.raises(DataError, match=r"column 'user': .* single values"):
            session.predict({**columns, "user": [[1], [3], [5]]})
    status, _, answer = ask(
        running.http, "POST", "/v2/models/m/infer", user("INT64", [3, 2], [1, 2, 3, 4, 5, 6])
    )
    assert (status, b"single values" in answer) == (400, True), answer


def test_a_model_that_does_not_tell_its_shapes_takes_lists_and_single_values() -> None:
    """Models of before the schema remembered it."""
    encode = RequestEncoder(hb.Schema([hb.Id("user")], {"user": "integer"}))
    assert len(encode({"user": [[1, 2], [3]]}).ids["user"].values) == 3
    assert list(encode({"user": [1, 2]}).ids["user"]) == [1, 2]
    with pytest.raises(ConfigError, match=r"schema\.shapes"):
        hb.Schema.from_json({"columns": [], "shapes": {"user": "scalar"}})
