# SPDX-License-Identifier: Apache-2.0
"""Networks over click histories: at every door the score of training, for histories of any length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from any_batch import check_any_batch
from schedule import in_soak
from torch import Tensor, nn
from tritonclient.utils import InferenceServerException

import hotbed as hb
from hotbed.errors import RequestTooLarge
from hotbed.models.layers import PadSequence
from hotbed.persist.publish.export import _DenseHalf
from hotbed.persist.publish.read_lengths import read_lengths
from hotbed.serving.protocol.inputs import Candidates
from hotbed.serving.server.options import ServerLimits
from hotbed.serving.server.scoring.batching import DecodedRequest, QueuedRequest

from .conftest import Running

LENGTH = 4
MOST_ROWS = 60
SCHEMA = hb.Schema(
    [
        hb.Label("label"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("clicks", table="item", pooling="none", padding=-1),
        hb.Id("word"),
        hb.Id("words", table="word", pooling="none", padding=-1),
        hb.Dense("price"),
    ]
)
Columns = dict[str, Any]


class Own(nn.Module):
    """A network that someone wrote around the layers: a GRU over clicks, a mean of words."""

    def __init__(self, schema: hb.Schema, tables: dict[str, hb.Table]) -> None:
        super().__init__()
        self.embedding = hb.EmbeddingCollection(schema, tables)
        self.clicks, self.words = PadSequence(LENGTH), PadSequence(LENGTH)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4 * 4 + 1, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        rows, ids = self.embedding(batch), batch.ids
        clicks, clicked = self.clicks(rows["clicks"], ids["clicks"].offsets)
        states = self.gru(clicks)[0] * clicked.unsqueeze(2)
        words, worded = self.words(rows["words"], ids["words"].offsets)
        meaning = words.sum(1) / (worded.sum(1, keepdim=True) + 1)
        price = torch.as_tensor(batch.dense["price"]).unsqueeze(1)
        flat = torch.cat([rows["user"], rows["item"], states.sum(1), meaning, price], dim=1)
        logits: Tensor = self.out(flat).squeeze(1)
        return logits


Tables = dict[str, hb.Table]


def of_kind(kind: str) -> Callable[[Tables], nn.Module]:
    histories = [{"clicks": "item"}, {"words": "word"}]
    model = getattr(hb.models, kind)
    return lambda tables: model(SCHEMA, tables, histories=histories, length=LENGTH, hidden=(8,))


NETWORKS: dict[str, Callable[[Tables], nn.Module]] = {
    "own": lambda tables: Own(SCHEMA, tables),
    "DIN": of_kind("DIN"),
    "DIEN": of_kind("DIEN"),
    "BST": of_kind("BST"),
}


def draw(n: int, seed: int, clicks: int | None = None) -> Columns:
    """Columns of n candidates; with `clicks`, each has a history of that many."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 2 * LENGTH, n) if clicks is None else np.full(n, clicks)
    return {
        "user": rng.integers(0, 30, n),
        "item": rng.integers(0, 40, n),
        "word": rng.integers(0, 9, n),
        "clicks": [rng.integers(0, 40, count).tolist() for count in counts],
        "words": [rng.integers(0, 9, count // 2 * 2).tolist() for count in counts],
        "price": rng.random(n).astype(np.float32),
    }


def table(columns: Columns) -> pa.Table:
    bags = pa.list_(pa.int64())
    return pa.table(
        {
            name: pa.array(values, bags) if name in ("clicks", "words") else pa.array(values)
            for name, values in columns.items()
        }
    )


@pytest.fixture(scope="module", params=in_soak(NETWORKS, quick={"own", "BST"}))
def model(request: pytest.FixtureRequest) -> hb.RecModel:
    torch.manual_seed(0)
    data = table({**draw(300, 0), "label": np.random.default_rng(1).integers(0, 2, 300)})
    network = NETWORKS[request.param](hb.make_tables(SCHEMA, dim=4, init=hb.Normal(0.5)))
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.05))
    model.fit(hb.Dataset(hb.sources.Memory(data), SCHEMA, 50), progress=False)
    return model


