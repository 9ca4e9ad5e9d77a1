# SPDX-License-Identifier: Apache-2.0
"""A model after `hb.auto` computes what it computed before, lookup by lookup and step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.training.auto import converted

NUM_IDS, DIM = 23, 6

Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]


def sparse_weights(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The sparse weights of a model, and its other parameters."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    weights = [p for p in model.parameters() if id(p) in sparse]
    return weights, [p for p in model.parameters() if id(p) not in sparse]


def adam_and_sparse_adam(model: nn.Module) -> Optimizers:
    weights, others = sparse_weights(model)
    return [torch.optim.SparseAdam(weights, lr=0.01), torch.optim.Adam(others, lr=0.01)]


DENSE: dict[str, Make] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)],
    "sgd decay": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)],
    "nesterov": lambda m: [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    ],
    "adagrad": lambda m: [
        torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1)
    ],
    "adagrad decay": lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1, weight_decay=0.1)],
    "rmsprop": lambda m: [torch.optim.RMSprop(m.parameters(), lr=0.01)],
    "adam": lambda m: [torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01)],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1)],
}
SPARSE: dict[str, Make] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)],
    "sparse adam": adam_and_sparse_adam,
}


class Plain(nn.Module):
    """Ids [n] and [n, k], and the same module called twice."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.user = nn.Embedding(NUM_IDS, DIM, sparse=sparse)
        self.item = nn.Embedding(NUM_IDS, DIM, sparse=sparse)
        self.head = nn.Linear(3 * DIM, 1)

    def forward(self, user: Tensor, item: Tensor, history: Tensor) -> Tensor:
        parts = [self.user(user), self.item(input=item), self.item(history).mean(1)]
        return self.head(torch.cat(parts, 1)).squeeze(1)

    @staticmethod
    def batch(draw: torch.Generator) -> tuple[Any, ...]:
        return ids(draw, 16), ids(draw, 16).int(), ids(draw, 16, 4)


class Padded(nn.Module):
    """padding_idx: a row without gradient, ids that bags leave out, and a bag of padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_IDS, DIM, padding_idx=0)
        self.mean = nn.EmbeddingBag(NUM_IDS, DIM, mode="mean", padding_idx=-1)
        self.max = nn.EmbeddingBag(NUM_IDS, DIM, mode="max", padding_idx=2)
        self.head = nn.Linear(3 * DIM, 1)
        with torch.no_grad():
            self.item.weight[0] = 0.5  # an own row for padding, which must be read and stay

    def forward(self, history: Tensor, tags: Tensor) -> Tensor:
        parts = [self.item(history).sum(1), self.mean(tags), self.max(tags)]
        return self.head(torch.cat(parts, 1)).squeeze(1)

    @staticmethod
    def batch(draw: torch.Generator) -> tuple[Any, ...]:
        tags = ids(draw, 16, 4)
        tags[0] = NUM_IDS - 1
        tags[1] = 2
        return ids(draw, 16, 4) * (ids(draw, 16, 4) % 2), tags


class Bags(nn.Module):
    """Every form of bag: [n, k], offsets with and without the last one, weights that learn."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        options: dict[str, Any] = {"sparse": sparse}
        self.two = nn.EmbeddingBag(NUM_IDS, DIM, mode="mean", **options)
        self.ragged = nn.EmbeddingBag(NUM_IDS, DIM, mode="sum", **options)
        self.ended = nn.EmbeddingBag(
            NUM_IDS, DIM, mode="sum", include_last_offset=True, padding_idx=3, **options
        )
        self.scale = nn.Parameter(torch.rand(NUM_IDS))
        self.head = nn.Linear(3 * DIM, 1)

    def forward(self, two: Tensor, flat: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        ends = torch.cat([offsets, offsets.new_tensor([len(flat)])])
        learned = weights * self.scale[flat]
        parts = [
            self.two(two),
            self.ragged(flat, offsets, per_sample_weights=weights),
            self.ended(flat, ends, learned),
        ]
        return self.head(torch.cat(parts, 1)).squeeze(1)

    @staticmethod
    def batch(draw: torch.Generator) -> tuple[Any, ...]:
        offsets = torch.randint(0, 50, (15,), generator=draw).sort().values
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), offsets])
        return ids(draw, 16, 3), ids(draw, 50), offsets, torch.rand(50, generator=draw)


class Shared(nn.Module):
    """One weight under two modules, one module under two names, and in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_IDS, DIM)
        self.history = nn.EmbeddingBag(NUM_IDS, DIM, mode="sum")
        self.history.weight = self.item.weight
        self.again = self.item
        self.hidden = [self.item]
        self.head = nn.Linear(3 * DIM, 1)

    def forward(self, item: Tensor, history: Tensor, last: Tensor) -> Tensor:
        parts = [self.again(item), self.history(history), self.hidden[0](last)]
        return self.head(torch.cat(parts, 1)).squeeze(1)

    @staticmethod
    def batch(draw: torch.Generator) -> tuple[Any, ...]:
        return ids(draw, 16), ids(draw, 16, 4), ids(draw, 16)


class Frozen(nn.Module):
    """A table of given rows that do not learn."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.linspace(-1, 1, NUM_IDS * DIM).view(NUM_IDS, DIM)
        self.given = nn.Embedding.from_pretrained(rows)
        self.item = nn.Embedding(NUM_IDS, DIM)
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, item: Tensor) -> Tensor:
        return self.head(torch.cat([self.given(item), self.item(item)], 1)).squeeze(1)

    @staticmethod
    def batch(draw: torch.Generator) -> tuple[Any, ...]:
        return (ids(draw, 16),)


