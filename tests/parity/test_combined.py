# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a converted model does what its torch optimizer did: each test trains both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam
from torch.optim import lr_scheduler as schedulers

import hotbed as hb
from hotbed.errors import ConfigError, NonFiniteGradient

pytestmark = pytest.mark.torch_core

NUM_IDS, DIM, STEPS = 12, 4, 12
Train = Callable[[nn.Module, list[Optimizer]], list[float]]
Make = Callable[[nn.Module], list[Optimizer]]


class Net(nn.Module):
    """Two embeddings, one of them looked up for some batches only, and a tower."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(NUM_IDS, DIM, mode="sum", sparse=sparse)
        self.item = nn.EmbeddingBag(NUM_IDS, DIM, mode="sum", sparse=sparse)
        self.tower = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        rows = self.user(users)
        if len(items):
            rows = rows + self.item(items)
        scores: Tensor = self.tower(rows).squeeze(1)
        return scores


def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    random = np.random.default_rng(0)
    for number in range(STEPS):
        users = torch.from_numpy(random.integers(0, NUM_IDS, (5, 2)))
        items = torch.from_numpy(random.integers(0, NUM_IDS, (5, 1)))
        if number % 3 == 2:
            items = items[:0]
        yield users, items, torch.from_numpy(random.normal(size=5)).float()


def loss_of(model: nn.Module, users: Tensor, items: Tensor, label: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(users, items), label)


def pair(make: Make, *, sparse: bool = False) -> tuple[Any, ...]:
    """Return a torch model with its optimizers, and the same model converted."""
    torch.manual_seed(0)
    plain = Net(sparse=sparse)
    model = copy.deepcopy(plain)
    converted, combined, _ = hb.auto(model, make(model))
    return plain, make(plain), converted, combined


def agree(plain: Any, model: Any) -> None:
    for name in ("user", "item"):
        rows = getattr(model, name).tables[0].lookup(np.arange(NUM_IDS))
        weight = getattr(plain, name).weight.detach()
        torch.testing.assert_close(torch.from_numpy(rows), weight, rtol=1e-5, atol=5e-6)
    for own, other in zip(model.tower.parameters(), plain.tower.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def check(train: Train, make: Make, *, sparse: bool = False) -> None:
    plain, optimizers, model, combined = pair(make, sparse=sparse)
    torch.testing.assert_close(
        torch.tensor(train(model, combined)),
        torch.tensor(train(plain, optimizers)),
        rtol=5e-6,
        atol=1e-7,
    )
    agree(plain, model)


def learn(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
    losses = []
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


# --- optimizers and their rules ------------------------------------------------------------------


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.3)]


def momentum(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]


def adagrad(model: nn.Module) -> list[Optimizer]:
    return [Adagrad(model.parameters(), lr=0.3)]


def adam(model: nn.Module) -> list[Optimizer]:
    return [Adam(model.parameters(), lr=0.05, weight_decay=0.01)]


def sparse_adam(model: Any) -> list[Optimizer]:
    embeddings = [model.user.weight, model.item.weight]
    return [SparseAdam(embeddings, lr=0.05), Adam(model.tower.parameters(), lr=0.05)]


ALL = [sgd, momentum, adagrad, adam, sparse_adam]
every_optimizer = pytest.mark.parametrize("make", ALL)


@every_optimizer
def test_a_step_moves_what_torch_moves(make: Make) -> None:
    check(learn, make, sparse=make is sparse_adam)


# --- schedulers ----------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "step": lambda o: schedulers.StepLR(o, step_size=3, gamma=0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=STEPS),
    "one_cycle": lambda o: schedulers.OneCycleLR(
        o, max_lr=0.2, total_steps=STEPS, cycle_momentum=False
    ),
    "chained": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, total_iters=4), schedulers.ExponentialLR(o, gamma=0.9)],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of torch 2.6's own SequentialLR
@pytest.mark.filterwarnings("error")
def test_schedulers_drive_tables_and_dense_parameters(
    schedule: Callable[[Optimizer], Any], make: Make
) -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        scheduler = schedule(optimizers[0])
        losses = []
        for batch in batches():
            optimizers[0].zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            optimizers[0].step()
            scheduler.step()
            losses.append(loss.item())
        return [*losses, *scheduler.get_last_lr()]

    check(train, make)


def test_a_schedule_of_a_measured_loss_drives_tables_and_dense_parameters() -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        scheduler = schedulers.ReduceLROnPlateau(optimizers[0], patience=0, factor=0.5)
        losses = []
        for _ in range(2):
            losses += learn(model, optimizers)
            scheduler.step(1.0)
        return [*losses, *scheduler.get_last_lr()]

    check(train, adam)


def test_a_rate_that_is_a_tensor_is_followed_when_it_changes_in_place() -> None:
    def make(model: nn.Module) -> list[Optimizer]:
        return [SGD(model.parameters(), lr=torch.tensor(0.3))]

    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        losses = learn(model, optimizers)
        optimizers[0].param_groups[0]["lr"].fill_(0.05)
        return losses + learn(model, optimizers)

    check(train, make)


@pytest.mark.parametrize(
    ("schedule", "setting"),
    [
        (lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=STEPS), "betas"),
        (lambda o: o.param_groups[0].update(weight_decay=0.5), "weight_decay"),
        (lambda o: o.param_groups[0].update(maximize=True), "maximize"),
    ],
)
def test_a_setting_that_rules_cannot_follow_is_refused_by_name(
    schedule: Callable[[Optimizer], Any], setting: str
) -> None:
    _, _, model, (combined,) = pair(adam)
    learn(model, [combined])
    before = model.user.tables[0].lookup(np.arange(NUM_IDS))
    tower = copy.deepcopy(model.tower.state_dict())
    schedule(combined)
    with pytest.raises(ConfigError, match=rf"tables \['user', 'item'\] keep their {setting}"):
        learn(model, [combined])
    np.testing.assert_array_equal(model.user.tables[0].lookup(np.arange(NUM_IDS)), before)
    torch.testing.assert_close(model.tower.state_dict(), tower, rtol=0, atol=0)


def test_a_group_without_tables_may_change_every_setting() -> None:
    def make(model: Any) -> list[Optimizer]:
        embeddings = [model.user.weight, model.item.weight]
        towers = {"params": model.tower.parameters(), "lr": 0.05}
        return [SGD([{"params": embeddings, "lr": 0.3}, towers])]

    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        losses = learn(model, optimizers)
        optimizers[0].param_groups[1].update(momentum=0.9, weight_decay=0.1)
        return losses + learn(model, optimizers)

    check(train, make)


# --- gradients -----------------------------------------------------------------------------------

CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("make", [adagrad, adam])
def test_clipping_sees_rows(clip: Callable[[nn.Module], Any], make: Make) -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        losses = []
        for batch in batches():
            optimizers[0].zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            norm = clip(model)
            optimizers[0].step()
            losses += [loss.item(), 0.0 if norm is None else norm.item()]
        return losses

    check(train, make)


@every_optimizer
@pytest.mark.parametrize("zero", ["optimizer", "model", "never"])
def test_gradients_that_are_set_to_zero_or_stay_move_what_they_move_in_torch(
    make: Make, zero: str
) -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        losses = []
        for number, batch in enumerate(batches()):
            for optimizer in optimizers:
                if zero == "optimizer":
                    optimizer.zero_grad(set_to_none=False)
            if zero == "model":
                model.zero_grad(set_to_none=False)
            loss = 0.05 * loss_of(model, *batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                if number == 4:
                    optimizer.step()
            losses.append(loss.item())
        return losses

    check(train, make, sparse=make is sparse_adam)


@every_optimizer
def test_gradients_of_micro_batches_accumulate(make: Make) -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        losses = []
        for number, batch in enumerate(batches()):
            loss = loss_of(model, *batch) / 3
            loss.backward()
            losses.append(loss.item())
            if number % 3 == 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return losses

    check(train, make, sparse=make is sparse_adam)


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_gradient_scaler_unscales_and_skips_steps_that_overflow(make: Make) -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        (optimizer,) = optimizers
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        losses = []
        for number, batch in enumerate(batches()):
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            losses.append(loss.item())
            if number == 5:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(scaler.get_scale())
        return losses

    check(train, make)


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        losses = []
        for batch in batches():

            def closure(batch: Any = batch) -> Tensor:
                optimizers[0].zero_grad()
                loss = loss_of(model, *batch)
                loss.backward()
                return loss

            step: Any = optimizers[0].step
            losses.append(step(closure).item())
        return losses

    check(train, adam)


def test_a_gradient_that_is_not_finite_is_named_and_nothing_changes() -> None:
    _, _, model, (combined,) = pair(adam)
    learn(model, [combined])
    before = model.item.tables[0].lookup(np.arange(NUM_IDS))
    tower = copy.deepcopy(model.tower.state_dict())
    combined.zero_grad()
    batch = next(batches())
    (loss_of(model, *batch) * torch.inf).backward()
    with pytest.raises(NonFiniteGradient, match="'user'"):
        combined.step()
    np.testing.assert_array_equal(model.item.tables[0].lookup(np.arange(NUM_IDS)), before)
    torch.testing.assert_close(model.tower.state_dict(), tower, rtol=0, atol=0)


# --- groups and several optimizers ---------------------------------------------------------------


def two_groups(model: Any) -> list[Optimizer]:
    first = {"params": [model.user.weight, *model.tower.parameters()], "lr": 0.02}
    second = {"params": [model.item.weight], "lr": 0.1, "weight_decay": 0.05}
    return [Adam([first, second])]


def test_groups_have_their_own_rates_and_decay() -> None:
    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        scheduler = schedulers.LambdaLR(optimizers[0], [lambda step: 1.0, lambda step: 0.8**step])
        losses = []
        for _ in range(3):
            losses += learn(model, optimizers)
            scheduler.step()
        return losses

    check(train, two_groups)


def test_several_optimizers_share_a_model() -> None:
    def make(model: Any) -> list[Optimizer]:
        towers = [*model.tower.parameters(), model.user.weight]
        return [Adam(towers, lr=0.05), Adagrad([model.item.weight], lr=0.3)]

    check(learn, make)


def test_a_group_of_dense_parameters_can_be_added() -> None:
    def make(model: Any) -> list[Optimizer]:
        first = [model.user.weight, model.item.weight, *model.tower[0].parameters()]
        return [SGD(first, lr=0.3)]

    def train(model: Any, optimizers: list[Optimizer]) -> list[float]:
        losses = learn(model, optimizers)
        optimizers[0].add_param_group({"params": model.tower[2].parameters(), "lr": 0.1})
        losses += learn(model, optimizers)
        optimizers[0].param_groups[1]["lr"] = 0.01
        return losses + learn(model, optimizers)

    check(train, make)


def test_rows_cannot_be_added() -> None:
    _, _, model, (combined,) = pair(sgd)
    with pytest.raises(ConfigError, match=r"rows of tables cannot be added, got TableRows.'user'"):
        combined.add_param_group({"params": model.user.parameters()})


def test_groups_have_the_number_order_and_names_of_torch() -> None:
    def make(model: Any) -> list[Optimizer]:
        parameters = list(model.named_parameters())
        return [SGD([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.1}], lr=0.3)]

    _, (optimizer,), model, (combined,) = pair(make)
    for own, other in zip(combined.param_groups, optimizer.param_groups, strict=True):
        settings = {key: value for key, value in other.items() if key != "params"}
        assert {key: value for key, value in own.items() if key != "params"} == settings
        assert len(own["params"]) == len(other["params"])
    first, second, *_ = combined.param_groups[0]["params"]
    assert first is model.user.rows[0]
    assert second is model.item.rows[0]
    assert combined.dense.param_groups[0]["param_names"] == ["tower.0.weight"]


def test_a_step_of_the_dense_part_alone_is_refused() -> None:
    _, _, model, (combined,) = pair(adam)
    loss_of(model, *next(batches())).backward()
    with pytest.raises(ConfigError, match="Adam: it is a part of the optimizer"):
        combined.dense.step()


def test_a_scheduler_that_wraps_the_step_already_is_refused() -> None:
    def make(model: nn.Module) -> list[Optimizer]:
        optimizer = SGD(model.parameters(), lr=0.3)
        schedulers.StepLR(optimizer, 3)
        return [optimizer]

    with pytest.raises(ConfigError, match="got SGD whose step a scheduler wraps"):
        pair(make)


# --- hooks and state -----------------------------------------------------------------------------


def test_hooks_made_before_and_after_see_all_gradients() -> None:
    def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def make(model: nn.Module) -> list[Optimizer]:
        (optimizer,) = adagrad(model)
        optimizer.register_step_pre_hook(halve)
        return [optimizer]

    def train(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
        calls = []
        optimizers[0].register_step_post_hook(lambda *arguments: calls.append(1.0))
        handle = optimizers[0].register_step_pre_hook(halve)
        losses = learn(model, optimizers)
        handle.remove()
        return [*losses, *learn(model, optimizers), *calls]

    check(train, make)


@pytest.mark.parametrize("make", [adam, two_groups])
def test_a_state_dict_goes_on_in_another_model(make: Make) -> None:
    plain, optimizers, model, combined = pair(make)
    whole = [schedulers.StepLR(own[0], 1, gamma=0.7) for own in (optimizers, combined)]
    for net, own, scheduler in ((plain, optimizers, whole[0]), (model, combined, whole[1])):
        learn(net, own)
        scheduler.step()
    _, _, other, later = pair(make)
    scheduler = schedulers.StepLR(later[0], 1, gamma=0.7)
    other.load_state_dict(model.state_dict())
    later[0].load_state_dict(copy.deepcopy(combined[0].state_dict()))
    scheduler.load_state_dict(whole[1].state_dict())
    assert learn(other, later) == learn(model, combined)
    learn(plain, optimizers)
    agree(plain, other)


def test_a_state_dict_keeps_rates_of_tables_that_differ_from_their_groups() -> None:
    _, _, _, (combined,) = pair(adam)
    assert "table_rates" not in combined.state_dict()
    combined.sparse.set_learning_rates({"item": 0.007})
    _, _, _, (other,) = pair(adam)
    other.load_state_dict(combined.state_dict())
    rates = {group["tables"][0]: group["lr"] for group in other.sparse.param_groups}
    assert rates == {"user": 0.05, "item": 0.007}


def test_the_state_of_a_weight_is_refused_and_nothing_changes() -> None:
    plain, optimizers, _, (combined,) = pair(adam)
    learn(plain, optimizers)
    before = copy.deepcopy(combined.state_dict())
    with pytest.raises(ConfigError, match=r"state of parameter 0, which is TableRows.'user'"):
        combined.load_state_dict(optimizers[0].state_dict())
    assert combined.state_dict() == before


def test_a_state_dict_with_another_decay_is_refused_and_nothing_changes() -> None:
    _, _, _, (combined,) = pair(adam)
    state = copy.deepcopy(combined.state_dict())
    state["param_groups"][0]["weight_decay"] = 0.5
    before = copy.deepcopy(combined.state_dict())
    with pytest.raises(ConfigError, match="keep their weight_decay"):
        combined.load_state_dict(state)
    assert combined.state_dict() == before


def test_a_copy_trains_on_by_itself() -> None:
    plain, optimizers, model, combined = pair(adam)
    learn(plain, optimizers)
    learn(model, combined)
    other, (copied,) = copy.deepcopy((model, combined))
    assert copied.dense is not combined[0].dense
    losses = learn(other, [copied])
    assert losses == learn(model, combined)
    with pytest.raises(ConfigError, match="a part of the optimizer"):
        copied.dense.step()
    learn(plain, optimizers)
    agree(plain, other)


def test_an_optimizer_over_embeddings_alone_has_a_dense_part_without_parameters() -> None:
    def make(model: Any) -> list[Optimizer]:
        return [
            Adam([model.user.weight], lr=0.05),
            Adagrad([model.item.weight], lr=0.3),
            SGD(model.tower.parameters(), lr=0.1),
        ]

    check(learn, make)


# --- any order of uses ---------------------------------------------------------------------------


@given(
    st.sampled_from([sgd, momentum, adam]),
    st.lists(
        st.one_of(
            st.tuples(st.just("learn"), st.integers(0, STEPS - 1)),
            st.tuples(st.just("step"), st.none()),
            st.tuples(st.just("zero"), st.booleans()),
            st.tuples(st.just("clip"), st.floats(0.01, 1.0)),
            st.tuples(st.just("rate"), st.floats(0.0, 0.05)),
            st.tuples(st.just("freeze"), st.booleans()),
        ),
        min_size=4,
        max_size=24,
    ),
)
def test_any_order_of_uses_does_what_it_does_in_torch(
    make: Make, uses: list[tuple[str, Any]]
) -> None:
    data = list(batches())

    def train(model: Any, optimizers: list[Optimizer]) -> list[float]:
        (optimizer,) = optimizers
        losses = []
        for use, value in [("rate", 0.02), *uses]:
            if use == "learn":
                loss = loss_of(model, *data[value])
                loss.backward()
                losses.append(loss.item())
            elif use == "step":
                optimizer.step()
            elif use == "zero":
                optimizer.zero_grad(set_to_none=value)
            elif use == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), value)
            elif use == "rate":
                optimizer.param_groups[0]["lr"] = value
            else:  # torch moves a frozen weight whose gradient waits; tables do not
                optimizer.zero_grad()
                for parameter in model.item.parameters():
                    parameter.requires_grad_(not value)
        return [0.0, *losses]

    check(train, make)


def test_a_lookup_of_no_ids_counts_as_a_step() -> None:
    def train(model: Any, optimizers: list[Optimizer]) -> list[float]:
        losses = []
        for number, (users, items, label) in enumerate(batches()):
            optimizers[0].zero_grad()
            rows = model.user(users) + model.item(items[: number % 2]).sum(dim=0)
            loss = nn.functional.mse_loss(model.tower(rows).squeeze(1), label)
            loss.backward()
            optimizers[0].step()
            losses.append(loss.item())
        return losses

    check(train, adam)
