# SPDX-License-Identifier: Apache-2.0
"""Networks that look at sequences are served with their training scores, and a lookup that is no
feature is refused.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from any_batch import check_any_batch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError, DataError, HotbedError

SCHEMA = hb.Schema(
    [
        hb.Label("label"),
        hb.Id("item"),
        hb.Id("history", table="item", pooling="none", max_length=4),
        hb.Id("tags", pooling="none", transforms=[hb.transforms.Split("|")]),
        hb.Id("user"),
        hb.Dense("price"),
    ]
)


class Attention(nn.Module):
    """Items of a history weighed by their likeness to the candidate; sums over a sequence by
    differences of running sums.
    """

    def __init__(self, tables: dict[str, hb.Table]) -> None:
        super().__init__()
        self.item, self.tags = hb.Embedding(tables["item"]), hb.Embedding(tables["tags"])
        self.user = hb.EmbeddingBag(tables["user"])
        self.out = nn.Linear(4 * 4 + 1, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        item, history = self.item(batch.ids["item"]), self.item(batch.ids["history"])
        starts = batch.ids["history"].offsets
        owner = (torch.arange(history.shape[0]).unsqueeze(1) >= starts[1:].unsqueeze(0)).sum(1)
        weight = torch.exp((history * item[owner]).sum(1, keepdim=True))
        liked = sums(weight * history, starts) / (sums(weight, starts) + 1)
        tags = sums(self.tags(batch.ids["tags"]), batch.ids["tags"].offsets)
        price = torch.as_tensor(batch.dense["price"]).unsqueeze(1)
        logits: Tensor = self.out(
            torch.cat([item, liked, tags, self.user(batch.ids["user"]), price], dim=1)
        ).squeeze(1)
        return logits


def sums(rows: Tensor, offsets: Tensor) -> Tensor:
    running = torch.cat([rows.new_zeros(1, rows.shape[1]), torch.cumsum(rows, 0)])
    return running[offsets[1:]] - running[offsets[:-1]]


def columns(n: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "item": draw.integers(0, 40, n),
        "history": [draw.integers(0, 40, draw.integers(0, 7)).tolist() for _ in range(n)],
        "tags": [
            "|".join(f"t{one}" for one in draw.integers(0, 9, draw.integers(0, 4)))
            for _ in range(n)
        ],
        "user": draw.integers(0, 30, n),
        "price": draw.random(n).astype(np.float32),
    }


@pytest.fixture(scope="module")
def model() -> hb.RecModel:
    torch.manual_seed(0)
    model = hb.RecModel(Attention(hb.make_tables(SCHEMA, dim=4)), "bce", hb.Adam(lr=0.02))
    data = {**columns(300, 0), "label": np.random.default_rng(1).integers(0, 2, 300)}
    model.fit(hb.Dataset(hb.sources.Memory(data), SCHEMA, 50), progress=False)
    return model


@pytest.fixture(scope="module")
def session(model: hb.RecModel, tmp_path_factory: pytest.TempPathFactory) -> hb.InferenceSession:
    path: Path = tmp_path_factory.mktemp("sequences") / "exported"
    model.export(path)
    return hb.InferenceSession(path)


def expected(model: hb.RecModel, asked: dict[str, Any]) -> np.ndarray:
    data = {**asked, "label": np.zeros(len(asked["item"]))}
    found: np.ndarray = model.predict(hb.Dataset(hb.sources.Memory(data), SCHEMA, 50))
    return found


@pytest.mark.parametrize("n", [1, 2, 60])
def test_a_network_over_sequences_is_served_with_its_training_score(
    n: int, model: hb.RecModel, session: hb.InferenceSession
) -> None:
    asked = columns(n, 5)
    found = session.predict(asked)
    assert np.abs(found - expected(model, asked)).max() < 1e-6
    assert n == 1 or found.std() > 0


def test_a_history_in_the_context_is_every_candidates(
    model: hb.RecModel, session: hb.InferenceSession
) -> None:
    asked = columns(20, 6)
    for history in ([3, 8, 1], []):
        one = pa.array([history], pa.list_(pa.int64()))
        rest = {name: values for name, values in asked.items() if name not in ("history", "user")}
        repeated = {**rest, "history": one.take(pa.array([0] * 20)), "user": [5] * 20}
        found = session.predict(rest, context={"history": one, "user": 5})
        assert np.abs(found - expected(model, repeated)).max() < 1e-6


def test_what_the_network_takes_one_of_must_be_there(session: hb.InferenceSession) -> None:
    asked = columns(3, 7)
    with pytest.raises(DataError, match="'item': the network takes one id a candidate"):
        session.predict({**asked, "item": pa.array([1, None, 3])})


def test_a_lookup_of_ids_that_are_no_feature_is_refused(model: hb.RecModel, tmp_path: Path) -> None:
    class Shifted(Attention):
        def forward(self, batch: hb.Batch) -> Tensor:
            rows: Tensor = self.item(batch.ids["item"].values + 1)
            return rows.sum(1)

    shifted = hb.RecModel(Shifted(model.tables), "bce", hb.Adam(lr=0.02))
    shifted.fit(
        hb.Dataset(hb.sources.Memory({**columns(50, 0), "label": np.zeros(50)}), SCHEMA, 50),
        progress=False,
    )
    with pytest.raises(ConfigError, match=r"Embedding must look up features of the schema"):
        shifted.export(tmp_path / "exported")


def test_a_network_of_a_fixed_size_is_refused(tmp_path: Path) -> None:
    class Fixed(Attention):
        def forward(self, batch: hb.Batch) -> Tensor:
            rows = self.tags(batch.ids["tags"])
            return self.item(batch.ids["item"]).sum(1) + rows.sum() / float(len(rows))

    fixed = hb.RecModel(Fixed(hb.make_tables(SCHEMA, dim=4)), "bce", hb.Adam(lr=0.02))
    fixed.fit(
        hb.Dataset(hb.sources.Memory({**columns(50, 0), "label": np.zeros(50)}), SCHEMA, 50),
        progress=False,
    )
    with pytest.raises(HotbedError, match="export:"):
        fixed.export(tmp_path / "exported")


class BothPoolings(nn.Module):
    """Two networks over histories that have no length: the mean of their logits."""

    def __init__(self, schema: hb.Schema) -> None:
        super().__init__()
        tables = hb.make_tables(schema, dim=4)
        self.networks = nn.ModuleList(
            hb.models.DIN(
                schema, tables, histories={"history": "item"}, attention=kind, hidden=(8,)
            )
            for kind in ("dot", "decay")
        )

    def forward(self, batch: hb.Batch) -> Tensor:
        return torch.stack([network(batch) for network in self.networks]).mean(0)


def test_packed_histories_of_any_length_are_served_with_their_training_score(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    schema = hb.Schema(
        [hb.Label("label"), hb.Id("item"), hb.Id("history", table="item", pooling="none")]
    )
    draw = np.random.default_rng(0)
    data = {"item": draw.integers(0, 40, 300), "label": draw.integers(0, 2, 300)}
    data["history"] = [draw.integers(0, 40, draw.integers(0, 9)).tolist() for _ in range(300)]  # type: ignore[assignment]
    model = hb.RecModel(BothPoolings(schema), "bce", hb.Adam(lr=0.02))
    model.fit(hb.Dataset(hb.sources.Memory(data), schema, 50), progress=False)
    session = hb.InferenceSession(model.export(tmp_path / "exported"))
    histories = [draw.integers(0, 45, length).tolist() for length in (1000, 0, 3, 250, 0)]
    asked = {"item": [1, 2, 3, 44, 5], "history": histories, "label": [0] * 5}
    dataset = hb.Dataset(hb.sources.Memory(asked), schema, 5)
    found = session.predict({"item": asked["item"], "history": histories})
    np.testing.assert_allclose(found, model.predict(dataset), rtol=0, atol=1e-6)
    assert len(set(found.tolist())) == 5
    check_any_batch(session, {"item": asked["item"], "history": histories})
    of_all = session.predict({"item": [1, 2]}, context={"history": histories[0]})
    np.testing.assert_allclose(of_all[0], found[0], rtol=0, atol=1e-6)


def test_histories_that_all_candidates_share_enter_the_graph_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One history has one column, and the other has two side by side."""
    torch.manual_seed(0)
    names = {"item_history": "item", "brand_history": "brand", "shop_history": "shop"}
    sequences = [hb.Id(name, table=table, pooling="none") for name, table in names.items()]
    ids = [hb.Id("item"), hb.Id("shop"), hb.Id("brand")]
    schema = hb.Schema([hb.Label("label"), *ids, *sequences])
    histories = [{"item_history": "item"}, {"shop_history": "shop", "brand_history": "brand"}]
    tables = hb.make_tables(schema, dim=4)
    network = hb.models.DIN(
        schema, tables, histories=histories, length=20, attention="dot", hidden=(8,)
    )
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.02))
    draw = np.random.default_rng(0)

    def lists(lengths: Any) -> list[list[int]]:
        return [draw.integers(0, 40, length).tolist() for length in lengths]

    data: dict[str, Any] = {name: draw.integers(0, 40, 100) for name in names.values()}
    for columns in histories:
        lengths = draw.integers(0, 9, 100)
        data |= {name: lists(lengths) for name in columns}
    data["label"] = draw.integers(0, 2, 100)
    model.fit(hb.Dataset(hb.sources.Memory(data), schema, 50), progress=False)
    session = hb.InferenceSession(model.export(tmp_path / "exported"))
    graph = session._session
    fed: dict[str, Any] = {}

    def run(outputs: list[str], feeds: dict[str, Any]) -> Any:
        fed.update(feeds)
        return graph.run(outputs, feeds)

    monkeypatch.setattr(session, "_session", SimpleNamespace(run=run))
    candidates = {"item": [1, 2, 44, 5, 6], "shop": [5, 4, 3, 2, 1], "brand": [7, 7, 44, 1, 2]}
    for length in (0, 1, 16, 19, 70):
        context = dict(zip(names, lists([length, 33, 33]), strict=True))
        repeated = {name: [values] * 5 for name, values in context.items()}
        asked = hb.sources.Memory({**candidates, **repeated, "label": [0] * 5})
        expected = model.predict(hb.Dataset(asked, schema, 5))
        shared = session.predict(candidates, context)
        np.testing.assert_allclose(shared, expected, rtol=0, atol=1e-6)
        rows = {name.split("/")[2]: len(fed[name]) for name in fed if name.count("/") == 2}
        assert rows == {"item_history": min(length, 20), "brand_history": 20, "shop_history": 20}

        item_history = {"item_history": context["item_history"]}
        of_each = {**candidates, **{name: repeated[name] for name in histories[1]}}
        np.testing.assert_array_equal(session.predict(of_each, item_history), shared)
        check_any_batch(session, candidates | repeated)


