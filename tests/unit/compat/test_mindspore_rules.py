# SPDX-License-Identifier: Apache-2.0
"""What mindspore_parameters.yaml says holds, where test_mindspore_page.py does not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from parameter_pages import MINDSPORE

import hotbed as hb
from hotbed.compat import mindspore_rec as ms


class Steps:
    """A lookup that learns by plain gradient descent, one step for each call."""

    def __init__(self, **arguments: Any) -> None:
        self.lookup = ms.HashEmbeddingLookup(2, rule=hb.Sgd(lr=1.0), **arguments)
        self.optimizer = hb.SparseOptimizer(self.lookup)

    @property
    def values(self) -> ms.MapParameter:
        return self.lookup.embedding_table

    def __call__(self, *keys: int) -> list[float]:
        rows = self.lookup(torch.tensor(keys))
        if rows.requires_grad:
            rows.sum().backward()
        self.optimizer.step()
        return rows[:, 0].tolist()


def values(**arguments: Any) -> ms.MapParameter:
    return ms.MapParameter(value_shape=2, **({"default_value": "ones"} | arguments))


# --- RecModel ---------------------------------------------------------------------------------------


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.weight(x).squeeze(-1)


def test_unknown_arguments_are_errors() -> None:
    for name in ("loss_scale_manager", "keep_batchnorm_fp32", "anything"):
        with pytest.raises(TypeError, match=name):
            ms.RecModel(Line(), "bce", "adam", **{name: None})


def test_data_may_train_several_models() -> None:
    data = [(torch.ones(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))] * 3
    for _ in range(2):
        model = ms.RecModel(Line(), "bce", "adam")
        model.online_train(data, dataset_sink_mode=False)
        assert model.engine.counters["steps"] == 3


def test_large_batches() -> None:
    batch = (torch.ones(1 << 16, 1), torch.ones(1 << 16))
    model = ms.RecModel(Line(), "bce", "adam")
    model.online_train([batch], dataset_sink_mode=False)
    assert model.engine.counters["samples"] == 1 << 16


# --- HashEmbeddingLookup ----------------------------------------------------------------------------


def test_any_integer_is_a_key() -> None:
    keys = (-1, -2, 0, -(2**63), 2**63 - 1)
    step = Steps(param_init="ones")
    assert step(*keys) == [1.0] * 5
    assert step(*keys) == [0.0] * 5


def test_initial_values() -> None:
    assert Steps(param_init="zeros")(7) == [0.0]
    assert Steps(param_init="ones")(7) == [1.0]
    assert Steps(param_init=2.5)(7) == [2.5]
    drawn = ms.HashEmbeddingLookup(1000)(torch.tensor([7])).detach()
    assert float(drawn.std()) == pytest.approx(0.01, rel=0.1)
    with pytest.raises(ValueError, match="normal"):
        Steps(param_init="normall")


def test_max_norm() -> None:
    rows = ms.HashEmbeddingLookup(2, param_init="ones", max_norm=0.5)(torch.tensor([7]))
    assert float(rows.detach().norm()) == pytest.approx(0.5)


def test_permit_counts_steps() -> None:
    step = Steps(param_init="ones", permit_filter_value=3)
    assert step(7, 7, 7, 7) == [1.0] * 4  # four times in one step count once
    assert step(7) == [1.0]
    assert len(step.values) == 0
    step(7)
    assert len(step.values) == 1
    assert step(7) == [0.0]


def test_evict_counts_steps() -> None:
    step = Steps(evict_filter_value=3)
    step(1)
    for _ in range(3):
        step(2)
    assert step.values.export_data().keys.tolist() == [2]


def test_eviction_runs_at_export() -> None:
    step = Steps(evict_filter_value=2)
    step(1)
    for _ in range(9):
        step(2)
    assert len(step.values) == 2
    step.values.export_data()
    assert len(step.values) == 1


def test_cache_size() -> None:
    step = Steps(param_init="ones", vocab_cache_size=2)
    assert step(1, 2, 3) == [1.0] * 3  # a size never binds


def test_values_are_float32() -> None:
    assert Steps().lookup(torch.tensor([1])).dtype == torch.float32
    with pytest.raises(ValueError, match="value_dtype"):
        values(value_dtype="float16")


# --- MapParameter -----------------------------------------------------------------------------------


def test_get_inserts() -> None:
    table = values()
    assert table.get(torch.tensor([1, 2])).tolist() == [[1.0, 1.0]] * 2
    assert len(table) == 2


def test_get_without_inserting() -> None:
    table = values()
    assert table.get(torch.tensor([1]), insert_default_value=False).tolist() == [[1.0, 1.0]]
    assert len(table) == 0


def test_put_and_erase() -> None:
    table = values()
    for number in range(100):  # the same rows again and again
        table.put(torch.tensor([1, 2]), torch.full((2, 2), float(number)))
        assert table.get(torch.tensor([2])).tolist() == [[number, number]]
        table.erase(torch.tensor([1, 2]))
        assert len(table) == 0


def exported(table: ms.MapParameter, *, incremental: bool) -> tuple[dict[int, Any], list[int]]:
    """Return the values by key, and the keys that were erased."""
    keys, rows, statuses = table.export_data(incremental)
    modified = dict(zip(keys.tolist()[: len(rows)], rows.tolist(), strict=True))
    return modified, keys[statuses == 2].tolist()


def test_export() -> None:
    table = values()
    table.put(torch.tensor([1, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert exported(table, incremental=False) == ({1: [1.0, 2.0], 2: [3.0, 4.0]}, [])


def test_incremental_export() -> None:
    table = values()
    table.put(torch.tensor([1, 2, 3]), torch.ones(3, 2))
    exported(table, incremental=False)
    table.put(torch.tensor([2]), torch.zeros(1, 2))
    table.erase(torch.tensor([3]))
    assert exported(table, incremental=True) == ({2: [0.0, 0.0]}, [3])
    assert exported(table, incremental=True) == ({}, [])


def test_incremental_export_of_erased_keys() -> None:
    table = values()
    table.put(torch.tensor([1]), torch.ones(1, 2))
    exported(table, incremental=False)
    table.erase(torch.tensor([1]))
    assert exported(table, incremental=True) == ({}, [1])


def test_export_of_admitted_keys() -> None:
    step = Steps(permit_filter_value=2)
    step(1, 2)
    step(1)
    assert step.values.export_data().keys.tolist() == [1]


def test_import() -> None:
    table, other = values(), values()
    table.put(torch.tensor([1, 2]), torch.zeros(2, 2))
    other.import_data(table.export_data())
    table.erase(torch.tensor([1]))
    other.import_data(table.export_data(incremental=True))
    assert other.get_keys().tolist() == [2]
    assert np.array_equal(other.get_values().asnumpy(), np.zeros((1, 2)))


def test_environment_is_not_read() -> None:
    section = next(s for s in MINDSPORE.sections if s["title"].startswith("Embedding cache"))
    door = Path(ms.__file__).parent
    text = "".join(path.read_text() for path in door.rglob("*.py"))
    assert [name for name in section["names"] if name in text] == []
    assert "environ" not in text
