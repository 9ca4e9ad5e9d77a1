# SPDX-License-Identifier: Apache-2.0
"""A model of hb.auto beside torch's own: fed by names, transforms of torch, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.training.auto import plain_state_dict

NUM_USERS = 30
NUM_ITEMS = 50
NUM_ROWS = 16
USERS = torch.arange(NUM_ROWS) % NUM_USERS
ITEMS = torch.arange(NUM_ROWS).flip(0)
LABELS = torch.arange(NUM_ROWS) % 2
SCHEMA = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item")])


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(NUM_USERS, 4)
        self.item = nn.Embedding(NUM_ITEMS, 4, padding_idx=0)
        self.head = nn.Linear(4, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.head(self.user(user) * self.item(item)).squeeze(-1)


class Whole(Product):
    """Reads whole weights, as a network of a graph does."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([self.user.weight, self.item.weight])
        return self.head(rows[user] * rows[NUM_USERS + item]).squeeze(-1)


class Mixed(Product):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.head(self.user(user) * self.item.weight[item]).squeeze(-1)


def dataset() -> hb.Dataset:
    columns = {"y": LABELS.tolist(), "user": USERS.tolist(), "item": ITEMS.tolist()}
    return hb.Dataset(hb.sources.Memory(columns), SCHEMA, batch_size=8)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained_by_torch(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = sgd(model)
    for rows in (slice(0, 8), slice(8, 16)):
        optimizer.zero_grad()
        scores = model(USERS[rows], ITEMS[rows])
        nn.functional.binary_cross_entropy_with_logits(scores, LABELS[rows].float()).backward()
        optimizer.step()
    return model


def converted(model: nn.Module, **keywords: Any) -> nn.Module:
    model, _, _ = hb.auto(model, sgd(model), **keywords)
    return model


# --- columns by name


@pytest.mark.parametrize("kind, num_moved", [(Product, 2), (Whole, 0), (Mixed, 1)])
@pytest.mark.parametrize("train", ["fit", "online_train", "fit ahead"])
def test_columns_feed_a_model_by_name_also_where_embeddings_are_kept(
    kind: type[Product], num_moved: int, train: str
) -> None:
    torch.manual_seed(0)
    model = kind()
    expected = trained_by_torch(model)
    model, optimizer, report = hb.auto(model, sgd(model))
    assert len(report.moved) == num_moved
    recommender = hb.RecModel(model, loss_fn="bce", optimizer=optimizer, metrics={"auc"})
    if train == "online_train":
        recommender.online_train(dataset(), progress=False)
    else:
        data = dataset() if train == "fit" else hb.Ahead(dataset())
        recommender.fit(data, dataset(), progress=False)
    with torch.no_grad():
        scores = expected(USERS, ITEMS).sigmoid()
    np.testing.assert_allclose(recommender.predict(dataset()), scores, atol=1e-6)
    assert recommender.evaluate(dataset())["auc"] <= 1.0
    by_names = [({"item": ITEMS, "user": USERS}, LABELS.float())]
    np.testing.assert_allclose(recommender.predict(by_names), scores, atol=1e-6)


def test_a_model_whose_embeddings_were_kept_is_saved_loaded_and_converted_again(
    tmp_path: Path,
) -> None:
    model, _, report = hb.auto(Whole(), sgd(nn.Linear(1, 1)))
    assert not report.moved
    recommender = hb.RecModel(model, loss_fn="bce", optimizer=sgd(model))
    recommender.fit(dataset(), progress=False)
    scores = recommender.predict(dataset())
    recommender.save(tmp_path / "state")
    loaded = hb.load(tmp_path / "state", network=converted(Whole()))
    assert np.array_equal(loaded.predict(dataset()), scores)
    with pytest.raises(ConfigError, match=r"export: .* Whole, of which hb\.auto kept every"):
        recommender.export(tmp_path / "export")
    kept = Product()
    hb.auto(kept, sgd(kept), tables={"user": None, "item": None})
    _, _, report = hb.auto(kept, sgd(kept))
    assert [entry.path for entry in report.moved] == ["user", "item"]
    assert kept(USERS, ITEMS).shape == (NUM_ROWS,)
    assert len(kept._forward_pre_hooks) == 1


class OneTensor(Product):
    def forward(self, user: Tensor) -> Tensor:
        return self.head(self.user(user % NUM_USERS)).squeeze(-1)


@pytest.mark.parametrize("kind", [Product, OneTensor])
@pytest.mark.parametrize("use", ["fit", "online_train", "evaluate", "predict"])
def test_a_plain_network_that_takes_tensors_is_an_error_that_says_what_to_do(
    kind: type[Product], use: str
) -> None:
    model = kind()
    recommender = hb.RecModel(model, loss_fn="bce", optimizer=sgd(model))
    with pytest.raises(
        ConfigError, match=rf"^network: {kind.__name__}\.forward\(user.*Convert .* hb\.auto.*batch"
    ):
        getattr(recommender, use)(dataset())


def test_a_type_error_of_the_network_itself_stays() -> None:
    class Wrong(Product):
        def forward(self, batch: Any) -> Tensor:
            return len(3)  # type: ignore[arg-type]

    recommender = hb.RecModel(Wrong(), loss_fn="bce")
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        recommender.predict(dataset())


# --- transforms of torch


def dense_of(model: Any) -> dict[str, Tensor]:
    return dict(model.head.named_parameters(prefix="head"))


def loss_of(model: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (USERS, ITEMS)).sum()

    return loss


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "torch.vmap": lambda model: torch.vmap(model)(USERS, ITEMS),
    "torch.func.grad": lambda model: torch.func.grad(loss_of(model))(dense_of(model)),
    "torch.func.vjp": lambda model: torch.func.vjp(loss_of(model), dense_of(model)),
    "torch.func.jacrev": lambda model: torch.func.jacrev(loss_of(model))(dense_of(model)),
    "torch.func.jvp": lambda model: torch.func.jvp(
        loss_of(model), (dense_of(model),), (dense_of(model),)
    ),
    "torch.jit.trace": lambda model: torch.jit.trace(model, (USERS, ITEMS)),
    "torch.jit.script": torch.jit.script,
    "torch.fx.symbolic_trace": torch.fx.symbolic_trace,
    "torch.export": lambda model: torch.export.export(model, (USERS, ITEMS), strict=False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("training", [True, False])
def test_a_transform_of_torch_that_cannot_follow_a_lookup_is_named_with_the_remedy(
    transform: str, training: bool
) -> None:
    torch.manual_seed(0)
    model = converted(Product())
    before = model(USERS, ITEMS)
    model.train(training)
    with pytest.raises(ConfigError) as caught:
        TRANSFORMS[transform](model)
    message = str(caught.value)
    for words in (
        "'user'",
        transform,
        "Hotbed",
        "RecModel.export",
        "hotbed.training.auto.plain_state_dict",
    ):
        assert words in message
    assert torch.equal(model(USERS, ITEMS), before)
    plain = Product()
    plain.load_state_dict(plain_state_dict(model))
    if transform != "torch.fx.symbolic_trace":
        TRANSFORMS[transform](plain.train(training))  # the remedy


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_and_functional_calls_still_look_up() -> None:
    model = converted(Product())
    expected = model(USERS, ITEMS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(USERS, ITEMS), expected)
    called = torch.func.functional_call(model, dense_of(model), (USERS, ITEMS))
    assert torch.equal(called, expected)


# --- the way back


@pytest.mark.parametrize("optimizer_of", [sgd, lambda model: torch.optim.Adam(model.parameters())])
def test_a_plain_state_dict_loads_into_the_plain_model_with_the_same_scores(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Product())
    model[0].register_buffer("calls", torch.zeros(1))
    twin = copy.deepcopy(model)
    own = optimizer_of(twin)
    model, optimizer, _ = hb.auto(model, optimizer_of(model))
    for number in range(5):
        for network, steps in ((model, optimizer), (twin, own)):
            steps.zero_grad()
            network[0]((USERS + number) % 7, ITEMS).sum().backward()
            steps.step()
    state = plain_state_dict(model)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in twin.state_dict().items()
    }
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5)
    back = copy.deepcopy(twin)
    back.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(back[0](USERS, ITEMS), model[0](USERS, ITEMS))
    assert plain_state_dict(twin).keys() == twin.state_dict().keys()  # of any model