@pytest.mark.soak  # the test above has a history of two columns
def test_columns_of_one_history_are_served_side_by_side(tmp_path: Path) -> None:
    torch.manual_seed(0)
    history = {"shop_history": "shop", "item_history": "item"}
    sequences = [
        hb.Id(name, table=of, pooling="none", max_length=4) for name, of in history.items()
    ]
    schema = hb.Schema([hb.Label("label"), hb.Id("item"), hb.Id("shop"), *sequences])
    tables = hb.make_tables(schema, dim=4)
    network = hb.models.DIN(schema, tables, histories=history, attention="dot", hidden=(8,))
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.02))
    entries = [[1, 2], [], [3, 4, 5, 6, 7, 8], [2]]
    data: dict[str, Any] = {
        "item": [1, 2, 3, 4],
        "shop": [8, 7, 6, 5],
        "item_history": entries,
        "shop_history": [[10 + entry for entry in of_row] for of_row in entries],
        "label": [1, 0, 1, 0],
    }
    dataset = hb.Dataset(hb.sources.Memory(data), schema, 4)
    model.fit(dataset, epochs=3, progress=False)
    exported = model.export(tmp_path / "exported")
    scores = hb.InferenceSession(exported).predict({**data, "label": [0] * 4})
    np.testing.assert_allclose(scores, model.predict(dataset), rtol=0, atol=1e-6)
