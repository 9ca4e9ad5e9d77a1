# SPDX-License-Identifier: Apache-2.0
"""A step by grains: forward and backward a grain at a time, joined, checked once, applied once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from table_bits import bits_of

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed._core import hash_ids
from hotbed.embedding.lookups import Feature
from hotbed.embedding.modules.state import dense_state
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, NonFiniteGradient, PersistError, RowShapeError
from hotbed.parallel import joined
from hotbed.persist.container.format import open_checkpoint
from hotbed.training.auto import plain_state_dict
from hotbed.training.callbacks import ClipGradients
from hotbed.training.step.learner import StepLearner

from .test_ahead import counts, everything
from .test_one_pass import SAME_IN_BOTH, events, made

DIM = 3
FEATURES = {"user": "user", "item": "item", "clicked": "item"}  # by feature, its table
STEPS = 5

Rows = dict[tuple[str, int], Tensor]


class Network(nn.Module):
    """A head over two single ids, a bag that shares a table, and a number."""

    looks_up_once = True

    def __init__(self, *, batch_norm: bool = False, **table: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        settings = {"rule": hb.Sgd(lr=0.1)} | table
        tables = [hb.Table(name, DIM, **settings) for name in ("user", "item")]
        features = [Feature(name, of) for name, of in FEATURES.items()]
        self.tables = hb.EmbeddingCollection(features, tables)
        norm = [nn.BatchNorm1d(8)] if batch_norm else []
        self.head = nn.Sequential(nn.Linear(10, 8), *norm, nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: hb.Batch) -> Tensor:
        return self.score(self.tables.flat(batch), batch)

    def score(self, flat: Tensor, batch: hb.Batch) -> Tensor:
        scores: Tensor = self.head(torch.cat([flat, batch.dense["x"][:, None]], 1)).squeeze(1)
        return scores


def batches(num_samples: int, num_ids: int = 40) -> list[hb.Batch]:
    random = np.random.default_rng(num_samples)
    every = []
    for step in range(STEPS):
        offsets = np.concatenate([[0], random.integers(0, 4, num_samples).cumsum()])
        ids = {
            "user": hb.Ids(random.integers(0, num_ids, num_samples)),
            "item": hb.Ids(random.integers(0, num_ids, num_samples)),
            "clicked": hb.Ids(random.integers(0, num_ids, offsets[-1]), offsets),
        }
        x = random.normal(size=num_samples).astype(np.float32)
        labels = random.integers(0, 2, num_samples).astype(np.float32)
        time = step * 1_000_000 + np.arange(num_samples)
        every.append(hb.Batch(ids, {"x": x}, {"y": labels}, time=time))
    return every


def sgd(network: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(hb.dense_parameters(network), lr=0.1, momentum=0.9)


def by_grains(network: nn.Module, grains: int, amp_level: str = "O0") -> hb.RecModel:
    return hb.RecModel(network, "bce", sgd(network), {"auc"}, amp_level=amp_level, grains=grains)


def learned(model: hb.RecModel, data: Iterable[Any], callbacks: Any = ()) -> hb.RecModel:
    model.fit(data, callbacks=callbacks, progress=False)
    return model


# --- a loop that is too simple to be wrong --------------------------------------------------------


class Loop:
    """Rows in a dict, a batch grain by grain, and gradients joined one by one."""

    def __init__(self, network: Network, grains: int) -> None:
        self.network = copy.deepcopy(network)
        self.tables = {table.name: table for table in self.network.tables.tables}  # never learn
        self.dense = sgd(self.network)
        self.grains = grains
        self.rows: Rows = {}

    def step(self, batch: hb.Batch) -> float:
        n = len(batch)
        before = [buffer.clone() for buffer in self.network.buffers()]
        losses: list[Tensor | None] = []
        dense: list[list[Tensor] | None] = []
        rows: list[Rows] = []
        buffers: list[list[Tensor]] = []
        for grain in range(self.grains):
            first, last = n * grain // self.grains, n * (grain + 1) // self.grains
            losses.append(None)
            dense.append(None)
            rows.append({})
            if first == last:
                continue
            for buffer, value in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(value)
            samples = batch[first:last].map_arrays(torch.tensor)
            flat = self.pooled(samples).requires_grad_()
            labels = samples.labels["y"]
            loss = hb.losses.BCE()(self.network.score(flat, samples), labels)
            loss = loss * ((last - first) / n)
            self.dense.zero_grad()
            loss.backward()
            losses[-1] = loss.detach()
            dense[-1] = [parameter.grad.clone() for parameter in self.network.head.parameters()]
            rows[-1] = self.by_id(samples, flat.grad)
            buffers.append([buffer.clone() for buffer in self.network.buffers()])
        self.apply(dense, rows, buffers)
        return float(tree(losses))

    def apply(self, dense: Any, rows: list[Rows], buffers: list[list[Tensor]]) -> None:
        for number, parameter in enumerate(self.network.head.parameters()):
            parameter.grad = tree([grads and grads[number] for grads in dense])
        self.dense.step()
        for key in {key for of_grain in rows for key in of_grain}:
            self.rows[key] -= 0.1 * tree([of_grain.get(key) for of_grain in rows])
        for number, buffer in enumerate(self.network.buffers()):
            values = [each[number] for each in buffers]
            if buffer.is_floating_point() and buffer.numel():
                buffer.copy_(tree(values) / len(values))
            else:
                buffer.copy_(values[0])

    def positions(self, samples: hb.Batch) -> Iterable[tuple[tuple[str, int], int, slice]]:
        """Yield the row of each position, its sample and its lanes."""
        for number, (feature, table) in enumerate(FEATURES.items()):
            ids = samples.ids[feature]
            for position, sample in enumerate(np.repeat(np.arange(len(ids)), ids.lengths())):
                lanes = slice(DIM * number, DIM * (number + 1))
                yield (table, int(ids.values[position])), int(sample), lanes

    def pooled(self, samples: hb.Batch) -> Tensor:
        flat = torch.zeros(len(samples), 3 * DIM)
        for key, sample, lanes in self.positions(samples):
            if key not in self.rows:
                initial = self.tables[key[0]].lookup(np.array([key[1]]))
                self.rows[key] = torch.tensor(initial[0])
            flat[sample, lanes] += self.rows[key]
        return flat

    def by_id(self, samples: hb.Batch, grad: Any) -> Rows:
        sums: Rows = {}
        for key, sample, lanes in self.positions(samples):
            sums[key] = sums.get(key, torch.zeros(DIM)) + grad[sample, lanes]
        return sums


def tree(values: Any) -> Any:
    while len(values) > 1:
        values = [*values, None] if len(values) % 2 else values
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


@pytest.mark.parametrize(
    ("grains", "num_samples", "batch_norm"),
    [(2, 64, True), (4, 61, True), (8, 64, True), (8, 13, False), (8, 3, False)],
)
def test_a_step_by_grains_has_the_bits_of_a_plain_loop(
    grains: int, num_samples: int, batch_norm: bool
) -> None:
    network = Network(batch_norm=batch_norm)
    loop = Loop(network, grains)
    losses: list[float] = []

    class Losses:
        def on_step_end(self, run: Any) -> None:
            losses.append(float(run.loss))

    model = learned(by_grains(network, grains), batches(num_samples), [Losses()])
    assert losses == [loop.step(batch) for batch in batches(num_samples)]
    for name, value in loop.network.head.state_dict().items():
        assert torch.equal(value, network.head.state_dict()[name]), name
    ids = {table.name: table for table in network.tables.tables}
    assert sum(map(len, ids.values())) == len(loop.rows)
    for (table, id), row in loop.rows.items():
        assert torch.equal(torch.tensor(ids[table].lookup(np.array([id]))[0]), row)
    assert model.counters["steps"] == STEPS


def test_parts_are_joined_by_halves_and_absent_ones_are_left_out() -> None:
    class Grain(str):
        def __add__(self, other: str) -> Grain:
            return Grain(f"({self}{other})")

    def joined_grains(names: str) -> Any:
        grains: list[Any] = [None if name == "-" else Grain(name) for name in names]
        return joined(grains)

    assert joined_grains("01234567") == "(((01)(23))((45)(67)))"
    assert joined_grains("012345") == "(((01)(23))(45))"
    assert joined_grains("-1--45-7") == "(1((45)7))"
    assert joined_grains("--") is None


@pytest.mark.parametrize("name", ["DeepFM", "DIEN", "BST", "MMoE", "PLE", "ESMM", "AITM"])
def test_models_learn_by_grains_what_they_learn_as_a_whole(name: str) -> None:
    """They have sequences, bags, weights and two labels; there is no batch norm in them."""

    def learned_in(grains: int) -> dict[str, Tensor]:
        network = made(name, {"rule": hb.Sgd(lr=0.1)})
        model = by_grains(network, grains)
        data = list(events(SAME_IN_BOTH[name][0]))  # the same rows a batch, however it is divided
        model.fit(data, progress=False, max_steps=4)
        values = dict(dense_state(network))
        for table, of_table in model.tables.items():
            for number, batch in enumerate(of_table.export()):
                values[f"{table} {number}"] = torch.tensor(batch["value"].flatten().to_numpy())
        return values

    torch.testing.assert_close(learned_in(8), learned_in(1), rtol=1e-4, atol=1e-6)


class Ranker(nn.Module):
    """A model of torch: a weight of two modules, looked up three times, and ids that it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.user = nn.Embedding(30, DIM)
        self.item = nn.Embedding(40, DIM, padding_idx=4)
        self.clicked = nn.EmbeddingBag(40, DIM, mode="mean", padding_idx=7)
        self.clicked.weight = self.item.weight
        self.head = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))
        self.repeats = 1

    def forward(
        self, user: Tensor, item: Tensor, clicked: Tensor, clicked_offsets: Tensor, x: Tensor
    ) -> Tensor:
        rows = [self.user(user % 30), self.item(item), self.clicked(clicked, clicked_offsets)]
        for _ in range(self.repeats):
            rows[0] = rows[0] + self.item((item + 3 * user) % 40)
        scores: Tensor = self.head(torch.cat([*rows, x[:, None]], 1)).squeeze(1)
        return scores


