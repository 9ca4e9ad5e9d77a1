# SPDX-License-Identifier: Apache-2.0
"""The metadata of a model is all that a client needs to get training's scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import DataError
from hotbed.serving.arguments import column_shapes
from hotbed.serving.protocol.inputs import ModelInputs

from .conftest import Running, draw
from .test_http import ask

NUMPY = {"BYTES": object, "BOOL": bool, "INT64": np.int64, "FP32": np.float32}
NUM_ROWS = 24
Columns = Mapping[str, Any]


def weighted(n: int, seed: int) -> dict[str, list[Any]]:
    """Raw columns with booleans, whole prices, and weighted bags of 1 to 3 tags."""
    rng = np.random.default_rng(seed)
    tags = [rng.integers(0, 9, rng.integers(1, 4)).tolist() for _ in range(n)]
    return {
        "user": rng.integers(-5, 5, n).tolist(),
        "mobile": rng.integers(0, 2, n).astype(bool).tolist(),
        "tags": tags,
        "tags_weights": [rng.normal(size=len(own)).astype(np.float32).tolist() for own in tags],
        "price": rng.integers(0, 9, n).tolist(),
    }


def train_weighted(folder: Path) -> None:
    data = {**weighted(200, 0), "y": np.random.default_rng(1).integers(0, 2, 200).tolist()}
    schema = hb.Schema(
        [
            hb.Label("y"),
            hb.Id("user"),
            hb.Id("mobile"),
            hb.Id("device", column="mobile", transforms=[hb.transforms.Hash(7)]),
            hb.Id("tags", weights="tags_weights", pooling="sum"),
            hb.Dense("price"),
        ]
    )
    tables = hb.make_tables(schema, dim=4, init=hb.Normal(0.3))
    model = hb.RecModel(hb.models.DNN(schema, tables), "bce", "adam")
    model.fit(hb.Dataset(hb.sources.Memory(data), schema, 50), progress=False)
    model.export(folder)


class Bag(nn.Module):
    """A plain module whose bag has weights; no data set has shown their type."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(10, 4)
        self.tags = nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True)
        self.out = nn.Linear(8, 1)

    def forward(
        self, user: Tensor, tags: Tensor, tags_offsets: Tensor, tags_weights: Tensor
    ) -> Tensor:
        bags = self.tags(tags, tags_offsets, per_sample_weights=tags_weights)
        return self.out(torch.cat([self.user(user.abs()), bags], 1)).squeeze(1)


def train_bag(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Bag()
    network, optimizer, _ = hb.auto(plain, torch.optim.Adam(plain.parameters()))
    columns = weighted(40, 0)
    offsets = np.cumsum([0, *map(len, columns["tags"])])
    network(
        torch.tensor(columns["user"]),
        torch.tensor(list(chain(*columns["tags"]))),
        torch.tensor(offsets),
        torch.tensor(list(chain(*columns["tags_weights"]))),
    ).sum().backward()
    optimizer.step()
    hb.RecModel(network).export(folder)


def raw_of_exported(n: int, seed: int) -> dict[str, list[Any]]:
    return {name: np.asarray(values).tolist() for name, values in draw(n, seed).items()}


ORIGINS: dict[str, tuple[Callable[[Path], None] | None, Callable[[int, int], Columns]]] = {
    "a data set of texts": (None, raw_of_exported),
    "a data set of booleans and weights": (train_weighted, weighted),
    "hb.auto": (train_bag, weighted),
}


@pytest.fixture(scope="module", params=ORIGINS)
def served(
    request: pytest.FixtureRequest, exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, hb.InferenceSession, list[dict[str, Any]]]]:
    """A server, a session, and raw rows one by one."""
    train, columns = ORIGINS[request.param]
    folder = exported
    if train is not None:
        folder = tmp_path_factory.mktemp("model") / "export"
        train(folder)
    running = Running(folder)
    raw = columns(NUM_ROWS, 7)
    rows = [{name: raw[name][number] for name in raw} for number in range(NUM_ROWS)]
    yield running, hb.InferenceSession(folder), rows
    running.close()


