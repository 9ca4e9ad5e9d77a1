# SPDX-License-Identifier: Apache-2.0
"""Automatic graph modification of Rec SDK's door: ids leave the forward pass, results stay."""

from __future__ import annotations

import logging
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_bits import bits_of
from torch import Tensor, nn
from torch.nn import functional

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.graph import modifier
from hotbed.compat.mx_rec.util.initialize import ConfigInitializer
from hotbed.data.batch import Ids
from hotbed.embedding.modules import Feature
from hotbed.errors import ConfigError

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("rec_sdk")]
NUM_ROWS = 1200
CONFIG = {"access_threshold": 2, "eviction_threshold": 3600}
CROSS = 1_000_003
STEPS_AS_WRITTEN = Path(__file__).resolve().parents[2] / "golden" / "mx_rec_steps.py"


def dataset(seed: int = 0, *, timed: bool = True) -> hb.Dataset:
    generator = np.random.default_rng(seed)
    rows = {
        "user": generator.integers(0, 60, NUM_ROWS),
        "movie": generator.integers(0, 40, NUM_ROWS),
        "like": generator.integers(0, 2, NUM_ROWS).astype(np.float32),
        "timestamp": np.arange(NUM_ROWS),
    }
    schema = [hb.Id("user"), hb.Id("movie"), hb.Label("like")]
    if timed:
        schema.append(hb.Time("timestamp"))
    return hb.Dataset(hb.sources.Memory(rows), hb.Schema(schema), batch_size=128)