class Listed(Ranker):
    """Its items come from a list, which no trace follows."""

    def forward(self, item: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.item(torch.tensor(sorted(item.tolist()))).sum(1) + x


def by_auto(ranker: nn.Module, grains: int) -> hb.RecModel:
    optimizer = torch.optim.SGD(ranker.parameters(), lr=0.5, momentum=0.9)
    ranker, optimizer, _ = hb.auto(ranker, optimizer)
    return hb.RecModel(ranker, "bce", optimizer, grains=grains)


def test_a_model_of_auto_learns_by_grains_what_torch_learns_as_a_whole() -> None:
    plain = Ranker()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    model = by_auto(copy.deepcopy(plain), 4)
    for batch in [*batches(10)[:2], batches(3)[0]]:
        tensors = batch.map_arrays(torch.from_numpy)
        clicked = tensors.ids["clicked"]
        ids = [tensors.ids[name].values for name in ("user", "item")]
        scores = plain(*ids, clicked.values, clicked.offsets[:-1], tensors.dense["x"])
        loss = nn.functional.binary_cross_entropy_with_logits(scores, tensors.labels["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert model.step(batch) == pytest.approx(loss.item(), rel=1e-5)
    weights = plain_state_dict(model.network)
    torch.testing.assert_close(weights, plain.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_model_of_auto_that_looks_up_more_or_less_than_before_is_refused() -> None:
    ranker = Ranker()
    model = by_auto(ranker, 2)
    model.step(batches(8)[0])
    for repeats, message in ((2, "looks up more than was"), (0, "looks up less than was")):
        ranker.repeats = repeats
        with pytest.raises(ConfigError, match=message):
            model.step(batches(8)[1])


@pytest.mark.parametrize(
    "policies",
    [
        {"admit": hb.MinCount(3), "evict": hb.Ttl(seconds=2)},
        {"admit": hb.MinCount(2, once_a_batch=True), "evict": hb.Lru(1024)},
        {"admit": hb.Probability(0.5), "evict": hb.Lfu(1024, half_life_seconds=3)},
        {"rule": hb.Adam(lr=0.1, scope="all"), "dtype": "bfloat16"},
    ],
    ids=["count", "once", "probability", "Adam"],
)
def test_tables_count_admit_and_evict_as_in_one_grain(policies: dict[str, Any]) -> None:
    def contents(grains: int, depth: int = 0) -> Any:
        network = Network(**policies)
        data: Any = batches(500, 3000)
        data = hb.Ahead(data, depth=depth) if depth else data
        model = learned(by_grains(network, grains), data)
        for table in network.tables.tables:
            table.evict(4_000_000)
        return everything(model), [known(table) for table in network.tables.tables]

    def known(table: Table) -> Any:
        ids = [batch["id"].to_pylist() for batch in table.export()]
        candidates = bits_of(table.candidates())
        sketch = bits_of(table.sketch())
        return ids, candidates, sketch, table.scalars(), counts(table.stats)

    in_four, tables = contents(4)
    assert tables == contents(1)[1]
    assert contents(4, depth=2)[0] == in_four
    scalars = [of_table[3] for of_table in tables]
    assert all(each["refused"] for each in scalars) == ("admit" in policies)
    assert all(each["evicted"] for each in scalars) == ("evict" in policies)


def test_a_gradient_of_one_part_that_is_not_finite_changes_nothing(
    dataset: Callable[..., Any], network: Callable[..., Any], world: Any
) -> None:
    model = by_grains(network(), 4)
    every = list(dataset(256))
    model.step(every[0])
    before = world.snapshot(model)
    bad = every[0].map_arrays(np.copy)  # ids that have rows: a map is no update
    bad.dense["x"][40] = np.nan
    with pytest.raises(NonFiniteGradient):
        model.step(bad)
    assert world.same(world.snapshot(model), before)
    model.step(every[1])
    assert not world.same(world.snapshot(model), before)


def test_the_norm_is_summed_by_partition_over_the_joined_gradients() -> None:
    norms: list[tuple[float, float]] = []

    def by_partition(learner: StepLearner) -> float:
        module = learner.network.tables
        sums = module.gradients.take(keeps=True)
        assert sums is not None
        squares = [0.0] * 256
        rows = iter(sums.grads[0].tolist())
        for number in range(2):
            for id in sums.mapped.unique_ids(number):
                partition = int(hash_ids(np.array([id]))[0] >> np.uint64(56))
                for lane in next(rows):
                    squares[partition] += lane * lane
        assert sums.mapped.squares(sums).tolist() == squares
        total = sum(squares)
        for parameter in learner.network.head.parameters():
            total += float(parameter.grad.double().norm()) ** 2
        return total**0.5

    class Norm:
        def on_gradients(self, run: Any) -> None:
            norms.append((float(run.learner.clip_gradients(math.inf)), by_partition(run.learner)))

    learned(by_grains(Network(), 4), batches(50), [Norm(), ClipGradients(1e-2), Norm()])
    for number, (norm, expected) in enumerate(norms):
        assert norm == pytest.approx(expected, rel=1e-7)
        assert norm == pytest.approx(1e-2, rel=1e-3) or number % 2 == 0


def compiled(network: nn.Module) -> None:
    """Leave what `network.compile()` leaves; it would import the compiler."""
    network._compiled_call_impl = network._call_impl


@pytest.mark.parametrize(
    ("loss", "weighted"),
    [
        (nn.BCEWithLogitsLoss(), False),
        (nn.BCEWithLogitsLoss(reduction="sum"), False),
        (hb.losses.BCE(), True),
        ({"y": nn.MSELoss(reduction="sum")}, False),
    ],
    ids=["mean", "sum", "weights", "sum of a label"],
)
def test_a_loss_of_grains_is_that_of_the_batch(loss: Any, weighted: bool) -> None:
    """Eleven samples in eight grains: of one sample and of two."""

    def learned_in(grains: int) -> tuple[list[Tensor], Tensor]:
        network = Network()
        if isinstance(loss, dict):
            score = network.score
            network.score = lambda *inputs: {"y": score(*inputs)}
        model = hb.RecModel(network, loss, sgd(network), grains=grains)
        every = batches(11)
        if weighted:
            weights = np.arange(11, dtype=np.float32)
            every = [replace(batch, weight=weights) for batch in every]
        losses = [model.step(batch) for batch in every]
        return losses, network.head[0].weight.detach()

    torch.testing.assert_close(learned_in(8), learned_in(1), rtol=1e-4, atol=1e-6)


def test_losses_of_two_reductions_are_refused() -> None:
    network = Network()
    network.score = lambda flat, batch: {"y": flat.sum(1), "x": flat.sum(1)}
    losses = {"y": nn.MSELoss(), "x": nn.MSELoss(reduction="sum")}
    model = hb.RecModel(network, losses, sgd(network), grains=2)
    batch = batches(8)[0]
    batch = replace(batch, labels={**batch.labels, "x": batch.dense["x"]})
    with pytest.raises(ConfigError, match='losses of one reduction, got "sum" for some labels'):
        model.step(batch)


def test_the_last_batch_may_have_fewer_samples_than_grains(
    dataset: Callable[..., Any], network: Callable[..., Any]
) -> None:
    model = by_grains(network(), 8)
    model.fit(dataset(2 * 64 + 3), epochs=2, progress=False)
    assert model.counters["steps"] == 2 * 3
    assert model.counters["samples"] == 2 * (2 * 64 + 3)
    data = dataset(64 + 5)
    whole = by_grains(model.network, 1)
    assert model.evaluate(data) == pytest.approx(whole.evaluate(data), rel=1e-6)
    np.testing.assert_allclose(model.predict(data), whole.predict(data), rtol=1e-5)


# --- weights of ids that learn ---------------------------------------------------------------------


class Weighing(nn.Module):
    """A bag whose ids are weighted by three learned numbers."""

    def __init__(self, pooling: str, table: hb.Table) -> None:
        super().__init__()
        self.bag = hb.EmbeddingCollection([Feature("clicked", "item", pooling)], [table])
        self.third = nn.Parameter(torch.tensor([1.0, 0.5, -0.5]))

    def weighed(self, batch: hb.Batch) -> hb.Batch:
        return batch.with_weights({"clicked": self.third[batch.ids["clicked"].values % 3]})

    def forward(self, batch: hb.Batch) -> Tensor:
        is_weighed = batch.ids["clicked"].weights is not None  # by the loop, before the grains
        return self.bag.flat(batch if is_weighed else self.weighed(batch)).sum(1)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("first", [True, False], ids=["of the batch", "of the network"])
def test_weights_of_ids_learn_as_those_of_torch(first: bool, pooling: str) -> None:
    table = hb.Table("item", DIM, rule=hb.Sgd(lr=0.1), init=hb.Uniform(1.0))
    table.find_or_insert(np.arange(40))
    rows = torch.from_numpy(table.lookup(np.arange(40)))
    twin = nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", include_last_offset=True)
    network = Weighing(pooling, table)
    third = network.third.detach().clone().requires_grad_()
    dense = torch.optim.SGD(hb.dense_parameters(network), lr=0.1)
    sparse = hb.SparseOptimizer(network)
    loop = hb.shard(network, dense, sparse, grains=4)
    theirs = torch.optim.SGD([third, *twin.parameters()], lr=0.1)
    loss_fn = nn.BCEWithLogitsLoss()
    for batch in batches(21):
        part = hb.Batch({"clicked": batch.ids["clicked"]}, {}, batch.labels).map_arrays(
            torch.tensor
        )
        ids, labels = part.ids["clicked"], part.labels["y"]
        given = network.weighed(part) if first else part
        loss = loop.backward(given, lambda samples: loss_fn(network(samples), samples.labels["y"]))
        pooled = twin(ids.values, ids.offsets, per_sample_weights=third[ids.values % 3])
        counts = ids.lengths().clamp(min=1)[:, None] if pooling == "mean" else 1.0
        expected = loss_fn((pooled / counts).sum(1), labels)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(network.third.grad, third.grad)
        for optimizer in (dense, sparse, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.from_numpy(table.lookup(np.arange(40))), twin.weight.detach())


# --- resume ---------------------------------------------------------------------------------------


def fit(folder: Path, model: hb.RecModel, data: Any, epochs: int = 1, **keywords: Any) -> None:
    """Train so many epochs of four steps, of which `folder` may hold the first."""
    allow = keywords.pop("allow", ())
    checkpoint = hb.callbacks.Checkpoint(folder, every_steps=3, allow=allow)
    model.fit(data, epochs=epochs, callbacks=[checkpoint], progress=False, **keywords)


def test_another_number_of_grains_does_not_resume(
    dataset: Callable[..., Any], network: Callable[..., Any], tmp_path: Path
) -> None:
    data = dataset(256)
    fit(tmp_path, by_grains(network(), 4), data, max_steps=3)
    message = "grains is {} in the checkpoint, got {}. Build it as it was when it was saved"
    for grains in (1, 8):
        for allow in ([], ["grains"]):  # in an epoch
            with pytest.raises(PersistError, match=f"{message.format(4, grains)}: rows"):
                fit(tmp_path, by_grains(network(), grains), data, allow=allow)
    fit(tmp_path, by_grains(network(), 4), data)
    fit(tmp_path, model := by_grains(network(), 8), data, epochs=2, allow=["grains"])
    assert model.counters["steps"] == 8
    with pytest.raises(PersistError, match=message.format(8, 1)):
        by_grains(network(), 1).restore(tmp_path)
    fit(tmp_path / "whole", by_grains(network(), 1), data)
    with pytest.raises(PersistError, match=message.format(1, 4)):
        fit(tmp_path / "whole", by_grains(network(), 4), data)
    model.save(tmp_path / "saved")
    assert hb.load(tmp_path / "saved").grains == 8


@pytest.mark.parametrize(("grains", "threads"), [(4, 2), (1, 1)])
def test_a_resume_takes_the_threads_of_torch_where_bits_depend_on_them(
    grains: int,
    threads: int,
    dataset: Callable[..., Any],
    network: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    fit(tmp_path, by_grains(network(), grains), dataset(256), max_steps=2)
    assert open_checkpoint(tmp_path).progress["wall_setting"]["machine.torch_threads"] == 2
    given.append(1)
    fit(tmp_path, by_grains(network(), grains), dataset(256))
    assert open_checkpoint(tmp_path).progress["wall_setting"]["machine.torch_threads"] == threads


def test_network_that_was_compiled_is_refused_by_name() -> None:
    model = by_grains(Network(), 2)
    compiled(model.network)
    message = "got 2 grains and one that torch.compile compiled"
    with pytest.raises(ConfigError, match=message):
        model.step(batches(8)[0])
    with pytest.raises(ConfigError, match=message):
        by_grains(model.network, 2)


def test_what_cannot_run_by_grains_is_refused() -> None:
    class Forgets(Network):
        def forward(self, batch: hb.Batch) -> Tensor:
            return self.head(torch.zeros(len(batch), 10)).squeeze(1)

    class Counts(Network):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, batch: hb.Batch) -> Tensor:
            self.seen += len(batch)
            return super().forward(batch)

    with pytest.raises(ConfigError, match="does not look up those of tables"):
        by_grains(Forgets(), 2).step(batches(8)[0])
    with pytest.raises(ConfigError, match="grains of a step must agree on integer buffers"):
        by_grains(Counts(), 2).step(batches(9)[0])
    mixed = nn.Sequential(hb.EmbeddingBag(hb.Table("user", 4)), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"or lookups of hb\.Embedding alone, got others of tab"):
        by_grains(mixed, 2)
    frozen = hb.Embedding(hb.Table("user", 4).requires_grad_(False))
    mixed = nn.Sequential(nn.Embedding(40, 4), frozen)
    mixed, optimizer, _ = hb.auto(mixed, torch.optim.Adam(hb.dense_parameters(mixed)))
    with pytest.raises(ConfigError, match=r"the tables that hb\.auto made, got others: \['user'\]"):
        hb.RecModel(mixed, "bce", optimizer, grains=2)
    unseen = by_auto(Listed(), 2)
    with pytest.raises(ConfigError, match="the code of Listed cannot be traced"):
        unseen.step(batches(8)[0])
    tuples = (torch.zeros(6, dtype=torch.int64), torch.zeros(6))
    with pytest.raises(ConfigError, match="looks up the columns of a batch, got a tuple"):
        by_grains(Network(), 2).step(tuples)
    with pytest.raises(ConfigError, match=r"of a model of hb\.auto needs batches of a Dataset"):
        by_auto(nn.Sequential(nn.Embedding(9, 1), nn.Flatten(0)), 2).step(tuples)
    with pytest.raises(ConfigError, match=r"6 rows of each of its tensors, got \[2\]"):
        by_grains(nn.Linear(4, 1), 2).step(((torch.zeros(6, 4), torch.zeros(2)), torch.zeros(6)))


# --- networks that compute their ids --------------------------------------------------------------


class Collected(nn.Module):
    """Looks up columns of a batch as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        tables = [hb.Table(name, DIM, admit=hb.MinCount(2)) for name in ("user", "item")]
        names = {"user": "user", "item": "item", "other": "item"}
        self.rows: Any = hb.EmbeddingCollection([Feature(n, t) for n, t in names.items()], tables)
        self.head = nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))

    def forward(self, batch: hb.Batch) -> Tensor:
        scores: Tensor = self.head(self.rows.flat(batch)).sum(1)
        return scores


class Computing(Collected):
    """Computes the same ids from a matrix, and looks up one table twice."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (hb.Embedding(table) for table in self.rows.tables)
        self.others = hb.Embedding(self.item.tables[0])
        self.rows = None
        self.passes = 0

    def forward(self, columns: Tensor) -> Tensor:
        self.passes += 1
        user, item, other = (columns - 7).unbind(1)
        rows = [self.user(user), self.item(item), self.others(other)]
        self.passes += 1
        scores: Tensor = self.head(torch.cat(rows, 1)).sum(1)
        return scores


def test_ids_that_a_network_computes_are_mapped_as_those_of_a_batch() -> None:
    random = np.random.default_rng(3)
    data = [random.integers(0, 30, (size, 3)) for size in (40, 8, 21)]
    labels = [(columns.sum(1) % 2).astype(np.float32) for columns in data]
    names = ("user", "item", "other")
    of_columns = [
        hb.Batch({n: hb.Ids(c[:, k]) for k, n in enumerate(names)}, labels={"y": y})
        for c, y in zip(data, labels, strict=True)
    ]
    of_matrices = [(torch.from_numpy(c + 7), y) for c, y in zip(data, labels, strict=True)]
    models = [by_grains(Collected(), 4), by_grains(Computing(), 4)]
    for model, items in zip(models, (of_columns, of_matrices), strict=True):
        torch.manual_seed(8)
        learned(model, [*items, *items], callbacks=[ClipGradients(0.1)])
    mine, theirs = models
    # of 24 grains each learns in a whole pass, before which one ends at its last lookup
    assert theirs.network.passes == 24 * (2 + 1) + 1
    for table in ("user", "item"):
        of_both = [pa.Table.from_batches(m.tables[table].export()) for m in models]
        assert of_both[0].equals(of_both[1])
    for key, value in mine.network.state_dict().items():
        if key.startswith("head"):
            assert theirs.network.state_dict()[key].equal(value), key
    assert mine.evaluate(of_columns) == theirs.evaluate(of_matrices)
    assert mine.predict(of_columns).tolist() == theirs.predict(of_matrices).tolist()


@pytest.mark.parametrize(
    ("looks_up", "message"),
    [
        (lambda net, x: net.item(x + (net.user(x) != 0).sum().long()), "looks up other ids than"),
        (lambda net, x: net.item(x) if x[0] else net.user(x), r"looks up \['item'\] for one grain"),
        (
            lambda net, x: net.user(hb.Ids(x, None, torch.ones(len(x)))),
            "and no weights, got others",
        ),
        (lambda net, x: net.user(x.float()), "expected ids and offsets as integers"),
    ],
    ids=["ids of rows", "other lookups", "weights", "floats"],
)
def test_lookups_that_cannot_be_recorded_are_refused(looks_up: Any, message: str) -> None:
    class Looks(Computing):
        def forward(self, columns: Tensor) -> Tensor:
            scores: Tensor = looks_up(self, columns).sum(1) + self.head[0].bias.sum()
            return scores

    model = by_grains(Looks(), 2)
    with pytest.raises((ConfigError, RowShapeError), match=message):
        model.fit([(torch.arange(8), torch.ones(8))], epochs=3, progress=False)
