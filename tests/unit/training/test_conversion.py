# SPDX-License-Identifier: Apache-2.0
"""What `hb.auto` moves, keeps and refuses, and how a converted model behaves as a torch module."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import hotbed as hb
from hotbed.errors import ConfigError, RowShapeError
from hotbed.training.auto import converted

NUM_IDS, DIM = 11, 4


class Towers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.user = nn.Embedding(NUM_IDS, DIM, **options)
        self.item = nn.Embedding(NUM_IDS, DIM)
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, user: Tensor, item: Tensor, time: Tensor | None = None) -> Tensor:
        return self.head(torch.cat([self.user(user), self.item(item)], -1)).squeeze(-1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Any) -> None:
    optimizer.zero_grad()
    model(*batch).square().sum().backward()
    optimizer.step()


IDS = torch.arange(6)


def table_of(model: nn.Module, path: str) -> hb.Table:
    state = converted(model)
    assert state is not None
    return state.lookups[path].tables[0]


# --- what is kept


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_IDS, DIM)
        self.output = nn.Linear(DIM, NUM_IDS, bias=False)
        self.output.weight = self.item.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.item(ids))


def test_a_weight_that_is_tied_to_an_output_layer_stays_and_learns() -> None:
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer = adam(model)
    same, returned, report = hb.auto(model, optimizer)
    assert same is model
    assert returned is optimizer
    assert type(model.item) is nn.Embedding
    assert [entry.path for entry in report.kept] == ["item"]
    assert "output.weight" in report.kept[0].reason
    learn(model, returned, IDS)
    learn(twin, adam(twin), IDS)
    assert torch.equal(model.item.weight, twin.item.weight)


class OwnForward(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnInit(nn.Embedding):
    def __init__(self, num: int) -> None:
        super().__init__(num, DIM, padding_idx=0)
        self.colour = "red"

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)


def half() -> nn.Embedding:
    return nn.Embedding(NUM_IDS, DIM, dtype=torch.bfloat16)


def hooked() -> nn.Embedding:
    module = nn.Embedding(NUM_IDS, DIM)
    module.weight.register_hook(lambda grad: grad)
    return module


@pytest.mark.parametrize(
    "module, reason",
    [
        (OwnForward(NUM_IDS, DIM), "OwnForward has forward of its own"),
        (parametrizations.weight_norm(nn.Embedding(NUM_IDS, DIM)), "parametrized"),
        (half(), "bfloat16"),
        (hooked(), "hooks"),
    ],
    ids=["subclass", "parametrized", "bfloat16", "hooks"],
)
def test_an_embedding_of_another_kind_is_kept(module: nn.Embedding, reason: str) -> None:
    model = Towers()
    model.user = module
    _, _, report = hb.auto(model, adam(model))
    assert {entry.path: entry.outcome for entry in report.entries} == {
        "user": "kept",
        "item": "moved",
    }
    assert reason in report.kept[0].reason
    assert model.user is module


def test_tables_none_keeps_an_embedding_and_its_optimizer() -> None:
    torch.manual_seed(0)
    model = Towers()
    twin = copy.deepcopy(model)
    model, optimizer, report = hb.auto(model, adam(model), tables={"user": None})
    assert [entry.path for entry in report.moved] == ["item"]
    learn(model, optimizer, IDS, IDS)
    learn(twin, adam(twin), IDS, IDS)
    np.testing.assert_allclose(model.user.weight.detach(), twin.user.weight.detach(), atol=1e-6)


def test_modules_that_share_a_kept_weight_are_all_kept() -> None:
    model = Towers()
    model.item.weight = model.user.weight
    _, _, report = hb.auto(model, adam(model), tables={"item": None})
    assert [entry.path for entry in report.kept] == ["user", "item"]


def test_a_subclass_that_initializes_alone_moves_with_its_attributes() -> None:
    model = Towers()
    model.user = OwnInit(NUM_IDS)
    hb.auto(model, adam(model))
    assert model.user.colour == "red"
    assert model.user.padding_idx == 0
    assert (table_of(model, "user").lookup(np.arange(NUM_IDS)) == 0.5).all()


class Asking(nn.Module):
    """Calls its embeddings by their class."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"user": nn.Embedding(NUM_IDS, DIM), "tags": nn.EmbeddingBag(NUM_IDS, DIM)}
        )
        self.head = nn.LazyLinear(1)

    def forward(self, user: Tensor, tags: Tensor) -> Tensor:
        rows = []
        for ids, part in zip((user, tags), self.parts.values(), strict=True):
            if isinstance(part, nn.Embedding):
                rows.append(part(ids))
            elif isinstance(part, nn.EmbeddingBag):
                rows.append(part(ids) * 2)
        return self.head(torch.cat(rows, 1)).squeeze(1)