def columns(seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of the data set as (user, movie, like, time)."""
    for raw in dataset(seed):
        batch = raw.map_arrays(torch.from_numpy)
        ids = batch.ids
        yield ids["user"].values, ids["movie"].values, batch.labels["like"], batch.time


def table(name: str = "cross") -> Any:
    return mx.create_table(
        key_dtype=torch.int64,
        dim=4,
        name=name,
        emb_initializer=hb.Normal(std=0.01),
        device_vocabulary_size=10_000,
    )


def look_up(own: Any, ids: Tensor, **keywords: Any) -> Tensor:
    return mx.sparse_lookup(own, ids, modify_graph=True, **keywords)


class Crossed(nn.Module):
    """The model of mx_rec_steps.py; `forward` is that of its children."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        self.config = config or None
        self.table = table()
        self.out = nn.Linear(4, 1)

    def score(self, user: Tensor, movie: Tensor) -> Tensor:
        rows = look_up(self.table, user * CROSS + movie, access_and_evict_config=self.config)
        return self.out(rows).squeeze(-1)


class OfBatch(Crossed):
    def forward(self, batch: Any) -> Tensor:
        return self.score(batch.ids["user"].values, batch.ids["movie"].values)


class OfTwo(Crossed):
    def forward(self, user: Tensor, movie: Tensor) -> Tensor:
        return self.score(user, movie)


class OfDict(Crossed):
    def forward(self, features: Any) -> Tensor:
        return self.score(features["user"], features["movie"])


def begin(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, tuple[Any, Any]]:
    """Run steps 1, 2 and 5 to 7; return the model, and its sparse and its dense optimizer."""
    mx.init(**{"use_dynamic": True, **options})
    sparse = mx.optimizers.lazy_adam.create_hash_optimizer(learning_rate=0.001)
    torch.manual_seed(7)
    model = make()
    dense, _ = mx.get_dense_and_sparse_variable(model)
    return model, (sparse, torch.optim.Adam(dense, lr=1e-3))


def learn(
    optimizers: tuple[Any, Any],
    batches: Iterable[Any],
    scores_of: Callable[[Any], tuple[Tensor, Tensor]],
) -> list[float]:
    """Learn the batches; return their losses."""
    losses = []
    for batch in batches:
        scores, likes = scores_of(batch)
        loss = functional.binary_cross_entropy_with_logits(scores, likes)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def learn_batches(model: nn.Module, optimizers: tuple[Any, Any]) -> list[float]:
    def scores_of(batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch), batch.labels["like"]

    sparse, dense = optimizers
    batches = mx.get_initializer(True)()
    losses = []
    params = ConfigInitializer.get_instance().train_params_config
    for batch in batches:
        assert params.get_target_batch(True) is batch
        scores, likes = scores_of(batch)
        loss = functional.binary_cross_entropy_with_logits(scores, likes)
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return losses


def own_table(name: str = "cross", **policies: Any) -> hb.Table:
    """Return the engine's table that a description stands for."""
    rule = framework.current().optimizers[0].rule
    return hb.Table(name, 4, rule=rule, init=hb.Normal(std=0.01), capacity=10_000, **policies)


def plain_losses(
    own: hb.Table, batches: Iterable[tuple[Tensor, ...]], out: nn.Linear | None = None
) -> list[float]:
    """Return the losses of a loop of the engine's own face over the columns."""
    embedding = hb.Embedding(own)
    if out is None:
        torch.manual_seed(7)
        out = nn.Linear(4, 1)

    def scores_of(batch: Any) -> tuple[Tensor, Tensor]:
        user, movie, like, time = batch
        return out(embedding(user * CROSS + movie, time)).squeeze(-1), like

    adam = torch.optim.Adam(out.parameters(), lr=1e-3)
    return learn((hb.SparseOptimizer(embedding), adam), batches, scores_of)


def tables() -> dict[str, hb.Table]:
    return framework.current().started("test").tables


def contents(of: dict[str, hb.Table]) -> dict[str, Any]:
    """Return every column of every row, and the statistics, of tables."""
    state: dict[str, Any] = {}
    for name, own in of.items():
        state[name] = (bits_of(own.export()), own.stats, own.scalars())
    return state


# --- equal to the engine's own face ---------------------------------------------------------------


def test_automatic_mode_has_the_bits_of_a_plain_loop(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizers = begin(lambda: OfBatch(**CONFIG))
    with caplog.at_level(logging.INFO, "hotbed"):
        mx.modify_graph_and_start_emb_cache(model, train=dataset())
        losses = learn_batches(model, optimizers)
    assert "the ids of up to 2 batches are mapped ahead" in caplog.text
    own = own_table(admit=hb.MinCount(2, expire_seconds=3600), evict=hb.Ttl(seconds=3600))
    assert losses == plain_losses(own, columns())
    assert contents(tables()) == contents({"cross": own})


def test_automatic_mode_as_written_equals_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learned: list[Any] = []

    def close(self: framework.Framework) -> None:
        assert self.pipeline is not None
        own = self.pipeline.tables["cross"]
        learned.extend([contents({"cross": own}), list(self.models[0].parameters())])

    monkeypatch.setattr(framework.Framework, "close", close)
    torch.manual_seed(0)
    runpy.run_path(str(STEPS_AS_WRITTEN))["automatic_mode"](dataset(), dataset(1))
    lines = capsys.readouterr().out.splitlines()
    assert "ahead    cross  computed and mapped while earlier batches train" in lines
    assert "                ids: ('user' * 1000003) + 'movie'" in lines

    own = hb.Table(
        "cross",
        16,
        rule=hb.Adam(lr=0.001, scope="touched", eps_hat=True),
        init=hb.Normal(std=0.01),
        admit=hb.MinCount(2),
        evict=hb.Ttl(seconds=3600),
        capacity=100_000,
    )
    torch.manual_seed(0)
    out = nn.Linear(16, 1)
    plain_losses(own, [*columns(), *columns()], out)
    assert learned[0] == contents({"cross": own})
    assert all(map(torch.equal, learned[1], out.parameters()))


@dataclass
class Click:
    """A batch of a user's own."""

    user: Tensor
    movie: Tensor
    like: Tensor


class OfClick(Crossed):
    def forward(self, click: Click) -> Tensor:
        return self.score(click.user, click.movie)


class OfSwapped(Crossed):
    def forward(self, movie: Tensor, user: Tensor) -> Tensor:
        return self.score(user, movie)


STRUCTURES: dict[str, Any] = {
    # kind of model, batch of columns, call of the loop, arguments of step 8
    "tuple": (OfTwo, lambda *own: own, lambda model, own: (model(*own[:2]), own[2]), None),
    "nested tuple": (
        OfTwo,
        lambda user, movie, like: ((user, movie), like),
        lambda model, own: (model(*own[0]), own[1]),
        None,
    ),
    "dict of arguments": (
        OfTwo,
        lambda user, movie, like: {"user": user, "like": like, "movie": movie},
        lambda model, own: (model(own["user"], own["movie"]), own["like"]),
        None,
    ),
    "dict and label": (
        OfDict,
        lambda user, movie, like: ({"user": user, "movie": movie}, like),
        lambda model, own: (model(own[0]), own[1]),
        None,
    ),
    "dataclass": (OfClick, Click, lambda model, own: (model(own), own.like), None),
    "arguments": (
        OfSwapped,
        lambda *own: own,
        lambda model, own: (model(own[1], own[0]), own[2]),
        lambda own: (own[1], own[0]),
    ),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_of_every_structure_are_learned_alike(structure: str) -> None:
    kind, make, call, arguments = STRUCTURES[structure]
    model, (sparse, dense) = begin(kind)
    data = (make(*own[:3]) for own in columns())  # read once: the first batch must not be lost
    mx.modify_graph_and_start_emb_cache(model, train=data, arguments=arguments)
    losses = []
    for batch in mx.get_initializer(True)():
        scores, likes = call(model, batch)
        loss = functional.binary_cross_entropy_with_logits(scores, likes)
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    assert losses == plain_losses(own_table(), columns())


class Several(nn.Module):
    """Two lookups of one table, of which one has two ids a sample, and a table of its own."""

    def __init__(self, outside: Any) -> None:
        super().__init__()
        self.inside = table("inside")
        self.others = [outside]  # not registered
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        user = batch.ids["user"].values
        movie = batch.ids["movie"].values
        rows = look_up(self.inside, movie) + look_up(self.others[0], user * CROSS + movie)
        pairs = look_up(self.inside, torch.stack([user + 20, movie], 1))
        return self.out(rows + pairs.sum(1)).squeeze(-1)


def test_several_lookups_of_a_table_are_one_target_and_learn_as_one_collection() -> None:
    model, optimizers = begin(lambda: Several(table("outside")))
    report = mx.modify_graph_and_start_emb_cache(model, train=dataset())
    assert [(entry.name, entry.num_lookups) for entry in report.moved] == [
        ("outside", 1),
        ("inside", 2),
    ]
    losses = learn_batches(model, optimizers)

    own = {name: own_table(name) for name in ("inside", "outside")}
    features = [
        Feature("movie", "inside", "none"),
        Feature("cross", "outside", "none"),
        Feature("pairs", "inside", "none"),
    ]
    collection = hb.EmbeddingCollection(features, own)
    torch.manual_seed(7)
    out = nn.Linear(4, 1)

    def scores_of(batch: Any) -> tuple[Tensor, Tensor]:
        user, movie, like, _ = batch
        pairs = torch.stack([user + 20, movie], 1).reshape(-1)
        offsets = torch.arange(len(user) + 1) * 2
        ids = {"movie": movie, "cross": user * CROSS + movie, "pairs": Ids(pairs, offsets)}
        rows = collection(ids)
        both = rows["movie"] + rows["cross"] + rows["pairs"].view(-1, 2, 4).sum(1)
        return out(both).squeeze(-1), like

    adam = torch.optim.Adam(out.parameters(), lr=1e-3)
    assert losses == learn((hb.SparseOptimizer(collection), adam), columns(), scores_of)
    assert contents(tables()) == contents(own)


def test_each_table_has_one_target_a_forward_pass() -> None:
    model, _ = begin(lambda: Several(table("outside")))
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    for batch in mx.get_initializer(True)():
        model(batch)
        rows = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        addresses = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        assert len(rows) == len(addresses) == 2
        break


class Nearest(nn.Module):
    """The ids of `near` depend on the rows of `cross`."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = table("cross")
        self.near = table("near")
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        rows = look_up(self.cross, batch.ids["user"].values * CROSS + batch.ids["movie"].values)
        return self.out(rows + look_up(self.near, rows.argmax(-1))).squeeze(-1)


def test_ids_that_depend_on_rows_stay_in_the_forward_pass() -> None:
    model, optimizers = begin(Nearest)
    report = mx.modify_graph_and_start_emb_cache(model, train=dataset())
    (near,) = report.kept
    assert (near.name, near.outcome) == ("near", "forward")
    assert near.reason == "its ids depend on the rows of 'cross'"
    losses = learn_batches(model, optimizers)

    own = {name: own_table(name) for name in ("cross", "near")}
    embeddings = nn.ModuleDict({name: hb.Embedding(of) for name, of in own.items()})
    torch.manual_seed(7)
    out = nn.Linear(4, 1)

    def scores_of(batch: Any) -> tuple[Tensor, Tensor]:
        user, movie, like, _ = batch
        rows = embeddings["cross"](user * CROSS + movie)
        return out(rows + embeddings["near"](rows.argmax(-1))).squeeze(-1), like

    adam = torch.optim.Adam(out.parameters(), lr=1e-3)
    assert losses == learn((hb.SparseOptimizer(embeddings), adam), columns(), scores_of)
    assert contents(tables()) == contents(own)


class Scaled(OfBatch):
    """Has a dense part that torch.export cannot follow: torch.fx finds the ids."""

    def forward(self, batch: Any) -> Tensor:
        scores = super().forward(batch)
        return scores * 1.0 if scores.sum() > 0 else scores


def test_a_dense_part_that_cannot_be_traced_does_not_matter() -> None:
    model, optimizers = begin(Scaled)
    report = mx.modify_graph_and_start_emb_cache(model, train=dataset())
    assert [entry.outcome for entry in report.entries] == ["ahead"]
    assert learn_batches(model, optimizers) == plain_losses(own_table(), columns())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo
def test_a_compiled_model_looks_up_between_its_graphs() -> None:
    model, (sparse, dense) = begin(OfBatch)
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    compiled = torch.compile(model, backend="eager")
    losses = []
    for batch in mx.get_initializer(True)():
        loss = functional.binary_cross_entropy_with_logits(compiled(batch), batch.labels["like"])
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    assert losses == plain_losses(own_table(), columns())


def test_two_forward_passes_of_a_batch_and_several_batches_a_step_are_summed() -> None:
    model, (sparse, dense) = begin(lambda: OfBatch(**CONFIG))
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    for number, batch in enumerate(mx.get_initializer(True)()):
        both = model(batch) + model(batch) * 2  # the same rows: they count once
        (both * batch.labels["like"]).mean().backward()
        if number % 2:
            sparse.step()
            dense.step()
            dense.zero_grad()
    own = own_table(admit=hb.MinCount(2, expire_seconds=3600), evict=hb.Ttl(seconds=3600))
    embedding = hb.Embedding(own)
    torch.manual_seed(7)
    out = nn.Linear(4, 1)
    rules = hb.SparseOptimizer(embedding)
    adam = torch.optim.Adam(out.parameters(), lr=1e-3)
    for number, (user, movie, like, time) in enumerate(columns()):
        rows = embedding(user * CROSS + movie, time)
        both = out(rows).squeeze(-1) + out(rows).squeeze(-1) * 2
        (both * like).mean().backward()
        if number % 2:
            for optimizer in (rules, adam):
                optimizer.step()
                optimizer.zero_grad()
    assert contents(tables()) == contents({"cross": own})


def test_static_shapes_have_the_bits_of_dynamic_ones() -> None:
    class Static(OfBatch):
        def forward(self, batch: Any) -> Tensor:
            ids = batch.ids["user"].values * CROSS + batch.ids["movie"].values
            rows = look_up(self.table, ids, send_count=self.send_count)
            return self.out(rows).squeeze(-1)

    model, optimizers = begin(Static, use_dynamic=False)
    model.send_count = 200
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    assert learn_batches(model, optimizers) == plain_losses(own_table(), columns())
    framework.end()
    model, optimizers = begin(Static, use_dynamic=False)
    model.send_count = 20
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    with pytest.raises(RuntimeError, match="more distinct ids than its static size of 20"):
        learn_batches(model, optimizers)


# --- evaluation -----------------------------------------------------------------------------------


def test_evaluation_and_training_in_turn_have_the_bits_of_training_alone() -> None:
    model, optimizers = begin(lambda: OfBatch(**CONFIG))
    mx.modify_graph_and_start_emb_cache(model, train=dataset(), evaluation=dataset(1))
    losses = []
    for _ in range(2):
        losses += learn_batches(model, optimizers)
        before = contents(tables())
        with torch.no_grad():
            first = [model(batch) for batch in mx.get_initializer(False)()]
            again = [model(batch) for batch in mx.get_initializer(False)()]
        for batch in mx.get_initializer(False)():  # with gradients, too
            model(batch)
        assert not mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        assert contents(tables()) == before
        assert all(map(torch.equal, first, again))
    own = own_table(admit=hb.MinCount(2, expire_seconds=3600), evict=hb.Ttl(seconds=3600))
    assert losses == plain_losses(own, [*columns(), *columns()])
    assert contents(tables()) == contents({"cross": own})


def test_an_evaluation_after_train_steps_sees_the_tables_of_a_plain_loop() -> None:
    model, (sparse, dense) = begin(OfBatch, train_steps=3)
    mx.modify_graph_and_start_emb_cache(model, train=dataset(), evaluation=dataset(1))
    counts = []
    for step, batch in enumerate(mx.get_initializer(True)(), 1):
        loss = functional.binary_cross_entropy_with_logits(model(batch), batch.labels["like"])
        if step == 2:  # inside of a step: the batch of training is the current one again
            with torch.no_grad():
                for other in mx.get_initializer(False)():
                    model(other)
            loss = functional.binary_cross_entropy_with_logits(model(batch), batch.labels["like"])
        loss.backward()
        sparse.step()
        dense.step()
        if step % 3 == 0:
            counts.append(len(tables()["cross"]))
    own = own_table()
    embedding = hb.Embedding(own)
    expected = []
    for step, (user, movie, _, _) in enumerate(columns(), 1):
        embedding(user * CROSS + movie)
        if step % 3 == 0:
            expected.append(len(own))
    assert counts == expected


def test_a_forward_pass_without_a_batch_reads_only() -> None:
    model, _ = begin(lambda: OfBatch(**CONFIG))
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    (batch, *_) = (raw.map_arrays(torch.from_numpy) for raw in dataset())
    with pytest.raises(CallError, match="a training step needs a batch"):
        model(batch)
    with torch.no_grad():
        assert torch.equal(model(batch), model.out(torch.zeros(128, 4)).squeeze(-1))
    model.eval()
    model(batch)
    assert not len(tables()["cross"])


# --- what is refused ------------------------------------------------------------------------------


def refused(make: Callable[[], nn.Module], data: Any = None, **keywords: Any) -> str:
    """Return the message of step 8 for a model."""
    model, _ = begin(make)
    with pytest.raises(ConfigError) as error:
        mx.modify_graph_and_start_emb_cache(
            model, train=dataset() if data is None else data, **keywords
        )
    assert framework.current().pipeline is None
    assert framework.current().traced is None
    framework.end()
    return str(error.value)


class Branched(OfBatch):
    def forward(self, batch: Any) -> Tensor:
        if batch.ids["user"].values.max() > 7:
            return self.score(batch.ids["user"].values, batch.ids["movie"].values)
        return batch.ids["user"].values.float()


class Listed(OfBatch):
    def forward(self, batch: Any) -> Tensor:
        return self.score(
            torch.tensor(batch.ids["user"].values.tolist()), batch.ids["movie"].values
        )


class Idle(OfBatch):
    def forward(self, batch: Any) -> Tensor:
        return self.out(batch.ids["user"].values[:, None].expand(-1, 4).float())


class TwoThresholds(OfBatch):
    def forward(self, batch: Any) -> Tensor:
        user = batch.ids["user"].values
        rows = look_up(self.table, user, access_and_evict_config={"access_threshold": 2})
        return rows + look_up(self.table, user, access_and_evict_config={"access_threshold": 3})


class ReadsOnly(OfBatch):
    def forward(self, batch: Any) -> Tensor:
        return look_up(self.table, batch.ids["user"].values, is_train=False)


class TooMany(OfBatch):
    def forward(self, batch: Any) -> Tensor:
        rows = [look_up(self.table, batch.ids["user"].values) for _ in range(4)]
        return torch.stack(rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Branched, r"must not depend on data, got:\n  cross: .* at test_automatic_mode.py:"),
        (Listed, r"the code of Listed cannot be traced, got: "),
        (Idle, r"the forward pass of Idle must look up a table, got none"),
        (TwoThresholds, r"param must be same in one table"),
        (ReadsOnly, r"sparse_lookup 'cross': is_train=False is for evaluation"),
        (
            lambda: OfBatch(access_treshold=2),
            r"got 'access_treshold'. Did you mean 'access_threshold'",
        ),
        (lambda: OfBatch(access_threshold=-2), r"access_threshold"),
        (lambda: OfBatch(eviction_threshold=9), r"access_threshold should be configured before"),
        (lambda: OfBatch(access_threshold=2, faae_coefficient=0), r"faae_coefficient"),
    ],
)
def test_a_model_that_cannot_be_modified_is_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    text = refused(make)
    assert re.search(message, text, re.DOTALL), text


def test_too_many_lookups_of_a_table_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modifier, "MOST_LOOKUPS", 3)
    assert "table 'cross': a forward pass may look it up 3 times, got 4" in refused(TooMany)


def test_an_eviction_threshold_needs_times() -> None:
    text = refused(lambda: OfBatch(**CONFIG), dataset(timed=False))
    assert text.startswith("table 'cross': an eviction threshold needs the time of each batch")


def test_data_without_a_batch_are_refused() -> None:
    assert "train must yield a batch" in refused(OfBatch, [])
    assert "train: batches to iterate over" in refused(OfBatch, 3)


def test_times_of_other_batches_are_seconds() -> None:
    model, optimizers = begin(lambda: OfTwo(**CONFIG))
    data = [(user, movie, like, time // 1_000_000) for user, movie, like, time in columns()]
    mx.modify_graph_and_start_emb_cache(model, train=data, times=lambda own: own[3])
    sparse, dense = optimizers
    for user, movie, like, _ in mx.get_initializer(True)():
        loss = functional.binary_cross_entropy_with_logits(model(user, movie), like)
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
    own = own_table(admit=hb.MinCount(2, expire_seconds=3600), evict=hb.Ttl(seconds=3600))
    plain_losses(own, columns())
    assert contents(tables()) == contents({"cross": own})


# --- mistakes of loops ----------------------------------------------------------------------------


def test_another_batch_than_that_of_the_loop_is_refused() -> None:
    model, _ = begin(OfBatch)
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    other = next(iter(dataset(1))).map_arrays(torch.from_numpy)
    for _ in mx.get_initializer(True)():
        with pytest.raises(ConfigError, match="cross: the forward pass looks up other ids than"):
            model(other)
        break


def test_get_initializer_needs_step_8_and_its_data() -> None:
    model, _ = begin(OfBatch)
    with pytest.raises(CallError, match="get_initializer"):
        mx.get_initializer(True)
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    with pytest.raises(CallError, match="evaluation needs data"):
        mx.get_initializer(False)


def test_a_table_is_looked_up_by_sparse_lookup() -> None:
    begin(OfBatch)
    with pytest.raises(CallError, match="it is looked up by sparse_lookup"):
        framework.current().tables["cross"](torch.arange(3))


# --- report ---------------------------------------------------------------------------------------


def test_the_report_accounts_for_every_table() -> None:
    def make() -> nn.Module:
        table("spare")
        return Nearest()

    model, _ = begin(make)
    report = mx.modify_graph_and_start_emb_cache(model, train=dataset(), evaluation=dataset())
    assert (
        str(report).splitlines()
        == """\
modify_graph: the ids of 1 of 3 tables leave the forward pass of Nearest; 5 dense parameters stay

unused   spare  the forward pass looks up nothing in this table
                table: dim 4, adam(eps_hat=True)

ahead    cross  computed and mapped while earlier batches train
                ids: ('user' * 1000003) + 'movie'
                table: dim 4, adam(eps_hat=True)

forward  near   computed and mapped in the forward pass
                why: its ids depend on the rows of 'cross'
                table: dim 4, adam(eps_hat=True)

In evaluation, the forward pass looks up the ids and only reads: no table changes.""".splitlines()
    )
    assert report.picture().startswith("<svg")
