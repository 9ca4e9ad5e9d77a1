# SPDX-License-Identifier: Apache-2.0
"""What the trace of an ordinary model finds: its id graph, branches, reads of weights, modulos."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hotbed.data.batch import Batch, Ids
from hotbed.errors import ConfigError
from hotbed.training.auto import Findings, Signature, inspect
from hotbed.training.auto.tracing.recording import symbolic_len

pytestmark = pytest.mark.torch_core
USERS = torch.tensor([5, 0, -3, 8])
ITEMS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])


class Model(nn.Module):
    """Runs a function over embeddings `a`, `b`, `c`, a bag and a linear layer."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.a = nn.Embedding(100, 4)
        self.b = nn.Embedding(100, 4)
        self.c = nn.Embedding(100, 4)
        self.bag = nn.EmbeddingBag(100, 4, mode="sum")
        self.dense = nn.Linear(4, 4)
        self.register_buffer("shift", torch.tensor([3]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, user: Tensor, items: Tensor) -> Any:
        return self.run(self, user, items)


def paths_of(model: nn.Module) -> list[str]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


def findings(run: Callable[..., Any], *, batch: bool = True) -> Findings:
    model = Model(run)
    signature = Signature.of(model, (USERS, ITEMS), {}) if batch else None
    return inspect(model, paths_of(model), signature)


def lookups_in(model: nn.Module, args: Sequence[Any], kwargs: Any) -> list[tuple[str, Any]]:
    """Return the arguments of all lookups of a real forward pass."""
    seen: list[tuple[str, Any]] = []
    hooks = []
    for path in paths_of(model):
        module = model.get_submodule(path)

        def keep(_: Any, own: Any, named: Any, path: str = path) -> None:
            names = ["input", "offsets", "per_sample_weights"]
            given = {**dict(zip(names, own, strict=False)), **named}
            parts = [given.get(name) for name in names]
            seen.append((path, [None if part is None else part.clone() for part in parts]))

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return seen


def check_equal(model: nn.Module, args: Sequence[Any], **kwargs: Any) -> Findings:
    """Check that the id graph computes what the lookups of a forward pass take."""
    signature = Signature.of(model, args, kwargs)
    found = inspect(model, paths_of(model), signature)
    assert found.graph is not None, found.problem
    computed = found.graph(signature.leaves(args, kwargs))
    expected = lookups_in(model, args, kwargs)
    assert [path for path, _ in computed] == [path for path, _ in expected]
    for (_, ids), (_, parts) in zip(computed, expected, strict=True):
        for own, part in zip((ids.values, ids.offsets, ids.weights), parts, strict=True):
            assert (own is None) == (part is None)
            assert part is None or (own.dtype == part.dtype and torch.equal(own, part))
    return found


# --- the id graph ---------------------------------------------------------------------------------


def test_ids_that_are_computed_from_the_batch_are_computed_alike() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        crossed = (items * 2654435761 ^ (user[:, None] << 7)) % 100
        crossed[:, 0] = 7  # changes the tensor in place
        joined = torch.cat([user.abs(), items.reshape(-1), model.shift]) & 63
        positions = torch.arange(len(user), device=user.device) // 2
        rows = model.a(crossed).sum(1) + model.b(positions)
        crossed.fill_(0)  # after its lookup
        with torch.no_grad():
            late = torch.where(items > 5, items, items.new_zeros(()))
        return rows + model.bag(late) + model.a(joined).mean()

    found = check_equal(Model(run), (USERS, ITEMS))
    assert not found.obstacles
    assert found.graph is not None
    other = [torch.tensor([2**62, -(2**63)]), torch.tensor([[2**63 - 1, -1], [0, 3]])]
    assert found.graph.misfit(other) == ""
    crossed = (other[1] * 2654435761 ^ (other[0][:, None] << 7)) % 100
    crossed[:, 0] = 7
    computed = [ids.values for _, ids in found.graph(other)]
    assert torch.equal(computed[0], crossed)
    assert torch.equal(computed[1], torch.tensor([0, 0]))


def test_offsets_and_weights_are_outputs() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 4, mode="sum", include_last_offset=True)

        def forward(self, words: Tensor, offsets: Tensor, *, weights: Tensor) -> Tensor:
            return self.bag(words % 50, offsets, per_sample_weights=weights * 2)

    words = torch.arange(60, 67)
    found = check_equal(
        Bags(), (words, torch.tensor([0, 2, 2, 7])), weights=torch.linspace(0, 1, 7)
    )
    assert found.graph is not None
    (call,) = found.graph.calls
    assert call.weighted
    assert None not in (call.offsets, call.weights)


