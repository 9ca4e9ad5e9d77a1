# SPDX-License-Identifier: Apache-2.0
"""Scores that are NaN or infinite are marked in the answer, counted, and visible in the status."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import tritonclient.grpc
from torch import Tensor, nn

import hotbed as hb

from .conftest import Running
from .test_http import ask

PRICES = np.array([1.0, 0.0, -1.0, 2.0], np.float32)  # their logarithms: 0, -inf, NaN, 0.69


class Logarithm(nn.Module):
    def __init__(self, schema: hb.Schema, tables: dict[str, hb.Table]) -> None:
        super().__init__()
        self.embedding = hb.EmbeddingCollection(schema, tables)

    def forward(self, batch: hb.Batch) -> Tensor:
        price = torch.as_tensor(batch.dense["price"])
        return torch.log(price) + self.embedding(batch)["item"].sum(1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    schema = hb.Schema([hb.Label("y"), hb.Id("item"), hb.Dense("price")])
    model = hb.RecModel(Logarithm(schema, hb.make_tables(schema, dim=2)), "mse", "sgd")
    rows = {"y": [0.0, 1.0], "item": [1, 2], "price": [1.0, 2.0]}
    model.fit(hb.Dataset(hb.sources.Memory(rows), schema, 2), progress=False)
    folder = tmp_path_factory.mktemp("nonfinite") / "export"
    model.export(folder)
    server = Running(folder)
    yield server
    server.close()


def test_scores_that_are_not_finite_are_marked_counted_and_shown(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"item": np.arange(4), "price": PRICES}
    with hb.Client(f"http://{running.http}") as client:
        fine = {name: values[:1] for name, values in columns.items()}
        assert client.ask("m", fine).nonfinite == 0
        assert client.models()[0]["reason"] == ""
        with caplog.at_level(logging.WARNING, "hotbed.serving"):
            scores = [client.ask("m", columns) for _ in range(2)]
        assert [answer.nonfinite for answer in scores] == [2, 2]
        reason = client.models()[0]["reason"]
    assert "gave scores that are NaN or infinite, got 4" in reason
    assert [record.message for record in caplog.records].count(
        f"model m: {reason.replace('got 4', 'got 2')}"
    ) == 1
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{running.server.grpc_port}") as client:
        inputs = []
        for name, kind in (("item", "INT64"), ("price", "FP32")):
            inputs.append(tritonclient.grpc.InferInput(name, [4], kind))
            inputs[-1].set_data_from_numpy(columns[name])
        answer = client.infer("m", inputs)
    assert answer.get_response().parameters["nonfinite_scores"].int64_param == 2
    body = [
        {"name": "item", "datatype": "INT64", "shape": [4], "data": [0, 1, 2, 3]},
        {"name": "price", "datatype": "FP32", "shape": [4], "data": PRICES.tolist()},
    ]
    _, _, text = ask(running.http, "POST", "/v2/models/m/infer", {"inputs": body})
    told = json.loads(text)
    assert told["parameters"] == {"nonfinite_scores": 2}
    assert told["outputs"][0]["data"][1:3] == [None, None]
    _, _, metrics = ask(running.http, "GET", "/metrics")
    assert b'hotbed_nonfinite_scores_total{model="m"} 8.0' in metrics
    _, _, status = ask(running.http, "GET", "/status")
    (model,) = json.loads(status)["models"]
    assert (model["nonfinite"], model["state"]) == (8, "READY")
    assert "NaN or infinite" in model["reason"]