def test_code_that_asks_for_the_class_of_an_embedding_runs_as_before() -> None:
    torch.manual_seed(0)
    model = Asking()
    batch = (IDS, IDS[:, None].repeat(1, 2))
    expected = model(*batch)
    hb.auto(model, adam(model))
    torch.testing.assert_close(model(*batch), expected)
    again = copy.deepcopy(model)
    assert isinstance(again.parts["tags"], nn.EmbeddingBag)
    torch.testing.assert_close(again(*batch), expected)


def test_a_layer_without_a_size_gets_it_from_the_first_batch() -> None:
    model = Asking()
    model, optimizer, _ = hb.auto(model, torch.optim.SGD(model.parameters(), lr=0.1))
    learn(model, optimizer, IDS, IDS[:, None])
    assert model.head.weight.shape == (1, 2 * DIM)


# --- what is refused


def assert_unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert converted(model) is None
    assert not [m for m in model.modules() if isinstance(m, hb.Embedding)]
    assert all(p.numel() for p in model.parameters())
    optimizer.step()


@pytest.mark.parametrize(
    "options, reason",
    [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq")],
)
def test_options_that_no_table_has_are_refused_by_path(
    options: dict[str, Any], reason: str
) -> None:
    model = Towers(**options)
    optimizer = adam(model)
    with pytest.raises(ConfigError, match=f"(?s)user: {reason}.*tables={{'user': None}}") as error:
        hb.auto(model, optimizer)
    assert "item" not in str(error.value)
    assert_unchanged(model, optimizer)
    hb.auto(model, optimizer, tables={"user": None})
    assert type(model.user) is nn.Embedding


def test_every_refused_module_is_listed_at_once() -> None:
    model = Towers(max_norm=1.0)
    optimizer = torch.optim.Adam([*model.head.parameters(), model.user.weight])
    with pytest.raises(ConfigError, match=r"(?s)user: max_norm.*item: its weight is in no opt"):
        hb.auto(model, optimizer)
    assert_unchanged(model, optimizer)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS: no rule"),
        (lambda p: torch.optim.NAdam(p), "NAdam: no rule"),
        (lambda p: type("Mine", (torch.optim.SGD,), {})(p, lr=0.1), "Mine: no rule"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening=0.1"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "lr_decay=0.1"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered=True"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5), "momentum=0.5"),
        (lambda p: torch.optim.Adam(p, eps=0.0), "eps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_optimizers_without_an_equal_rule_are_refused(make: Any, reason: str) -> None:
    model = Towers()
    optimizer = make(list(model.parameters()))
    with pytest.raises(ConfigError, match=f"user: .*{reason}"):
        hb.auto(model, optimizer)
    assert converted(model) is None


def test_a_setting_counts_only_in_the_group_of_an_embedding() -> None:
    model = Towers()
    embeddings = [model.user.weight, model.item.weight]
    groups = [{"params": embeddings}, {"params": model.head.parameters(), "amsgrad": True}]
    hb.auto(model, torch.optim.Adam(groups))


def test_a_gradient_that_the_optimizer_does_not_take_is_refused() -> None:
    model = Towers(sparse=True)
    with pytest.raises(ConfigError, match="user: Adam: it does not take sparse gradients"):
        hb.auto(model, adam(model))


def test_a_scheduler_that_was_made_before_is_refused() -> None:
    model = Towers()
    optimizer = adam(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ConfigError, match="scheduler"):
        hb.auto(model, optimizer)


def test_a_weight_in_two_optimizers_is_refused() -> None:
    model = Towers()
    with pytest.raises(ConfigError, match="one optimizer, got Adam, SGD"):
        hb.auto(model, [adam(model), torch.optim.SGD([model.user.weight], lr=0.1)])


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"tables": {"usr": {}}}, "hb.auto.tables: .*'usr'.*Did you mean 'user'"),
        ({"unbounded": ["itm"]}, "hb.auto.unbounded: .*'itm'.*Did you mean 'item'"),
        ({"tables": {"user": {"evikt": None}}}, "user: .*'evikt'.*Did you mean 'evict'"),
        ({"tables": {"user": {"dim": 3}}}, "user: dim comes from the model"),
        ({"tables": {"user": {"dtype": "int3"}}}, "user: .*int3"),
        ({"tables": {"user": None}, "unbounded": ["user"]}, "kept as it is, got 'user'"),
    ],
)
def test_wrong_keywords_are_named(keywords: dict[str, Any], message: str) -> None:
    model = Towers()
    with pytest.raises(ConfigError, match=message):
        hb.auto(model, adam(model), **keywords)
    assert converted(model) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": Towers}, "model: expected an nn.Module, got the class Towers"),
        ({"optimizer": None}, "optimizer: expected a torch optimizer .*, got NoneType"),
        ({"tables": ["user"]}, "tables: expected a dict .*, got list"),
        ({"tables": {"user": hb.Ttl(days=1)}}, r"tables\['user'\]: expected a dict .*, got Ttl"),
        ({"times": 5}, "times: expected the name of an argument, got 5"),
        ({"unbounded": "user"}, r"unbounded: expected a list .*Write \['user'\]"),
    ],
)
def test_arguments_of_another_type_are_named(change: dict[str, Any], message: str) -> None:
    model = Towers()
    with pytest.raises(ConfigError, match=rf"^hb\.auto\.{message}"):
        hb.auto(**{"model": model, "optimizer": adam(model), **change})
    assert_unchanged(model, adam(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_model_is_converted_once_and_unwrapped() -> None:
    model = Towers()
    _, optimizer, _ = hb.auto(model, adam(model))
    with pytest.raises(ConfigError, match="once"):
        hb.auto(model, optimizer)
    with pytest.raises(ConfigError, match=r"no nn\.Embedding"):
        hb.auto(nn.Linear(2, 2), adam(nn.Linear(2, 2)))
    wrapped = nn.DataParallel(Towers())
    with pytest.raises(ConfigError, match="DataParallel"):
        hb.auto(wrapped, adam(wrapped))
    with pytest.raises(ConfigError, match="compiled"):
        hb.auto(torch.compile(Towers()), adam(Towers()))


def test_reading_the_weight_of_a_table_names_the_way_out() -> None:
    model = Towers()
    hb.auto(model, adam(model))
    with pytest.raises(ConfigError, match=r"user.weight: .*tables={'user': None}"):
        model.user.weight.sum()
    assert model.user.num_embeddings == NUM_IDS
    assert model.user.embedding_dim == DIM


# --- the module afterwards


def test_hooks_lists_and_partials_refer_to_the_same_object() -> None:
    model = Towers()
    user = model.user
    shapes: list[Any] = []
    user.register_forward_hook(lambda module, args, rows: shapes.append(rows.shape))
    look_up = functools.partial(user)
    user.colour = "red"
    hb.auto(model, adam(model))
    assert model.user is user
    assert look_up(IDS).shape == (6, DIM)
    assert shapes == [(6, DIM)]
    assert user.colour == "red"


def test_training_inserts_new_ids_and_evaluation_does_not() -> None:
    model = Towers()
    model, _, _ = hb.auto(model, adam(model))
    new = torch.tensor([10**12, -5])
    model.eval()
    rows = model.user(new)
    assert len(table_of(model, "user")) == NUM_IDS
    assert not table_of(model, "user").frozen
    model.train()
    assert torch.equal(model.user(new), rows)
    assert len(table_of(model, "user")) == NUM_IDS + 2
    many = table_of(model, "item").lookup(np.arange(1000, 3000))
    assert abs(many.mean()) < 0.05
    assert abs(many.std() - 1) < 0.05


def test_a_frozen_weight_is_a_frozen_table_in_any_optimizer_or_none() -> None:
    model = Towers()
    model.user.requires_grad_(False)
    before = model.user.weight.clone()
    learning = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, _ = hb.auto(model, torch.optim.SGD(learning, lr=0.1))
    learn(model, optimizer, IDS, IDS)
    assert torch.equal(torch.from_numpy(table_of(model, "user").lookup(range(NUM_IDS))), before)
    assert table_of(model, "user").frozen
    model(torch.tensor([77]), torch.tensor([0]))
    assert len(table_of(model, "user")) == NUM_IDS


def test_keywords_of_tables_reach_them() -> None:
    model = Towers()
    tables: Any = {"user": {"evict": hb.Lru(5000), "seed": 3}, "item": {"init": hb.Zeros()}}
    model, _, report = hb.auto(model, adam(model), tables=tables)
    assert table_of(model, "user").evictions == (hb.Lru(5000),)
    assert table_of(model, "user").seed == 3
    assert not table_of(model, "item").lookup([99]).any()
    assert [entry.table for entry in report.moved] == [
        table_of(model, "user"),
        table_of(model, "item"),
    ]


def test_a_deep_copy_learns_apart_and_modules_that_share_still_do() -> None:
    torch.manual_seed(0)
    model = Towers()
    model.item.weight = model.user.weight
    model, optimizer, _ = hb.auto(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = table_of(model, "user").lookup(IDS.numpy())
    twin, own = copy.deepcopy((model, optimizer))
    assert converted(twin).lookups["user"] is twin.user
    assert converted(twin).model is twin
    assert twin.user.rows[0] is twin.item.rows[0]
    assert twin.user.gradients is twin.item.gradients
    assert own.param_groups[0]["params"][0] is twin.user.rows[0]
    learn(twin, own, IDS, IDS)
    assert np.array_equal(table_of(model, "user").lookup(IDS.numpy()), before)
    learn(model, optimizer, IDS, IDS)
    assert np.array_equal(
        table_of(model, "user").lookup(IDS.numpy()), table_of(twin, "user").lookup(IDS.numpy())
    )


def test_a_state_dict_of_either_time_loads() -> None:
    torch.manual_seed(0)
    original = Towers()
    before = original.state_dict()
    before = copy.deepcopy(before)
    model, optimizer, _ = hb.auto(original, adam(original))
    learn(model, optimizer, IDS, IDS)
    after = copy.deepcopy(model.state_dict())
    rows = table_of(model, "user").lookup(IDS.numpy())
    learn(model, optimizer, IDS + 3, IDS)  # ids 0 to 2 have missed a step
    model.load_state_dict(after)
    assert np.array_equal(table_of(model, "user").lookup(IDS.numpy()), rows)
    learn(model, optimizer, IDS + 3, IDS)
    model.load_state_dict(before)
    assert np.array_equal(table_of(model, "user").lookup(range(NUM_IDS)), before["user.weight"])
    with pytest.raises(RuntimeError, match=r"user\.weight: expected the shape"):
        model.load_state_dict({**before, "user.weight": torch.zeros(2, DIM)})


def test_torchs_checks_of_bags_remain() -> None:
    model = nn.Sequential(nn.EmbeddingBag(NUM_IDS, DIM))
    hb.auto(model, torch.optim.SGD(model.parameters(), lr=0.1))
    bag = model[0]
    with pytest.raises(RowShapeError, match=r"0: expected ids of shape"):
        bag(IDS)
    with pytest.raises(RowShapeError, match="per_sample_weights"):
        bag(IDS, torch.tensor([0]), torch.ones(2))
    mean = nn.Sequential(nn.EmbeddingBag(NUM_IDS, DIM))  # torch's mode is mean
    hb.auto(mean, torch.optim.SGD(mean.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="mode 'sum' only"):
        mean[0](IDS, torch.tensor([0]), torch.ones(6))


# --- times


DAY = 86_400_000_000


def test_times_of_an_argument_reach_the_policies() -> None:
    model = Towers()
    tables: Any = {"user": {"evict": hb.Ttl(days=7)}}
    model, optimizer, _ = hb.auto(model, adam(model), tables=tables, times="time")
    table = table_of(model, "user")
    learn(model, optimizer, IDS, IDS, (100 + torch.arange(6)) * DAY)
    assert table.evict(106 * DAY) == 0
    assert table.evict(108 * DAY) == 7  # ids 0 and 1, and those that the first batch did not name
    assert table.evict(111 * DAY) == 3
    history = torch.tensor([[1, 2], [3, 4]])
    learn(model, optimizer, history, history, torch.tensor([120 * DAY, 130 * DAY]))
    assert table.evict(128 * DAY) == 3  # ids 5, 1 and 2
    assert np.flatnonzero(table.find(range(NUM_IDS)) >= 0).tolist() == [3, 4]
    with pytest.raises(RowShapeError, match=r"user: .*3 times, got 4"):
        model(history, history, torch.arange(3))


def test_missing_times_are_named() -> None:
    model = Towers()
    tables: Any = {"user": {"evict": hb.Ttl(days=7)}}
    model, _, _ = hb.auto(model, adam(model), tables=tables)
    with pytest.raises(ConfigError, match=r"user: .*needs times, got none. Give hb.auto times="):
        model(IDS, IDS)
    model = Towers()
    model, _, _ = hb.auto(model, adam(model), tables=tables, times="tiem")
    with pytest.raises(ConfigError, match=r"'tiem'.*Did you mean 'time'"):
        model(IDS, IDS, torch.arange(6))
    with pytest.raises(ConfigError, match=r"'tiem'.*Did you mean 'time'"):
        hb.auto(Towers(), adam(Towers()), times="tiem", batch=(IDS, IDS, torch.arange(6)))


def test_carried_rows_count_from_the_first_batch() -> None:
    model = Towers()
    tables: Any = {"user": {"evict": hb.Ttl(steps=3)}}
    model, optimizer, _ = hb.auto(model, adam(model), tables=tables)
    table = table_of(model, "user")
    for _ in range(2):
        learn(model, optimizer, IDS, IDS)
    assert table.evict() == 0
    for _ in range(2):
        learn(model, optimizer, IDS, IDS)
    assert table.evict() == NUM_IDS - len(IDS)


# --- batches of a Dataset


def test_a_batch_is_bound_by_name_and_brings_its_times() -> None:
    torch.manual_seed(0)
    model = Towers()
    tables: Any = {"user": {"evict": hb.Ttl(days=7)}}
    model, _, _ = hb.auto(model, adam(model), tables=tables)
    batch = hb.Batch(
        ids={"user": hb.Ids(np.arange(4)), "item": hb.Ids(np.arange(4)[::-1].copy())},
        dense={},
        labels={},
        weight=None,
        time=np.arange(4) * DAY,
        num_samples=4,
    )
    scores = model(batch)
    model.eval()
    assert torch.equal(scores, model(torch.arange(4), torch.arange(3, -1, -1)))
    state = converted(model)
    assert state.signature.names == ("user", "item", "time")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_parts_stay_and_are_reported() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding(5, 2)
            self.part = torch.jit.script(nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2)))

        def forward(self, ids: Tensor) -> Tensor:
            return self.item(ids) + self.part(ids)

    model = Mixed()
    expected = model(torch.arange(5))
    model, _, report = hb.auto(model, torch.optim.Adam(model.parameters()))
    assert [(entry.path, entry.kind, entry.outcome) for entry in report.entries] == [
        ("item", "Embedding", "moved"),
        ("part.0", "Embedding", "kept"),
    ]
    assert report.kept[0].reason == "it is compiled by TorchScript"
    assert torch.equal(model(torch.arange(5)), expected)


# --- ids without `% bins`


class Hashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(NUM_IDS, DIM, padding_idx=0)
        self.tags = nn.EmbeddingBag(NUM_IDS, DIM, mode="sum", padding_idx=0)
        self.item = nn.Embedding(NUM_IDS, DIM)

    def forward(self, user: Tensor, tags: Tensor, weights: Tensor) -> Tensor:
        bags = self.tags(tags % NUM_IDS, per_sample_weights=weights)
        return self.user((31 * user + 1) % NUM_IDS) + bags + self.item(user % NUM_IDS)


def hashed_batch() -> tuple[Tensor, Tensor, Tensor]:
    user = torch.tensor([5, 10**12, -3, 5])
    tags = torch.tensor([[0, 7], [NUM_IDS, 0], [-1, 2], [10**12, 3]])
    return user, tags, torch.rand(4, 2)


@pytest.mark.parametrize("has_batch", [False, True])
def test_unbounded_tables_take_ids_before_the_remainder(has_batch: bool) -> None:
    torch.manual_seed(0)
    model = Hashed()
    batch = hashed_batch()
    given = batch if has_batch else None
    model, optimizer, _ = hb.auto(model, adam(model), unbounded=["user", "tags"], batch=given)
    model(*batch).square().sum().backward()
    optimizer.step()
    user, tags, weights = batch
    for path, ids in (("user", 31 * user + 1), ("tags", tags.flatten()[1:])):
        table = table_of(model, path)
        assert (table.find(ids.unique().numpy()) >= 0).all()
        assert len(table) == NUM_IDS + (ids.unique() >= NUM_IDS).sum() + (ids.unique() < 0).sum()
    assert len(table_of(model, "item")) == NUM_IDS
    model.eval()
    rows = [
        torch.from_numpy(table_of(model, path).lookup(ids))
        for path, ids in (
            ("user", (31 * user + 1).numpy()),
            ("tags", tags.flatten().numpy()),
            ("item", (user % NUM_IDS).numpy()),
        )
    ]
    is_tag = (tags != 0) * weights  # 0 is padding, and a multiple of the bins is not
    bags = (rows[1].view(4, 2, DIM) * is_tag[..., None]).sum(1)
    torch.testing.assert_close(model(*batch), rows[0] + bags + rows[2])


def test_unbounded_lookups_need_the_model_around_them() -> None:
    model = Hashed()
    model, _, _ = hb.auto(model, adam(model), unbounded=["user"])
    with pytest.raises(ConfigError, match=r"user: its ids are computed .* outside of its forward"):
        model.user(torch.tensor([1]))


def test_unbounded_is_refused_where_ids_do_not_end_with_a_remainder() -> None:
    model = Towers()
    optimizer = adam(model)
    for batch in (None, (IDS, IDS)):
        with pytest.raises(ConfigError, match=r"do not end with '% bins', got 'user'"):
            hb.auto(model, optimizer, unbounded=["user"], batch=batch)
        assert_unchanged(model, optimizer)


def test_a_model_that_cannot_be_traced_converts_and_says_so_when_ids_are_needed() -> None:
    class Opaque(Hashed):
        def forward(self, user: Tensor, tags: Tensor, weights: Tensor) -> Tensor:
            ids = torch.from_numpy(user.numpy() % NUM_IDS)
            return self.user(ids)

    model = Opaque()
    model, optimizer, _ = hb.auto(model, adam(model))
    learn(model, optimizer, *hashed_batch())
    model = Opaque()
    optimizer = adam(model)
    with pytest.raises(ConfigError, match=r"code of Opaque cannot be traced.*Leave unbounded out"):
        hb.auto(model, optimizer, unbounded=["user"], batch=hashed_batch())
    assert_unchanged(model, optimizer)
    model, _, _ = hb.auto(model, optimizer, unbounded=["user"])
    with pytest.raises(ConfigError, match=r"code of Opaque cannot be traced.*without unbounded"):
        model(*hashed_batch())


# --- what the code of a model shows


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(NUM_IDS, DIM)
        self.item = nn.Embedding(NUM_IDS, DIM)
        self.score = nn.Embedding(NUM_IDS, DIM)

    def forward(self, user: Tensor) -> Tensor:
        rows = self.user(user)
        if user.sum() > 5:
            rows = rows + self.item(user)
        return rows @ self.score.weight.T


@pytest.mark.parametrize("batch", [None, (IDS,)])
def test_branches_are_refused_and_reads_are_kept(batch: Any) -> None:
    model = Branching()
    optimizer = adam(model)
    with pytest.raises(
        ConfigError, match=r"(?s)these embeddings cannot.*item: .*depends on the data"
    ):
        hb.auto(model, optimizer, batch=batch)
    assert_unchanged(model, optimizer)
    model, optimizer, report = hb.auto(model, optimizer, tables={"item": None}, batch=batch)
    assert [entry.path for entry in report.moved] == ["user"]
    assert "outside a lookup" in {entry.path: entry.reason for entry in report.kept}["score"]
    learn(model, optimizer, IDS)