def test_weights_that_learn_are_left_to_the_forward_pass() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        return model.bag(items, per_sample_weights=model.a(items).sum(-1))

    graph = findings(run).graph
    assert graph is not None
    assert [(call.path, call.weights, call.weighted) for call in graph.calls] == [
        ("a", None, False),
        ("bag", None, True),
    ]


def test_keyword_dict_and_dataclass_arguments_are_leaves() -> None:
    @dataclass
    class Words:
        title: Tensor
        length: Tensor

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleDict({"user": nn.Embedding(9, 2), "word": nn.Embedding(9, 2)})

        def forward(self, ids: dict[str, Tensor], *, words: Words) -> Tensor:
            rows = [self.tables[name](values) for name, values in ids.items()]
            return sum(rows) + self.tables["word"](words.title % 9).sum(1)

    words = Words(torch.arange(8).view(4, 2), torch.ones(4))
    found = check_equal(Nested(), ({"user": torch.arange(4)},), words=words)
    assert {path: source.text for path, source in found.sources.items()} == {
        "tables.user": "'user'",
        "tables.word": "'title' % 9",
    }


def test_submodules_called_twice_are_two_calls() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ids = nn.Embedding(64, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.ids(ids % 64)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return (self.tower(left) * self.tower(right + 1)).sum(-1)

    found = check_equal(Twice(), (USERS.abs(), ITEMS[:, 0]))
    assert found.sources["tower.ids"].text == "'left' % 64 and ('right' + 1) % 64"


def test_a_dense_part_that_export_cannot_follow_does_not_matter() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Any:
        rows = model.a(user.abs() % 7) + model.bag(items)
        if rows.sum() > 0:
            rows = rows * 2
        return rows.detach().numpy()

    found = check_equal(Model(run), (USERS, ITEMS))
    assert not found.refused
    assert not found.obstacles


def test_packed_sequences_are_followed() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(100, 4)
            self.next = nn.Embedding(100, 6)
            self.gru = nn.GRU(4, 3, batch_first=True, bidirectional=True)

        def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(
                self.items(items), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            states, last = self.gru(packed)
            padded, _ = pad_packed_sequence(states, batch_first=True)
            guess = padded.sum(-1).argmax(1)
            return last[0] @ self.next(items[:, 0])[:, :3].T + self.next(guess).sum()

    model = Packed()
    signature = Signature.of(model, (ITEMS, torch.tensor([3, 1, 2, 3])), {})
    found = inspect(model, paths_of(model), signature)
    assert found.graph is not None, found.problem
    assert [call.path for call in found.graph.calls] == ["items"]
    assert found.obstacles == {"next": "a packed sequence"}


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, user, items: m.a(torch.randint(0, 9, (len(user),))), "random numbers (randint)"),
        (lambda m, user, items: m.a(m.b(user).argmax(-1)), "the rows of 'b'"),
        (
            lambda m, user, items: m.a(m.dense(items[:, :1].float().expand(-1, 4)).argmax(-1)),
            "the parameter 'dense.weight', which learns",
        ),
        (
            lambda m, user, items: m.a(user + m.count.add_(1)),
            "the buffer 'count', which the forward pass changes",
        ),
    ],
    ids=["random", "rows", "parameter", "changed buffer"],
)
def test_ids_that_need_more_than_the_batch_are_obstacles(
    run: Callable[..., Tensor], reason: str
) -> None:
    found = findings(run)
    assert found.obstacles["a"] == reason
    assert found.graph is not None
    assert all(call.path != "a" for call in found.graph.calls)


