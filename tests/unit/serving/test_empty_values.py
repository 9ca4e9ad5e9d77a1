# SPDX-License-Identifier: Apache-2.0
"""Empty bags, columns whose values are all missing, and requests without candidates: at every door
the score of training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

import hotbed as hb

from .conftest import Running
from .test_http import ask

t = hb.transforms
KINDS = {
    "user": "INT64",
    "city": "BYTES",
    "timestamp": "INT64",
    "history": "INT64",
    "liked": "INT64",
    "strength": "FP32",
    "words": "BYTES",
    "price": "FP32",
}
TYPES = {
    "user": pa.int64(),
    "city": pa.string(),
    "timestamp": pa.int64(),
    "history": pa.list_(pa.int64()),
    "liked": pa.list_(pa.int64()),
    "strength": pa.list_(pa.float32()),
    "words": pa.list_(pa.string()),
    "price": pa.float32(),
}
BAGS = ("history", "liked", "strength", "words")
Row = dict[str, Any]
Ask = Callable[[Row], float]


def rows(n: int, seed: int) -> list[Row]:
    """Rows of which some miss values and hold empty bags."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        liked = rng.integers(0, 20, rng.integers(0, 3)).tolist()
        row: Row = {
            "user": int(rng.integers(0, 30)),
            "city": f"c{rng.integers(0, 5)}",
            "timestamp": int(rng.integers(0, 10**9)),
            "history": rng.integers(0, 20, rng.integers(0, 4)).tolist(),
            "liked": liked,
            "strength": [round(float(one), 3) for one in rng.random(len(liked))],
            "words": [f"w{one}" for one in rng.integers(0, 6, rng.integers(0, 3))],
            "price": float(np.float32(rng.random())),
        }
        for name in ("user", "city", "timestamp", "price", "history", "words"):
            if rng.random() < 0.1:
                row[name] = None
        found.append(row)
    return found


def table(rows: list[Row]) -> pa.Table:
    return pa.table(
        {name: pa.array([row[name] for row in rows], kind) for name, kind in TYPES.items()}
    )


@pytest.fixture(scope="module")
def model() -> hb.RecModel:
    torch.manual_seed(0)
    data = table(rows(400, 0)).append_column(
        "label", pa.array(np.random.default_rng(1).integers(0, 2, 400))
    )
    source = hb.sources.Memory(data)
    schema = hb.Schema(
        [
            hb.Label("label"),
            hb.Id("user"),
            hb.Id("town", column="city", transforms=[t.Map()]),
            hb.Id("hour", column="timestamp", transforms=[t.TimeOfDay()]),
            hb.Id("where", column="city", transforms=[t.Cross(["user"])]),
            hb.Id("history", table="item", pooling="mean"),
            hb.Id("liked", table="item", weights="strength"),
            hb.Id("words", transforms=[t.Hash()], pooling="max"),
            hb.Dense("price", transforms=[t.FillMissing(statistic="mean"), t.Normalize()]),
        ]
    ).fit(source)
    model = hb.RecModel(
        hb.models.DNN(schema, hb.make_tables(schema, dim=4)), "bce", hb.Adam(lr=0.05)
    )
    model.fit(hb.Dataset(source, schema, 50), progress=False)
    return model