@pytest.fixture(scope="module")
def exported(model: hb.RecModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("histories") / "exported"
    model.export(path)
    return path


@pytest.fixture(scope="module")
def session(exported: Path) -> hb.InferenceSession:
    return hb.InferenceSession(exported)


@pytest.fixture(scope="module")
def running(exported: Path) -> Iterator[Running]:
    server = Running(exported, ServerLimits(request_entries=2 * LENGTH * MOST_ROWS))
    yield server
    server.close()


def expected(model: hb.RecModel, asked: Columns) -> np.ndarray:
    data = table({**asked, "label": np.zeros(len(asked["item"]))})
    scores: np.ndarray = model.predict(hb.Dataset(hb.sources.Memory(data), SCHEMA, 64))
    return scores


def largest(left: np.ndarray, right: np.ndarray) -> float:
    assert left.shape == right.shape
    return float(np.abs(left - right).max())


def by_triton(running: Running, protocol: str, columns: Columns) -> np.ndarray:
    """Scores of the stock client; short histories are filled with the padding of their column."""
    module = getattr(tritonclient, protocol)
    where = running.http if protocol == "http" else f"127.0.0.1:{running.server.grpc_port}"
    inputs = []
    for name, values in columns.items():
        if name in ("clicks", "words"):
            widest = max(map(len, values))
            values = np.array([bag + [-1] * (widest - len(bag)) for bag in values], np.int64)
            values = values.reshape(len(values), widest)
        kind = "FP32" if name == "price" else "INT64"
        inputs.append(module.InferInput(name, values.shape, kind))
        inputs[-1].set_data_from_numpy(values)
    with module.InferenceServerClient(where) as client:
        scores: np.ndarray = client.infer("m", inputs).as_numpy("prediction")
    return scores


@pytest.mark.parametrize("clicks", [None, 0, 1, LENGTH, 3 * LENGTH])
@pytest.mark.parametrize("n", [1, 2, 60])
def test_a_session_gives_the_score_of_training(
    n: int, clicks: int | None, model: hb.RecModel, session: hb.InferenceSession
) -> None:
    asked = draw(n, 5, clicks)
    assert largest(session.predict(table(asked)), expected(model, asked)) < 1e-6
    if n > 1:
        rows = table(asked)
        check_any_batch(session, {name: rows[name].combine_chunks() for name in asked})


# the stock client leaves sockets open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("clicks", [None, 0, 3 * LENGTH])
def test_a_server_gives_the_score_of_training(
    clicks: int | None, protocol: str, model: hb.RecModel, running: Running
) -> None:
    asked = draw(30, 6, clicks)
    assert largest(by_triton(running, protocol, asked), expected(model, asked)) < 1e-6


@pytest.mark.parametrize("clicks", [0, 2, 3 * LENGTH])
def test_a_history_in_the_context_belongs_to_every_candidate(
    clicks: int, model: hb.RecModel, session: hb.InferenceSession, running: Running
) -> None:
    asked, once = draw(20, 7), draw(1, 8, clicks)
    for name in ("user", "clicks", "words"):
        asked[name] = list(once[name]) * 20
    scores = expected(model, asked)
    candidates = {name: asked[name] for name in ("item", "word", "price")}
    context = {name: table(once)[name].combine_chunks() for name in ("user", "clicks", "words")}
    assert largest(session.predict(candidates, context), scores) < 1e-6
    with hb.Client(f"http://{running.http}") as client:
        context = {name: once[name][0] for name in context}
        assert largest(client.predict("m", candidates, context), scores) < 1e-6


def test_only_the_newest_entries_of_a_history_count(session: hb.InferenceSession) -> None:
    long = draw(30, 9, 3 * LENGTH)
    newest = long | {
        "clicks": [history[-LENGTH:] for history in long["clicks"]],
        "words": [history[-LENGTH:] for history in long["words"]],
    }
    scores = session.predict(table(long))
    assert scores.std() > 0.01
    assert largest(session.predict(table(newest)), scores) < 1e-6


def test_context_histories_are_cut_before_they_are_repeated_and_bounded(
    exported: Path, session: hb.InferenceSession, running: Running
) -> None:
    """A history of 1,000 entries costs what the network reads of it."""
    assert session.model.graph["lengths"] == {"clicks": LENGTH, "words": LENGTH}
    asked = draw(9, 10)
    candidates = {name: asked[name] for name in ("item", "word", "price")}
    context = {"user": 1, "clicks": list(range(1000)), "words": [1, 2] * 500}
    newest = {
        "user": 1,
        "clicks": list(range(1000 - LENGTH, 1000)),
        "words": [1, 2] * (LENGTH // 2),
    }
    scores = session.predict(candidates, context)
    assert scores.tolist() == session.predict(candidates, newest).tolist()
    num_entries = 2 * LENGTH * 9
    bounded = hb.InferenceSession(exported, most_entries=num_entries)
    assert bounded.predict(candidates, context).tolist() == scores.tolist()
    bounded = hb.InferenceSession(exported, most_entries=num_entries - 1)
    for columns, shared in ((candidates, context), (table(draw(9, 10, LENGTH)), None)):
        with pytest.raises(RequestTooLarge, match=r"at most 71 entries .* got 72 for 9"):
            bounded.predict(columns, shared)


def test_server_bounds_the_entries_of_a_request(running: Running) -> None:
    asked = draw(MOST_ROWS + 1, 11)
    candidates = {name: asked[name] for name in ("item", "word", "price")}
    context = {"user": 1, "clicks": list(range(LENGTH)), "words": [1, 2, 3, 4]}
    with hb.Client(f"http://{running.http}") as client:
        few = {name: values[:-1] for name, values in candidates.items()}
        assert client.predict("m", few, context).shape == (MOST_ROWS,)
        with pytest.raises(RequestTooLarge, match="raise request_entries of the server"):
            client.predict("m", candidates, context)
    whole = {**asked, "clicks": [context["clicks"]] * len(asked["item"])}
    whole["words"] = [context["words"]] * len(asked["item"])
    with pytest.raises(InferenceServerException, match="raise request_entries of the server"):
        by_triton(running, "grpc", whole)


class Counting(Own):
    """Reads how long a history is, so that no part of it may be cut."""

    def forward(self, batch: hb.Batch) -> Tensor:
        bounds = batch.ids["clicks"].offsets
        lengths: Tensor = bounds[1:] - bounds[:-1]
        return super().forward(batch) + lengths / 100


def test_history_that_is_read_in_another_way_is_not_cut() -> None:
    network = Counting(SCHEMA, hb.make_tables(SCHEMA, dim=4)).eval()
    half = _DenseHalf(network, SCHEMA, lambda outputs: outputs)
    assert read_lengths(half, half.record()) == {"words": LENGTH}


def test_request_with_a_long_context_is_not_scored_on_the_loop() -> None:
    """The loop reads nothing while it scores."""
    bag = pa.array([list(range(1000))], pa.large_list(pa.int64()))
    text = pa.array(["|".join(["word"] * 900)])

    async def is_small(num_rows: int, context: dict[str, Any]) -> bool:
        candidates = Candidates(num_rows, {"item": np.arange(num_rows)}, context)
        return QueuedRequest(DecodedRequest(candidates, lambda scores: scores)).is_small

    for context in ({"clicks": bag}, {"words": text}):
        assert asyncio.run(is_small(1, context))
        assert not asyncio.run(is_small(256, context))