def test_a_graph_that_a_branch_on_shapes_made_names_shapes_that_do_not_fit() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        if items.shape[1] > 9:
            items = items[:, -9:]
        return model.a(items)

    model = Model(run)
    long = torch.arange(4 * 12).view(4, 12)
    found = check_equal(model, (USERS, long))
    assert found.graph is not None
    assert found.graph.misfit([USERS, long]) == ""
    assert found.graph.misfit([USERS, ITEMS]) == (
        "the code of the model was traced for a size of 10 or more of axis 1 of argument 'items', "
        "got 3"
    )


# --- branches and reads ---------------------------------------------------------------------------


def branch_on_data(model: Any, user: Tensor, items: Tensor) -> Tensor:
    rows = model.c(items).sum(1)
    if user.max() > 5:
        return rows + model.a(user)
    return rows + model.b(user)


@pytest.mark.parametrize("batch", [False, True])
def test_a_lookup_in_a_branch_on_data_is_refused(batch: bool) -> None:
    found = findings(branch_on_data, batch=batch)
    assert set(found.refused) == {"a", "b"}
    reason = found.refused["a"]
    assert reason.startswith("whether it is looked up depends on the data of the batch, at test_tr")
    assert not found.problem


def test_a_branch_on_shapes_or_on_plain_arguments_is_not_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(9, 2)
            self.b = nn.Embedding(9, 2)

        def forward(self, ids: Tensor, mode: str, *, twice: Any = None) -> Tensor:
            if ids.dim() == 1:
                ids = ids[:, None]
            if mode == "train" or ids.shape[1] > 3:
                return self.a(ids)
            if twice:
                return self.b(ids) + self.a(ids)
            return self.b(ids)

    found = inspect(Plain(), ["a", "b"])
    assert not found.refused
    assert not found.problem


def test_a_condition_that_checks_data_and_raises_is_not_a_branch() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        assert items.min() >= 0
        if user.max() >= 100:
            raise ValueError("no such user")
        return model.a(user)

    found = findings(run, batch=False)
    assert not found.refused
    assert found.sources["a"].text == "'user'"


WITHOUT_A_BATCH = pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="torch too old: 2.6 makes no tensors of a size without a batch",
)


@WITHOUT_A_BATCH
def test_the_length_of_an_argument_is_followed_without_a_batch() -> None:
    found = findings(lambda model, user, items: model.a(torch.arange(len(user))), batch=False)
    assert found.sources["a"].leaves == ("user",)
    assert not found.problem


@pytest.mark.parametrize("batch", [pytest.param(False, marks=WITHOUT_A_BATCH), True])
def test_a_size_of_an_argument_is_named_as_it_is_written(batch: bool) -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        return model.a(torch.arange(items.shape[1]))

    assert findings(run, batch=batch).sources["a"].text == "arange('items'.shape[1])"


def test_ids_that_a_condition_on_data_chooses_are_obstacles() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        if items.sum() > 3:
            user = user + 1
        return model.a(user) + model.b(items).sum(1)

    found = findings(run)
    assert not found.refused
    assert found.obstacles["a"].startswith("a condition at test_trace.py:")
    assert found.graph is not None
    assert [call.path for call in found.graph.calls] == ["b"]


@pytest.mark.parametrize("batch", [False, True])
def test_a_weight_that_is_read_outside_a_lookup_is_found(batch: bool) -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        scores = functional.linear(model.a(user), model.b.weight)
        return scores.to(model.c.weight.dtype).sum() + model.c(user).sum()

    found = findings(run, batch=batch)
    assert set(found.kept) == {"b"}
    assert found.kept["b"].startswith("by linear() at test_trace.py:")