class Alternating(nn.Module):
    """An embedding that every other step leaves out: torch takes no step for it then."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_IDS, DIM)
        self.seldom = nn.Embedding(NUM_IDS, DIM)
        self.head = nn.Linear(DIM, 1)
        self.num_calls = 0

    def forward(self, item: Tensor) -> Tensor:
        rows = self.item(item)
        self.num_calls += 1
        if self.num_calls % 2:
            rows = rows + self.seldom(item)
        return self.head(rows).squeeze(1)

    @staticmethod
    def batch(draw: torch.Generator) -> tuple[Any, ...]:
        return (ids(draw, 16),)


class Adversarial(nn.Module):
    """The gradient of rows within a forward pass, rows without one, and a lookup of no ids."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_IDS, DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, item: Tensor) -> Tensor:
        rows = self.item(item)
        (slope,) = torch.autograd.grad(self.head(rows).square().sum(), rows, retain_graph=True)
        with torch.no_grad():
            anchor = self.item(item.flip(0))
        nothing = self.item(item[:0]).sum()
        return self.head(rows + 0.1 * slope.detach() - anchor).squeeze(1) + nothing

    @staticmethod
    def batch(draw: torch.Generator) -> tuple[Any, ...]:
        return (ids(draw, 16),)


MODELS: dict[str, Callable[[], Any]] = {
    "plain": Plain,
    "padded": Padded,
    "bags": Bags,
    "shared": Shared,
    "frozen": Frozen,
    "alternating": Alternating,
    "adversarial": Adversarial,
}


def ids(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, NUM_IDS, shape, generator=draw)


def batches(model: Any, count: int, seed: int = 1) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield model.batch(draw), torch.randint(0, 2, (16,), generator=draw).float()


def learn(
    model: nn.Module,
    optimizers: Optimizers,
    batch: tuple[Any, ...],
    labels: Tensor,
    clip: float | None = None,
) -> tuple[float, float]:
    """One step; return the loss and the norm of all gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(*batch), labels)
    loss.backward()
    norm = 0.0
    if clip is not None:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
    for optimizer in optimizers:
        optimizer.step()
    return loss.item(), norm


def copies(model: nn.Module, optimizers: Optimizers, make: Make) -> tuple[nn.Module, Optimizers]:
    other = copy.deepcopy(model)
    others = make(other)
    for own, original in zip(others, optimizers, strict=True):
        own.load_state_dict(copy.deepcopy(original.state_dict()))
    return other, others


def weights_by_path(model: nn.Module) -> dict[str, np.ndarray]:
    weights = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and "weight" in module._parameters:
            weights[path] = module.weight.detach().numpy()
    state = converted(model)
    if state is not None:
        for path, lookup in state.lookups.items():
            weights[path] = lookup.tables[0].lookup(np.arange(lookup.num_embeddings))
    return weights


def assert_equal_weights(model: nn.Module, other: nn.Module) -> None:
    mine = weights_by_path(model)
    theirs = weights_by_path(other)
    assert mine.keys() == theirs.keys()
    for path, rows in mine.items():
        np.testing.assert_allclose(theirs[path], rows, rtol=1e-5, atol=2e-6, err_msg=path)


def assert_twins(
    model: nn.Module, make: Make, warm_up: int, clip: float | None = None
) -> nn.Module:
    """Train, convert a copy, train both on, and compare; return the converted copy."""
    optimizers = make(model)
    every = list(batches(model, warm_up + 20))
    for batch, labels in every[:warm_up]:
        learn(model, optimizers, batch, labels, clip)
    other, others = copies(model, optimizers, make)
    other, others, _ = hb.auto(other, others)
    assert_equal_weights(model, other)
    for batch, labels in every[warm_up:]:
        expected = learn(model, optimizers, batch, labels, clip)
        assert learn(other, others, batch, labels, clip) == pytest.approx(expected, rel=1e-6)
    assert_equal_weights(model, other)
    return other


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("kind", MODELS)
def test_training_goes_on_as_before(kind: str, optimizer: str) -> None:
    torch.manual_seed(0)
    assert_twins(MODELS[kind](), DENSE[optimizer], warm_up=0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", SPARSE)
@pytest.mark.parametrize("kind", [Plain, Bags])
def test_training_with_sparse_gradients_goes_on_as_before(kind: Any, optimizer: str) -> None:
    torch.manual_seed(0)
    assert_twins(kind(sparse=True), SPARSE[optimizer], warm_up=5)


@pytest.mark.parametrize("optimizer", DENSE)
def test_a_conversion_after_100_steps_equals_none(optimizer: str) -> None:
    torch.manual_seed(0)
    assert_twins(Plain(), DENSE[optimizer], warm_up=100)


def test_clipping_sees_one_gradient_of_a_weight_that_two_modules_share() -> None:
    torch.manual_seed(0)
    other = assert_twins(Shared(), DENSE["sgd"], warm_up=0, clip=0.05)
    assert len([p for p in other.parameters() if not p.numel()]) == 1


@pytest.mark.parametrize("kind", ["plain", "padded", "bags"])
def test_the_default_type_and_device_of_torch_do_not_matter(kind: str) -> None:
    """Rows are float32 on the host, whatever new tensors are."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    expected = copy.deepcopy(model)
    make = DENSE["adam"]
    model, optimizers, _ = hb.auto(model, make(model))
    others = make(expected)
    for batch, labels in batches(model, 3):
        learn(expected, others, batch, labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        try:
            scores = model(*batch)
            loss = nn.functional.binary_cross_entropy_with_logits(scores, labels)
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)  # "cpu" would leave a mode for the tests after this one
        for optimizer in optimizers:
            optimizer.step()
    assert_equal_weights(expected, model)
