# SPDX-License-Identifier: Apache-2.0
"""The classes that docs/extending.md prints keep the promises of those that come with Hotbed."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.errors import DataError

PAGE = (Path(__file__).resolve().parents[2] / "docs/extending.md").read_text()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's blocks define, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    user = rng.integers(0, 20, 400)
    source = hb.sources.Memory({"y": (rng.random(400) < user / 20).astype(int), "user": user})
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    data = hb.Dataset(source, schema, 50)
    defined: dict[str, Any] = {"schema": schema, "train": data, "valid": data, "test": data}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, defined)
    return defined


def test_own_transform_learns_in_parts_and_is_kept_with_the_schema(page: dict[str, Any]) -> None:
    fitted = page["fitted"]
    assert fitted["price"].transforms[0] == page["Unit"](largest=8.0)
    batch = hb.Encoder(hb.Schema.from_json(fitted.to_json()))(
        pa.record_batch({"clicked": [1, 0], "price": [4.0, None]})
    )
    assert batch.dense["price"].tolist() == [0.5, 0.0]
    parts = [page["Largest"](), page["Largest"]()]
    for learner, values in zip(parts, ([1.0, None], [-3.0, 2.0]), strict=True):
        learner.add(pa.array(values), None)
    parts[0].merge(parts[1])
    assert parts[0].learned() == 3.0


def test_own_metric_has_all_methods_and_resumes_from_its_state(page: dict[str, Any]) -> None:
    kind = page["BrierScore"]
    rng = np.random.default_rng(1)
    prediction, label, weight = rng.random(100), rng.integers(0, 2, 100), rng.random(100)
    whole, stopped = kind(), kind()
    whole.update(prediction, label, weight)
    stopped.update(prediction[:40], label[:40], weight[:40])
    resumed = kind()
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    resumed.update(prediction[40:], label[40:], weight[40:])
    assert resumed.eval() == pytest.approx(whole.eval())
    assert whole.eval() == pytest.approx(
        float(np.average((prediction - label) ** 2, weights=weight))
    )
    whole.clear()
    assert np.isnan(whole.eval())
    assert type(hb.metrics.get_metric("brier_score")) is kind
    model = hb.RecModel(page["model"].network, "bce", "adam", {"brier_score"})
    assert 0 < model.online_train(page["train"], progress=False).metrics["brier_score"] < 0.5
    windowed = hb.metrics.Windowed(kind(), samples=50)
    windowed.update(prediction, label)
    assert windowed.eval() == pytest.approx(float(np.mean((prediction[50:] - label[50:]) ** 2)))


def test_an_own_source_keeps_the_promises_of_every_source(page: dict[str, Any]) -> None:
    source = page["clicks"]

    def rows(position: Any = None, batch_rows: int = 90, **plan: Any) -> list[dict[str, Any]]:
        reader = source.read(position, batch_rows, hb.sources.ReadPlan(**plan))
        return [row for batch, _ in reader for row in batch.to_pylist()]

    with sqlite3.connect("clicks.db") as connection:
        connection.execute("DELETE FROM clicks WHERE rowid % 10 = 3")
    whole = rows()
    assert len(whole) == source.num_rows() == 450
    assert rows(batch_rows=7) == whole
    done = 0
    for batch, position in source.read(batch_rows=64):
        assert batch.schema.equals(source.schema())
        done += batch.num_rows
        assert rows(hb.sources.Position.from_json(json.dumps(position.to_json()))) == whole[done:]
    assert rows(columns=("item",)) == [{"item": row["item"]} for row in whole]


def test_wrong_position_is_an_error_that_says_what_to_yield(page: dict[str, Any]) -> None:
    class Careless(page["Sqlite"]):
        def read(self, *arguments: Any) -> Any:
            return ((batch, position.to_json()) for batch, position in super().read(*arguments))

    data = hb.Dataset(Careless("clicks.db", "clicks"), page["columns"])
    with pytest.raises(
        DataError, match=r"Careless.read: .*got dict. Yield \(batch, hb.sources.Position\(\{…\}\)\)"
    ):
        list(data)
