# SPDX-License-Identifier: Apache-2.0
"""A small trained model, and a server of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.serving.batching import Limits
from hotbed.serving.http import Options, Server
from hotbed.serving.models import Models


def draw(n: int, seed: int) -> dict[str, Any]:
    """Raw columns of n candidates."""
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, 60, n),
        "item": [f"i{one}" for one in rng.integers(0, 90, n)],
        "genres": ["|".join(f"g{one}" for one in rng.integers(0, 9, rng.integers(1, 4))) for _ in range(n)],
        "price": (rng.random(n) * 100).astype(np.float32),
    }


def train() -> hb.RecModel:
    data = {**draw(400, 0), "label": np.random.default_rng(0).integers(0, 2, 400)}
    schema = hb.Schema(
        [
            hb.Label("label"),
            hb.Id("user"),
            hb.Id("item"),
            hb.Id("genres", transforms=[hb.transforms.Split("|")], pooling="mean"),
            hb.Dense("price", transforms=[hb.transforms.Normalize()]),
        ]
    ).fit(hb.sources.Memory(data))
    model = hb.RecModel(hb.models.DNN(schema, hb.make_tables(schema, dim=4)), "bce", hb.Adam(lr=0.01), {"auc"})
    model.fit(hb.Dataset(hb.sources.Memory(data), schema, 64), progress=False)
    return model


@pytest.fixture(scope="session")
def model() -> hb.RecModel:
    return train()


@pytest.fixture(scope="session")
def exported(model: hb.RecModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "export"
    model.export(path)
    return path


@pytest.fixture(scope="session")
def session(exported: Path) -> hb.InferenceSession:
    """What every way to ask is compared with."""
    return hb.InferenceSession(hb.ParameterServer().load("m", exported))


class Running:
    """A server on free ports, on a thread."""

    def __init__(self, exported: Path, limits: Limits | None = None, **options: Any) -> None:
        self.models = Models(hb.ParameterServer(), limits)
        self.models.add("m", exported)
        self.server = Server(self.models, Options(port=0, **{"grpc_port": 0, "drain_seconds": 0, **options}))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        assert self.server.started.wait(20)
        self.http = f"127.0.0.1:{self.server.port}"

    def close(self) -> None:
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def running(exported: Path) -> Iterator[Running]:
    found = Running(exported)
    yield found
    found.close()