def tensor_of(entry: Any, row: Mapping[str, Any]) -> np.ndarray:
    """Return the tensor of one candidate, cast as the metadata says."""
    shape = (1,) if len(entry["shape"]) == 1 else (1, -1)
    return np.array(row[entry["name"]]).astype(NUMPY[entry["datatype"]]).reshape(shape)


def test_client_that_follows_the_metadata_gets_the_scores(served: Any) -> None:
    running, session, rows = served
    with tritonclient.http.InferenceServerClient(running.http) as client:
        inputs = client.get_model_metadata("m")["inputs"]
    read = {entry["name"] for entry in inputs}
    expected = [
        float(session.predict({name: [row[name]] for name in row if name in read})[0])
        for row in rows
    ]
    assert np.ptp(expected) > 1e-3
    for module, place in (
        (tritonclient.http, running.http),
        (tritonclient.grpc, f"127.0.0.1:{running.server.grpc_port}"),
    ):
        scores = []
        with module.InferenceServerClient(place) as client:
            for row in rows:
                sent = []
                for entry in inputs:
                    values = tensor_of(entry, row)
                    sent.append(module.InferInput(entry["name"], values.shape, entry["datatype"]))
                    sent[-1].set_data_from_numpy(values)
                scores.append(float(client.infer("m", sent).as_numpy("prediction")[0]))
        assert scores == pytest.approx(expected, abs=1e-6)
    for row, score in zip(rows, expected, strict=True):
        body = []
        for entry in inputs:
            values = tensor_of(entry, row)
            described = {name: entry[name] for name in ("name", "datatype")}
            body.append({**described, "shape": values.shape, "data": values.tolist()})
        status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", {"inputs": body})
        assert status == 200, answer
        assert json.loads(answer)["outputs"][0]["data"] == pytest.approx([score], abs=1e-6)


def test_weights_are_floats_and_booleans_are_booleans_in_the_metadata() -> None:
    columns = [hb.Id("user"), hb.Id("mobile"), hb.Id("tags", weights="weight"), hb.Dense("flag")]
    wanted = {"user": "INT64", "mobile": "BOOL", "tags": "INT64", "weight": "FP32", "flag": "FP32"}
    types: Any = {"mobile": "boolean", "flag": "boolean"}
    for weight in ({}, {"weight": "integer"}, {"weight": "number"}):
        entries = ModelInputs(hb.Schema(columns, types={**types, **weight})).metadata()
        assert {entry["name"]: entry["datatype"] for entry in entries} == wanted


def test_booleans_are_ids_only_where_training_had_booleans(
    running: Running, session: hb.InferenceSession
) -> None:
    columns = draw(2, 3)
    with pytest.raises(DataError, match="'user': it held integer ids in training, got bool"):
        session.predict({**columns, "user": [True, False]})
    for datatype in ("INT64", "INT8", "UINT64", "FP32", "BOOL"):
        body = [{"name": "user", "datatype": datatype, "shape": [2], "data": [True, False]}]
        for name, kind in {"item": "BYTES", "genres": "BYTES", "price": "FP32"}.items():
            values = np.asarray(columns[name]).tolist()
            body.append({"name": name, "datatype": kind, "shape": [2], "data": values})
        status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", {"inputs": body})
        assert status == 400, answer
        assert b"user" in answer


def test_example_of_a_request_is_answered(served: Any) -> None:
    running, session, _ = served
    request = example_of(session)
    status, _, answer = ask(running.http, "POST", "/v2/models/m/infer", request)
    assert status == 200, answer


def example_of(session: hb.InferenceSession) -> dict[str, Any]:
    version = session.model
    return ModelInputs(version.schema, column_shapes(version.graph)).example()
