# SPDX-License-Identifier: Apache-2.0
"""Train, save, load in a new process: the same predictions bit for bit; a damaged checkpoint is
refused by name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from forked import SERVER

import hotbed as hb
from hotbed.errors import ConfigError, FormatError

torch.set_num_threads(1)  # the networks here are tiny: threads would only wait for each other


def predicted(model: str, test: str) -> np.ndarray:
    """Return the scores of a saved model."""
    torch.set_num_threads(1)
    loaded = hb.load(model)
    scores: np.ndarray = loaded.predict(hb.Dataset(hb.sources.Parquet(test), loaded.schema, 100))
    return scores


def events(path: Path, rows: int, seed: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 60, rows), rng.integers(0, 90, rows)
    tags = [
        "|".join(str(tag) for tag in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(rows)
    ]
    columns = {
        "user": [f"u{u}" for u in user],
        "item": item,
        "tags": tags,
        "price": rng.gamma(2.0, 5.0, rows),
        "y": ((user * 7 + item * 3) % 10 > 4).astype(int),
        "t": 1_000_000 + np.arange(rows),
    }
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def trained(tmp_path: Path) -> tuple[hb.RecModel, Path]:
    """A model with admission, eviction, fitted transforms and Adam state, and the path it was saved
    to.
    """
    source = hb.sources.Parquet(str(events(tmp_path / "train.parquet", 2000, 0)))
    price = hb.Dense("price", transforms=(hb.transforms.Log(), hb.transforms.Normalize()))
    tags = hb.Id("tags", transforms=(hb.transforms.Split("|"),), pooling="mean")
    schema = hb.Schema(
        [hb.Label("y"), hb.Time("t"), hb.Id("user"), hb.Id("item"), tags, price]
    ).fit(source)
    tables = hb.make_tables(
        schema,
        4,
        rule=hb.Adam(lr=0.01),
        evict=hb.Ttl(seconds=1500),
        overrides={"item": {"admit": hb.MinCount(3), "rule": hb.Adagrad(lr=0.1)}},
    )
    torch.manual_seed(0)
    network = hb.models.DeepFM(schema, tables, hidden=(16,), batch_norm=True)
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.01), ["auc"])
    model.fit(
        hb.Dataset(source, schema, 100),
        callbacks=hb.callbacks.Evict(step_interval=5),
        progress=False,
    )
    model.save(tmp_path / "model")
    return model, tmp_path / "model"


def test_a_new_process_predicts_the_same_bits(trained: Any, tmp_path: Path) -> None:
    model, path = trained
    test = events(tmp_path / "test.parquet", 500, 1)  # with users and items that have no rows
    here = model.predict(hb.Dataset(hb.sources.Parquet(str(test)), model.schema, 100))
    there = SERVER.call(predicted, str(path), str(test))
    np.testing.assert_array_equal(here.view(np.int32), there.view(np.int32))


def test_a_loaded_model_goes_on_as_if_it_had_never_stopped(trained: Any, tmp_path: Path) -> None:
    model, path = trained
    loaded = hb.load(path)
    more = str(events(tmp_path / "more.parquet", 600, 2))
    test = hb.sources.Parquet(str(events(tmp_path / "test.parquet", 300, 3)))
    scores = []
    for one in (model, loaded):
        one.fit(hb.Dataset(hb.sources.Parquet(more), one.schema, 100), progress=False)
        scores.append(one.predict(hb.Dataset(test, one.schema, 100)))
    np.testing.assert_array_equal(scores[0].view(np.int32), scores[1].view(np.int32))
    first, second = (one.learner.dense.state_dict() for one in (model, loaded))
    assert first["param_groups"] == second["param_groups"]
    for number, entries in first["state"].items():
        assert all(
            torch.equal(
                torch.as_tensor(entries[key]), torch.as_tensor(second["state"][number][key])
            )
            for key in entries
        )
    for name, table in model.tables.items():
        assert list(table.export()) == list(loaded.tables[name].export())
        assert table.scalars() == loaded.tables[name].scalars()
    assert model.counters == loaded.counters
    assert loaded.parent == model.parent


def test_each_damaged_file_is_refused_by_name(trained: Any, tmp_path: Path) -> None:
    _, path = trained
    for file in sorted(path.rglob("*")):
        if not file.is_file():
            continue
        for damage in ("flip", "tear", "lose"):
            copy = tmp_path / "copy"
            shutil.copytree(path, copy)
            bad = copy / file.relative_to(path)
            data = bytearray(bad.read_bytes())
            data[len(data) // 3] ^= 4
            bad.write_bytes(data if damage == "flip" else data[: len(data) // 2])
            if damage == "lose":
                bad.unlink()
            with pytest.raises(
                FormatError,
                match="no checkpoint" if (damage, file.name) == ("lose", "CURRENT") else file.name,
            ):
                hb.load(copy)
            shutil.rmtree(copy)


def test_a_network_of_the_users_own_is_asked_for(tmp_path: Path) -> None:
    def network() -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    data = [(np.ones((4, 2), np.float32), np.ones(4, np.float32))]
    own = network()
    model = hb.RecModel(
        own, "mse", torch.optim.AdamW(own.parameters(), lr=0.02, betas=(0.8, 0.9)), ["calibration"]
    )
    model.fit(data, progress=False)
    model.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="Pass network="):
        hb.load(tmp_path / "model")
    loaded = hb.load(tmp_path / "model", network())
    np.testing.assert_array_equal(model.predict(data), loaded.predict(data))
    assert isinstance(loaded.learner.dense, torch.optim.AdamW)
    assert loaded.learner.dense.param_groups[0]["betas"] == (0.8, 0.9)