@pytest.fixture(scope="module")
def exported(model: hb.RecModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "exported"
    model.export(path)
    return path


@pytest.fixture(scope="module")
def running(exported: Path) -> Iterator[Running]:
    server = Running(exported)
    yield server
    server.close()


def without_nulls(row: Row) -> Row:
    """Return a row with what stands for a missing value where there is no null."""
    instead: Row = {"city": "", "price": math.nan, "history": []}
    sent = {name: instead.get(name) if value is None else value for name, value in row.items()}
    sent["words"] = [*(row["words"] or []), ""]
    return sent


def by_json(running: Running) -> Ask:
    """Nulls and empty lists as JSON writes them."""

    def predict(row: Row) -> float:
        inputs = [
            {"name": name, "datatype": KINDS[name], "shape": shape, "data": data}
            for name, shape, data in (tensor(name, value) for name, value in row.items())
        ]
        status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", {"inputs": inputs})
        assert status == 200, answer
        return float(json.loads(answer)["outputs"][0]["data"][0])

    return predict


def tensor(name: str, value: Any) -> tuple[str, list[int], list[Any]]:
    if isinstance(value, list):
        return name, [1, len(value)], value
    return name, [1], [value]


def by_triton(running: Running, protocol: str) -> Ask:
    """Binary tensors, which have no nulls: an empty bag is a tensor [1, 0]."""
    module = getattr(tritonclient, protocol)
    where = running.http if protocol == "http" else f"127.0.0.1:{running.server.grpc_port}"

    def predict(row: Row) -> float:
        inputs = []
        for name, value in row.items():
            _, shape, data = tensor(name, value)
            dtype = {"INT64": np.int64, "FP32": np.float32, "BYTES": object}[KINDS[name]]
            inputs.append(module.InferInput(name, shape, KINDS[name]))
            inputs[-1].set_data_from_numpy(np.array(data, dtype).reshape(shape))
        with module.InferenceServerClient(where) as client:
            return float(client.infer("m", inputs).as_numpy("prediction")[0])

    return predict


def by_client(running: Running) -> Ask:
    client = hb.Client(f"http://{running.http}")

    def predict(row: Row) -> float:
        with client:
            return float(client.predict("m", {name: [value] for name, value in row.items()})[0])

    return predict


def by_session(exported: Path) -> Ask:
    session = hb.InferenceSession(exported)
    return lambda row: float(session.predict({name: [value] for name, value in row.items()})[0])


@pytest.fixture(scope="module")
def doors(running: Running, exported: Path) -> dict[str, Ask]:
    return {
        "session": by_session(exported),
        "json": by_json(running),
        "hb.Client": by_client(running),
        "triton http": by_triton(running, "http"),
        "triton grpc": by_triton(running, "grpc"),
    }


def expected(model: hb.RecModel, asked: list[Row]) -> np.ndarray:
    data = table(asked).append_column("label", pa.array([0] * len(asked)))
    scores: np.ndarray = model.predict(hb.Dataset(hb.sources.Memory(data), model.schema, 64))
    return scores


# the stock client leaves sockets open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("door", ["session", "json", "hb.Client", "triton http", "triton grpc"])
def test_every_row_has_its_training_score_at_every_door(
    door: str, doors: dict[str, Ask], model: hb.RecModel
) -> None:
    asked = rows(80, 7)
    if door.startswith("triton"):  # integers have no missing value there
        asked = [row for row in asked if None not in (row["user"], row["timestamp"])]
    missing = dict.fromkeys(TYPES, None)
    empty = {
        **rows(1, 3)[0],
        **{name: [] for name in BAGS},
        "user": 3,
        "city": "c1",
        "timestamp": 5,
        "price": 0.5,
    }
    asked += (
        [empty]
        if door.startswith("triton")
        else [empty, missing, {**missing, "liked": [], "strength": []}]
    )
    scores = expected(model, asked)
    assert len(asked) > 20
    for row, score in zip(asked, scores, strict=True):
        assert abs(doors[door](without_nulls(row)) - score) < 1e-6, row
        if not door.startswith("triton"):
            assert abs(doors[door](row) - score) < 1e-6, row


@pytest.mark.parametrize("name", TYPES)
def test_a_column_missing_for_all_candidates_is_scored_as_in_training(
    name: str, exported: Path, model: hb.RecModel
) -> None:
    session = hb.InferenceSession(exported)
    asked = [{**row, name: None} for row in rows(3, 11)]
    if name in ("liked", "strength"):
        asked = [{**row, "liked": None, "strength": None} for row in asked]
    scores = expected(model, asked)
    columns = {name: [row[name] for row in asked] for name in TYPES}
    for values in ([None] * 3, pa.nulls(3)):
        assert np.abs(session.predict({**columns, name: values}) - scores).max() < 1e-6
    rest = {other: values for other, values in columns.items() if other != name}
    assert np.abs(session.predict(rest, {name: None}) - scores).max() < 1e-6


NONE: dict[str, Any] = {
    "lists": {name: [] for name in TYPES},
    "arrays": {name: np.array([]) for name in TYPES},
    "arrow": {name: pa.array([], kind) for name, kind in TYPES.items()},
}


@pytest.mark.parametrize("form", NONE)
@pytest.mark.parametrize("context", [(), ("user",), ("user", "city", "history")])
def test_zero_candidates_have_zero_scores(
    form: str, context: tuple[str, ...], exported: Path, running: Running
) -> None:
    session = hb.InferenceSession(exported)
    values = {"user": 3, "city": "c1", "history": [1, 2]}
    columns = {name: column for name, column in NONE[form].items() if name not in context}
    once = {name: values[name] for name in context}
    answer = session.ask(columns, once)
    assert answer.outputs["prediction"].shape == (0,)
    assert answer.outputs["prediction"].dtype == np.float32
    with hb.Client(f"http://{running.http}") as client:
        assert client.predict("m", columns, once).shape == (0,)


def nothing(modules: Any, context: tuple[str, ...]) -> list[Any]:
    """Tensors of no candidates; those of `context` hold one value."""
    inputs = []
    for name, kind in KINDS.items():
        dtype = {"INT64": np.int64, "FP32": np.float32, "BYTES": object}[kind]
        values = np.array([b"1" if kind == "BYTES" else 1] if name in context else [], dtype)
        inputs.append(modules.InferInput(name, values.shape, kind))
        inputs[-1].set_data_from_numpy(values)
    return inputs


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("context", [(), ("user", "city")])
def test_zero_candidates_are_answered_over_both_protocols(
    protocol: str, context: tuple[str, ...], running: Running
) -> None:
    module = getattr(tritonclient, protocol)
    where = running.http if protocol == "http" else f"127.0.0.1:{running.server.grpc_port}"
    with module.InferenceServerClient(where) as client:
        for _ in range(3):  # a head that comes again is read another way
            found = client.infer("m", nothing(module, context)).as_numpy("prediction")
            assert found.shape == (0,)


def test_zero_candidates_still_need_every_column(exported: Path) -> None:
    session = hb.InferenceSession(exported)
    missing = {name: [] for name in TYPES}
    with pytest.raises(hb.errors.DataError, match="missing"):
        session.predict({name: missing[name] for name in ("user", "city")})


@pytest.mark.parametrize(
    "changed",
    [
        {"history": [[1, 2], [3, None]]},
        {"history": np.array([[1, 2], [3, 4]])},
        {"history": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))},
        {"history": [[1], [2]]},
        {"history": [[], []]},
        {"history": [None, []]},
        {"history": np.zeros((2, 0))},
        {"words": [["w1", None], ["w2", "w3"]]},
        {"words": np.array([["w1", "w2"], ["w3", "w4"]])},
    ],
)
def test_a_client_and_a_session_make_the_same_of_lists(
    changed: Any, exported: Path, running: Running
) -> None:
    asked = {name: [row[name] for row in rows(2, 5)] for name in TYPES}
    asked |= {
        "history": [[1], [2]],
        "words": [["w1"], ["w2"]],
        "liked": [[1], [2]],
        "strength": [[0.5], [1.5]],
    }
    asked |= changed
    expected = hb.InferenceSession(exported).predict(asked)
    with hb.Client(f"http://{running.http}") as client:
        assert np.abs(client.predict("m", asked) - expected).max() < 1e-6
        once = {name: asked.pop(name)[0] for name in changed}
        assert np.abs(client.predict("m", asked, once)[0] - expected[0]) < 1e-6


def test_lists_of_several_lengths_name_what_helps(running: Running) -> None:
    columns = {name: [row[name] for row in rows(2, 5)] for name in TYPES}
    with (
        hb.Client(f"http://{running.http}") as client,
        pytest.raises(hb.errors.DataError, match="`padding`"),
    ):
        client.predict("m", {**columns, "history": [[1], [2, 3]]})
