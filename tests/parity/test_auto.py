# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch models learn the same before and after `hb.auto`. Each file of `models/` is one.

A file has a model, its optimizer, a batch and a step, as a PyTorch user writes them. Each test runs
them twice, once converted; nothing else differs.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from schedule import in_soak
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.modules import TableModule, table_modules

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]

MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.py"))

OF_EACH_OPTIMIZER = {
    "accumulation",
    "bert4rec",
    "computed_ids",
    "dataclass_batch",
    "dlrm",
    "hashing_trick",
    "keyword_arguments",
    "matrix_factorization",
    "module_dict",
    "two_optimizers",
    "weight_sharing",
}
"""A model of each optimizer, whose state a conversion carries over, and one that shares weights."""

# Embeddings that stay as they are; all others of `named_modules()` move.
KEPT = {"tied_output": {"items"}}


@dataclass(frozen=True)
class Run:
    """The losses of a run, and the rows of each embedding at its end."""

    losses: Tensor
    rows: dict[str, Tensor]

    def difference(self, other: Run) -> float:
        """Return the largest relative difference of a loss or a row from the other run's."""
        losses = (self.losses - other.losses).abs() / other.losses.abs()
        return max([losses.max().item(), *(self.row_differences(other).values())])

    def row_differences(self, other: Run) -> dict[str, float]:
        """Return the largest distance of a row, relative to a row's usual norm, by embedding."""
        found = {}
        for path, expected in other.rows.items():
            distances = (self.rows[path] - expected).norm(dim=1)
            usual = expected.norm(dim=1).square().mean().sqrt()
            found[path] = (distances.max() / usual).item()
        return found


@functools.cache
def first_20_steps(name: str) -> Run:
    return run(name, 20)


@pytest.mark.parametrize("name", NAMES)
def test_first_20_steps_agree(name: str) -> None:
    assert run(name, 20, convert=0).difference(first_20_steps(name)) <= 1e-6


@pytest.mark.parametrize("name", in_soak(NAMES, quick=OF_EACH_OPTIMIZER))
def test_conversion_after_10_steps_changes_nothing(name: str) -> None:
    assert run(name, 20, convert=10).difference(first_20_steps(name)) <= 1e-6


@pytest.mark.parametrize("name", ["computed_ids", "gru4rec", "sample_weights", "siamese"])
def test_mapping_ahead_changes_no_bit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Models whose ids are computed, packed, weighted, and looked up twice."""
    expected = run(name, 8, convert=0)
    with caplog.at_level(logging.INFO, "hotbed"):
        result = run(name, 8, convert=0, ahead=True)
    assert "no batch is mapped ahead" not in caplog.text
    assert torch.equal(result.losses, expected.losses)
    assert all(torch.equal(rows, expected.rows[path]) for path, rows in result.rows.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", in_soak(NAMES, quick={"computed_ids"}))
def test_200_steps_differ_as_another_order_of_sums(name: str) -> None:
    """The ruler is the torch model against itself with the samples of each batch in reverse.

    Another number of threads changes the order of sums as well, but in half of these models only,
    since most sums are small; where it does, the difference is as large.
    """
    expected = run(name, 200, dropout=False)
    noise = run(name, 200, dropout=False, reverse=True).difference(expected)
    result = run(name, 200, dropout=False, convert=0)
    assert result.difference(expected) <= 3 * noise


def run(
    name: str,
    steps: int,
    *,
    convert: int | None = None,
    reverse: bool = False,
    dropout: bool = True,
    ahead: bool = False,
) -> Run:
    """Learn `steps` batches of a model, always from the same start.

    Args:
        name: of the file.
        steps: number of batches.
        convert: the step before which the model is converted; None = it is not.
        reverse: whether the samples of each batch are in reverse.
        dropout: whether there is any.
        ahead: whether ids are mapped ahead; the model is then converted before the first step.
    """
    source = load(name)
    torch.manual_seed(0)
    model = source.make_model()
    if not dropout:
        switch_dropout_off(model)
    sizes = {
        path: module.num_embeddings
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    optimizer = source.make_optimizer(model)
    batches = [source.make_batch() for _ in range(steps)]
    if reverse:
        batches = [reversed_samples(batch) for batch in batches]
    losses = []
    if convert == 0:
        model, optimizer = converted(model, optimizer, set(sizes), KEPT.get(name, set()))
    if ahead:
        batches = hb.Ahead(batches, model, torch_threads=1)
    for number, batch in enumerate(batches):
        if number and number == convert:
            model, optimizer = converted(model, optimizer, set(sizes), KEPT.get(name, set()))
        torch.manual_seed(number)
        losses.append(source.train_step(model, optimizer, batch))
    return Run(torch.stack(losses).double(), rows_of(model, sizes))


def converted(
    model: nn.Module, optimizer: Any, paths: set[str], kept: set[str]
) -> tuple[nn.Module, Any]:
    """Convert a model; its report accounts for every embedding."""
    model, optimizer, report = hb.auto(model, optimizer)
    assert {entry.path for entry in report.kept} == kept
    assert {entry.path for entry in report.moved} == paths - kept
    assert len(table_modules(model)) == len(paths - kept)
    return model, optimizer


def load(name: str) -> ModuleType:
    """Import a file of `models/`."""
    full_name = f"parity_models_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, MODELS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module  # dataclasses look for it
        spec.loader.exec_module(module)
    return sys.modules[full_name]


def rows_of(model: nn.Module, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return the rows of each embedding by its path."""
    rows = {}
    for path, num_rows in sizes.items():
        module = model.get_submodule(path)
        if isinstance(module, TableModule):
            rows[path] = torch.from_numpy(module.tables[0].lookup(np.arange(num_rows))).double()
        else:
            rows[path] = module.weight.detach().double()
    return rows


def switch_dropout_off(model: nn.Module) -> None:
    """Dropout drops other values of a sample in another place."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def reversed_samples(batch: Any) -> Any:
    """Return a batch with its samples in reverse."""
    if isinstance(batch, Tensor):
        return batch.flip(0)
    if is_dataclass(batch):
        parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return replace(batch, **reversed_samples(parts))
    if isinstance(batch, dict):
        parts = {name: reversed_samples(part) for name, part in batch.items()}
        if "offsets" in batch:
            parts["offsets"] = reversed_offsets(batch["offsets"], len(batch["values"]))
        return parts
    return type(batch)(reversed_samples(part) for part in batch)


def reversed_offsets(offsets: Tensor, total: int) -> Tensor:
    """Return the offsets of the same bags in reverse, with or without the last offset."""
    if offsets[-1] == total:
        return total - offsets.flip(0)
    ends = torch.cat([offsets[1:], torch.tensor([total])])
    return total - ends.flip(0)