def test_ids_that_no_weight_holds_are_an_error_or_left_out() -> None:
    model = converted(Product())
    model(torch.tensor([3, 10**12, -5]), torch.tensor([1, 1, 1]))
    with pytest.raises(
        ConfigError,
        match=r"^plain_state_dict: the weight of 'user' holds ids of 0 to 29, got rows of 2 other "
        r"ids, such as .*leave_out_new_ids=True",
    ):
        plain_state_dict(model)
    state = plain_state_dict(model, leave_out_new_ids=True)
    assert state["user.weight"].shape == (NUM_USERS, 4)
    plain = Product()
    plain.load_state_dict(state)
    assert torch.equal(plain(USERS, ITEMS), model.eval()(USERS, ITEMS))


def test_rows_that_were_forgotten_come_back_as_evaluation_reads_them() -> None:
    model = converted(Product(), tables={"user": {"evict": hb.Ttl(steps=1)}})
    (table,) = model.user.tables
    optimizer = hb.SparseOptimizer(model)
    for _ in range(3):
        model(USERS[:4], ITEMS[:4]).sum().backward()
        optimizer.step()
    assert table.evict() > 0
    plain = Product()
    plain.load_state_dict(plain_state_dict(model))
    assert torch.equal(plain(USERS, ITEMS), model.eval()(USERS, ITEMS))


def test_modules_that_share_a_weight_and_tables_beside_them_come_back() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(5, 2)
            self.second = nn.Embedding(5, 2)
            self.second.weight = self.first.weight
            self.bag = nn.EmbeddingBag(6, 2)
            self.own = hb.Embedding(hb.Table("own", 2))

        def forward(self, ids: Tensor) -> Tensor:
            return self.first(ids) + self.second(ids) + self.bag(ids[:, None]) + self.own(ids)

    ids = torch.arange(5)
    model = Shared()
    model, _, _ = hb.auto(model, sgd(model))
    expected = model(ids)
    plain = Shared()
    plain.load_state_dict(plain_state_dict(model))
    assert torch.equal(plain.eval()(ids), expected)
    assert plain.first.weight is plain.second.weight


def test_a_table_of_ids_before_their_remainder_and_other_values_are_refused() -> None:
    class Hashed(Product):
        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            return super().forward(user % NUM_USERS, item)

    model = converted(Hashed(), unbounded=["user"])
    with pytest.raises(ConfigError, match=r"plain_state_dict: .*'user'.*% bins"):
        plain_state_dict(model, leave_out_new_ids=True)
    with pytest.raises(
        ConfigError, match=r"plain_state_dict: expected an nn\.Module, got RecModel"
    ):
        plain_state_dict(hb.RecModel(Product()))  # type: ignore[arg-type]
