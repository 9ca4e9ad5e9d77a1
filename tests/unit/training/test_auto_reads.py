# SPDX-License-Identifier: Apache-2.0
"""A weight that became a table cannot be read by mistake, wherever a reference to it remained."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.training.auto.lookups import WeightMoved
from hotbed.training.auto.network import converted

IDS = torch.tensor([3, 1, 3])


class Penalized(nn.Module):
    """Keeps a list of what it penalizes, as many published models do."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(5, 2)
        self.penalized = [self.item.weight]

    def forward(self, ids: Tensor) -> Tensor:
        return self.item(ids).sum()

    def penalty(self) -> Tensor:
        return sum((weight.norm() for weight in self.penalized), torch.zeros(()))


def convert() -> tuple[Penalized, torch.optim.Optimizer]:
    model = Penalized()
    model, optimizer, _ = hb.auto(model, torch.optim.Adam(model.parameters()))
    return model, optimizer


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.item.weight + 0,
        lambda model: model.item.weight.requires_grad_(False),
        lambda model: torch.optim.SGD([model.item.weight]),
        lambda model: setattr(model.item, "weight", nn.Parameter(torch.zeros(5, 2))),
        lambda model: model.penalty(),
        lambda model: copy.deepcopy(model).penalty(),
        lambda model: torch.stack(model.penalized),
        lambda model: nn.functional.embedding(IDS, weight=model.penalized[0]),
        lambda model: model.penalized[0].data,
    ],
)
def test_every_read_of_the_weight_names_its_path_and_the_way_out(read: object) -> None:
    model, _ = convert()
    with pytest.raises(WeightMoved, match=r"^item\.weight: .*tables=\{'item': None\}"):
        read(model)


class Asking(nn.Module):
    """Makes tensors of the type and on the device of its embedding, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(5, 2)

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.item.weight
        shift = torch.ones(weight.shape[1], device=weight.device, dtype=weight.dtype)
        shift = shift + weight.new_zeros(2) + weight.requires_grad
        return (self.item(ids.to(weight.device) % weight.size(0)) + shift).sum()


def test_shape_type_and_device_of_the_weight_can_be_asked_for() -> None:
    model = Asking()
    before = model(IDS)
    model, _, report = hb.auto(model, torch.optim.Adam(model.parameters()))
    assert [entry.path for entry in report.moved] == ["item"]
    assert torch.equal(model(IDS), before)
    assert [call.path for call in converted(model).id_graph().calls] == ["item"]
    assert model.item.weight.shape == (5, 2)
    assert [name for name, _ in model.named_parameters()] == ["item.rows_0"]


def test_penalty_over_all_parameters_is_rejected_and_changes_nothing() -> None:
    model, optimizer = convert()
    model(IDS).backward()
    with pytest.raises(
        ConfigError, match=r"pow: a loss cannot read the rows .*'item': 5 rows.*dense"
    ):
        sum(parameter.pow(2).sum() for parameter in model.parameters())
    with pytest.raises(ConfigError, match=r"cat: .*weight_decay"):
        torch.cat(list(model.parameters()))
    optimizer.step()
    assert [table.step for table in model.item.tables] == [1]


def test_what_has_no_gradient_may_look_at_the_parameter() -> None:
    model, _ = convert()
    (rows,) = model.parameters()
    assert (rows.numel(), rows.device.type, rows.dtype) == (0, "cpu", torch.float32)
    assert rows.detach().shape == rows.clone().shape == (0, 2)
    assert rows.data.clone().mul_(2).shape == (0, 2)
    rows.data = rows.data
    with torch.no_grad():
        assert rows.norm() == 0.0


@pytest.mark.parametrize(
    "write",
    [
        nn.init.xavier_uniform_,
        lambda rows: rows.mul_(0.9).add_(rows, alpha=0.1),
        lambda rows: rows.copy_(torch.zeros(0, 2)),
        lambda rows: rows.data.mul_(0.9).add_(rows.data, alpha=0.1),
        lambda rows: rows.data.__isub__(torch.ones(2)),
        lambda rows: rows.data.__setitem__(slice(None), 0.0),
        lambda rows: nn.init.normal_(rows.data),
        nn.init.normal_,
        lambda rows: setattr(rows, "data", torch.zeros(5, 2)),
        lambda rows: setattr(rows, "data", 0.9 * rows.data + 0.1 * rows.data),
    ],
)
def test_rows_cannot_be_written_through_their_parameter(write: object) -> None:
    model, _ = convert()
    (rows,) = model.parameters()
    with torch.no_grad(), pytest.raises(ConfigError, match=r": rows .*'item': 5 rows.*Table"):
        write(rows)


class Ranking(nn.Module):
    """Scores one item, or ranks all of them: where `rank_in` says."""

    def __init__(self, rank_in: str) -> None:
        super().__init__()
        self.user = nn.Embedding(5, 2)
        self.item = nn.Embedding(7, 2)
        self.rank_in = rank_in

    def forward(self, user: Tensor, item: Tensor | None = None) -> Tensor:
        own = self.user(user)
        if item is None or self.rank_in == ("train" if self.training else "eval"):
            return own @ self.item.weight.T
        return (own * self.item(item)).sum(1)


@pytest.mark.parametrize("batch", [None, (IDS, IDS)])
@pytest.mark.parametrize("converted_in", ["train", "eval"])
@pytest.mark.parametrize("rank_in", ["train", "eval", "no item"])
def test_a_weight_that_either_mode_reads_is_kept(
    rank_in: str, converted_in: str, batch: object
) -> None:
    model = Ranking(rank_in).train(converted_in == "train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, report = hb.auto(model, optimizer, batch=batch)
    assert [entry.path for entry in report.moved] == ["user"]
    (entry,) = report.kept
    assert entry.path == "item"
    assert "its weight is read outside a lookup" in entry.reason
    if rank_in in ("train", "eval") and rank_in != converted_in and batch is not None:
        assert entry.reason.endswith(f"in {rank_in} mode")
    assert model.training == (converted_in == "train")
    for training in (True, False):
        model.train(training)
        assert model(IDS).shape == (3, 7)
        model(IDS, IDS)


class Unfollowed(Ranking):
    """Reads a weight, then does what no trace follows."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = self.user(user) @ self.item.weight.T
        return scores + torch.from_numpy(user.numpy() * 0.0).sum()


def test_a_read_before_code_that_no_trace_follows_is_seen() -> None:
    model = Unfollowed("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, report = hb.auto(model, optimizer, batch=(IDS, IDS))
    assert [entry.path for entry in report.kept] == ["item"]