def test_a_tied_output_layer_reads_the_weight() -> None:
    model = Model(lambda m, user, items: m.dense(m.a(user)))
    model.dense = nn.Linear(4, 100, bias=False)
    model.dense.weight = model.a.weight
    assert inspect(model, paths_of(model)).kept == {"a": "by module 'dense'"}


def test_a_model_that_cannot_be_traced_says_why() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        return model.a(torch.tensor(user.numpy() + len(user.tolist())))

    for batch in (False, True):
        found = findings(run, batch=batch)
        assert found.problem
        assert found.graph is None


# --- % bins ---------------------------------------------------------------------------------------


def test_the_last_modulo_is_found_and_dropped_where_it_is_asked_for() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        hashed = (items * 31 + user[:, None]) % 50
        rows = model.a(hashed) + model.b(torch.stack([items % 7, items & 15])).sum(0)
        return rows.sum(1) + model.c(items[:, 0] % 7 + 1)

    found = findings(run)
    assert {path: source.bins for path, source in found.sources.items()} == {
        "a": 50,
        "b": 16,
        "c": None,
    }
    assert found.sources["a"].text == "(('items' * 31) + 'user') % 50"
    assert found.graph is not None
    leaves = [USERS, ITEMS - 2**62]
    before = dict(found.graph(leaves))
    after = dict(found.graph.unbounded(["a"])(leaves))
    assert torch.equal(after["a"].values, leaves[1] * 31 + USERS[:, None])
    assert torch.equal(after["a"].values % 50, before["a"].values)
    for path in ("b", "c"):
        assert torch.equal(after[path].values, before[path].values)
    both = dict(found.graph.unbounded(["a", "b"])(leaves))
    assert torch.equal(both["b"].values, torch.stack([leaves[1], leaves[1]]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("c", "the ids of this lookup do not end with '% bins', got 'c' with ids 'user'"),
        ("d", "no lookup has this path, got 'd'"),
        ("b", r"do not depend on the batch alone, got 'b' \(random numbers \(randint\)\)"),
    ],
)
def test_only_a_last_modulo_can_be_dropped(path: str, message: str) -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        return model.c(user) + model.b(torch.randint(0, 4, (len(user),)) % 3)

    graph = findings(run).graph
    assert graph is not None
    with pytest.raises(ConfigError, match=message):
        graph.unbounded([path])


# --- nothing is left behind -----------------------------------------------------------------------


def test_a_trace_changes_nothing() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        model.calls += 1
        model.last = user
        rows = functional.dropout(model.a(user) + torch.rand(4), 0.5)
        model.norm(rows)
        if rows.sum() > 0:
            rows = rows + 1
        return rows

    model = Model(run)
    model.calls = 3
    model.norm = nn.BatchNorm1d(4)
    model(USERS.abs(), ITEMS).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    last = model.last
    gradient = model.a.weight.grad
    state = torch.get_rng_state()
    for signature in (None, Signature.of(model, (USERS, ITEMS), {})):
        inspect(model, paths_of(model), signature)
    assert model.calls == 4
    assert model.last is last
    assert model.a.weight.grad is gradient
    assert "forward" not in vars(model.a)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# --- lookups of other kinds -----------------------------------------------------------------------


class Described(nn.Module):
    """Describes a table that does not exist yet."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding_dim = dim

    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("a trace looks nothing up")


def test_modules_that_only_describe_a_table_are_traced_inside_and_outside_of_a_model() -> None:
    outside = Described(8)

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Described(4)
            self.dense = nn.Linear(12, 1)

        def forward(self, user: Tensor, items: Tensor) -> Tensor:
            rows = self.inside(items * 31 + user[:, None]).sum(1)
            return self.dense(torch.cat([rows, outside(user // 2)], -1))

    class Counted(Crossed):
        """The same, with code that torch.export cannot follow: torch.fx finds the ids."""

        def forward(self, user: Tensor, items: Tensor) -> Tensor:
            scores = super().forward(user, items)
            return scores * 2 if scores.sum() > 0 else scores

    for model in (Crossed(), Counted()):
        signature = Signature.of(model, (USERS, ITEMS), {})
        lookups = {"cross": model.inside, "user": outside}
        found = inspect(model, lookups, signature)
        assert found.graph is not None, found.problem
        computed = dict(found.graph([USERS, ITEMS]))
        assert torch.equal(computed["cross"].values, ITEMS * 31 + USERS[:, None])
        assert torch.equal(computed["user"].values, USERS // 2)
        assert found.sources["cross"].text == "('items' * 31) + 'user'"


def test_a_batch_is_traced_by_the_names_of_its_features_and_for_any_size() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross = Described(4)
            self.tag = Described(4)
            self.place = Described(4)

        def forward(self, batch: Any) -> Tensor:
            user = batch.ids["user"].values
            tag = batch.ids["tag"]
            bags = torch.repeat_interleave(torch.arange(len(batch)), tag.offsets.diff())
            rows = self.cross(user * 1_000_003 + batch.ids["movie"].values)
            rows = rows + self.place(torch.arange(batch.num_samples))
            return rows.index_add(0, bags, self.tag(tag.values)) * batch.dense["age"][:, None]

    def batch(num_samples: int) -> Batch:
        user = torch.arange(num_samples)
        tags = Ids(torch.arange(2 * num_samples), 2 * torch.arange(num_samples + 1))
        return Batch(
            {"user": Ids(user), "movie": Ids(user + 7), "tag": tags},
            {"age": torch.ones(num_samples)},
        )

    model = Plain()
    signature = Signature.of(model, (batch(4),), {})
    assert signature.names == ("user", "movie", "tag", "tag_offsets", "age")
    assert [leaf.axis for leaf in signature.tensors][2:4] == ["values", "ends"]
    lookups = {"cross": model.cross, "tag": model.tag, "place": model.place}
    found = inspect(model, lookups, signature)
    assert found.graph is not None, found.problem
    assert found.sources["cross"].text == "('user' * 1000003) + 'movie'"
    for num_samples in (3, 9):
        leaves = signature.leaves((batch(num_samples),), {})
        assert not found.graph.misfit(leaves)
        computed = dict(found.graph(leaves))
        users = torch.arange(num_samples)
        assert torch.equal(computed["cross"].values, users * 1_000_003 + users + 7)
        assert torch.equal(computed["tag"].values, torch.arange(2 * num_samples))
        assert torch.equal(computed["place"].values, users)


def test_a_tensor_that_is_taken_apart_is_not_traced_for_one_size() -> None:
    def run(model: Any, user: Tensor, items: Tensor) -> Tensor:
        return model.a(torch.tensor(user.tolist())) + model.b(items[:, 0])

    found = findings(run)
    assert found.graph is None
    assert "the code takes a tensor apart, as for a size of 4" in found.problem


# --- other threads --------------------------------------------------------------------------------


def test_other_threads_meet_the_builtin_len_during_a_trace() -> None:
    plain = builtins.len
    lengths: list[int] = []
    errors: list[BaseException | None] = []

    def run(model: Model, user: Tensor, items: Tensor) -> Tensor:
        if isinstance(user, fx.Proxy):
            with ThreadPoolExecutor(1) as pool:
                lengths.append(pool.submit(lambda: len([1, 2, 3])).result())
                errors.append(pool.submit(lambda: len(user)).exception())
        return model.a(torch.arange(len(user)))

    found = findings(run, batch=False)
    assert not found.problem
    assert set(lengths) == {3}
    assert all("'len' is not supported" in str(error) for error in errors), "it has no symbol"
    assert builtins.len is plain


def test_a_second_trace_waits_and_the_builtin_len_comes_back() -> None:
    plain = builtins.len

    def length() -> int:
        with symbolic_len():
            return len(torch.zeros(4, 2))

    with ThreadPoolExecutor(1) as pool:
        with symbolic_len():
            second = pool.submit(length)
            assert length() == 4, "a trace within a trace does not wait"
            assert not wait([second], 0.1).done
        assert second.result(10) == 4
    assert builtins.len is plain
