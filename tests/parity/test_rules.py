# SPDX-License-Identifier: Apache-2.0
"""Each rule is the rule of its name: torch.optim's on the rows, or the step that its paper states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import hotbed as hb
from hotbed import _core
from hotbed.embedding.rule import Rule
from hotbed.testing import ReferenceTable

NUM_IDS, STEPS = 37, 100
IDS = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, NUM_IDS, endpoint=True)

Parameters = list[torch.nn.Parameter]

TORCH: list[tuple[Rule, Callable[[Parameters], torch.optim.Optimizer]]] = [
    (hb.Sgd(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (hb.Sgd(lr=0.1, l2=0.01), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
    (hb.Momentum(lr=0.03, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.8)),
    (
        hb.Momentum(lr=0.03, l2=0.01),
        lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01),
    ),
    (hb.Nesterov(lr=0.03), lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, nesterov=True)),
    (hb.Adagrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05)),
    (
        hb.Adagrad(lr=0.05, eps=1e-6, initial_accumulator=0.3, l2=0.1),
        lambda p: torch.optim.Adagrad(
            p, lr=0.05, eps=1e-6, initial_accumulator_value=0.3, weight_decay=0.1
        ),
    ),
    (hb.RmsProp(lr=0.01), lambda p: torch.optim.RMSprop(p, lr=0.01)),
    (
        hb.RmsProp(lr=0.01, alpha=0.9, eps=1e-4),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-4),
    ),
    (hb.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    (
        hb.Adam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-6, l2=0.05),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.05),
    ),
    (hb.Adam(lr=0.01, decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
]

RULES: list[Rule] = [
    hb.Sgd(lr=0.1),
    hb.Momentum(lr=0.05),
    hb.Nesterov(lr=0.05),
    hb.Adagrad(lr=0.1, initial_accumulator=0.1),
    hb.RowwiseAdagrad(lr=0.1),
    hb.RmsProp(lr=0.01),
    hb.Adam(lr=0.01),
    hb.Adam(lr=0.01, decay=0.05),
    hb.Ftrl(lr=0.1),
    hb.Ftrl(lr=0.1, l1=0.2, l2=0.3, beta=1.0),
    hb.Ftrl(lr=0.1, l1=0.2, gradient_l1=0.1, gradient_l2=0.2),
    hb.Ftrl(lr=0.1, initial_accumulator=0.0, eps=2.0**-23),
    hb.Momentum(lr=0.05, lr_inside=True),
    hb.Nesterov(lr=0.05, lr_inside=True, l1=0.01),
]


@pytest.fixture
def every_isa() -> Iterator[list[str]]:
    """Names of the instruction sets that this processor has."""
    chosen = _core.isa_name()
    yield [name for name in ("baseline", "avx2", "avx512") if _core.set_isa(name)]
    _core.set_isa(chosen)


def rule_name(rule: Any) -> str:
    return repr(rule) if isinstance(rule, Rule) else ""


def gradients(dim: int, steps: int = STEPS, seed: int = 0) -> Iterator[np.ndarray]:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        yield random.normal(0.0, 0.2, (NUM_IDS, dim)).astype(np.float32)


def rows_of(table: Any) -> pa.Table:
    return pa.Table.from_batches(list(table.export()))


@pytest.mark.parametrize("dim", [1, 16, 19])
@pytest.mark.parametrize("rule, optimizer", TORCH, ids=rule_name)
def test_a_rule_equals_torch_optim_for_100_steps(rule: Rule, optimizer: Any, dim: int) -> None:
    table = hb.Table("user", dim=dim, rule=rule)
    slots = table.find_or_insert(IDS)
    dense = torch.nn.Parameter(torch.from_numpy(table.lookup(IDS)).double())
    step = optimizer([dense])
    for grads in gradients(dim):
        table.update(slots, grads)
        dense.grad = torch.from_numpy(grads).double()
        step.step()
    np.testing.assert_allclose(table.lookup(IDS), dense.detach().numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scope", ["all", "catch_up"])
@pytest.mark.parametrize("rule, optimizer", TORCH, ids=rule_name)
def test_with_scope_all_rows_without_a_gradient_follow_torch_optim_too(
    rule: Rule, optimizer: Any, scope: Any
) -> None:
    table = hb.Table("user", dim=5, rule=dataclasses.replace(rule, scope=scope))
    slots = table.find_or_insert(IDS)
    dense = torch.nn.Parameter(torch.from_numpy(table.lookup(IDS)).double())
    step, random = optimizer([dense]), np.random.default_rng(1)
    for grads in gradients(5):
        touched = random.random(NUM_IDS) < 0.2
        table.update(slots[touched], grads[touched])
        dense.grad = torch.from_numpy(np.where(touched[:, None], grads, 0)).double()
        step.step()
    np.testing.assert_allclose(table.lookup(IDS), dense.detach().numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-8, 1.0])
def test_adam_with_epsilon_hat_equals_sparse_adam(size: float) -> None:
    """Its eps is added before the correction of the bias, which small gradients show."""
    rule = hb.Adam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-7, eps_hat=True)
    table = hb.Table("user", dim=5, rule=rule)
    slots = table.find_or_insert(IDS)
    rows = torch.nn.Parameter(torch.from_numpy(table.lookup(IDS)).double())
    step, random = torch.optim.SparseAdam([rows], 0.01, (0.8, 0.99), 1e-7), np.random.default_rng(1)
    for grads in gradients(5):
        touched = random.random(NUM_IDS) < 0.2
        some = (size * grads[touched]).astype(np.float32)
        table.update(slots[touched], some)
        rows.grad = torch.sparse_coo_tensor(
            torch.from_numpy(np.flatnonzero(touched))[None],
            torch.from_numpy(some).double(),
            rows.shape,
            check_invariants=False,
        )
        step.step()
    np.testing.assert_allclose(table.lookup(IDS), rows.detach().numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scope", ["touched", "all", "catch_up"])
@pytest.mark.parametrize("make", [hb.Momentum, hb.Nesterov])
def test_momentum_with_the_rate_inside_is_that_of_keras_and_hugectr(make: Any, scope: Any) -> None:
    """a' = mu a - lr g; w += a', or w += -mu a + (1 + mu) a' of Nesterov, while the rate changes."""
    mu = 0.8
    table = hb.Table("user", dim=5, rule=make(0.1, mu, lr_inside=True, scope=scope))
    slots = table.find_or_insert(IDS)
    w = table.lookup(IDS).astype(np.float64)
    a = np.zeros_like(w)
    random = np.random.default_rng(1)
    for number, grads in enumerate(gradients(5)):
        rate = 0.1 * (number % 7)  # 0 too: momentum moves on
        touched = random.random(NUM_IDS) < 0.4
        table.update(slots[touched], grads[touched], lr=rate)
        moved = touched if scope == "touched" else np.full(NUM_IDS, True)
        g = np.where(touched[:, None], grads.astype(np.float64), 0)[moved]
        after = mu * a[moved] - rate * g
        w[moved] += after if make is hb.Momentum else -mu * a[moved] + (1 + mu) * after
        a[moved] = after
    np.testing.assert_allclose(table.lookup(IDS), w, rtol=1e-5, atol=1e-5)


def test_a_penalty_in_the_gradient_of_ftrl_is_that_of_a_loss() -> None:
    """Against plain Ftrl on gradients to which the penalty was added."""
    inside = hb.Ftrl(0.1, beta=1.0, l1=0.05, l2=0.1, gradient_l1=0.3, gradient_l2=0.2)
    plain = dataclasses.replace(inside, gradient_l1=0.0, gradient_l2=0.0)
    first, second = (hb.Table("user", dim=4, rule=rule) for rule in (inside, plain))
    slots = [table.find_or_insert(IDS) for table in (first, second)]
    for grads in gradients(4):
        w = second.lookup(IDS)
        first.update(slots[0], grads)
        second.update(slots[1], grads + np.float32(0.2) * w + np.float32(0.3) * np.sign(w))
    np.testing.assert_array_equal(first.lookup(IDS), second.lookup(IDS))


def test_row_wise_adagrad_is_adagrad_with_the_mean_square_of_the_row() -> None:
    table = hb.Table(
        "user", dim=6, rule=hb.RowwiseAdagrad(lr=0.1, eps=1e-6, initial_accumulator=0.2)
    )
    slots = table.find_or_insert(IDS)
    w, s = table.lookup(IDS).astype(np.float64), np.full((NUM_IDS, 1), 0.2)
    for grads in gradients(6):
        table.update(slots, grads)
        s += (grads.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
        w -= 0.1 * grads / (np.sqrt(s) + 1e-6)
    np.testing.assert_allclose(table.lookup(IDS), w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_ftrl_is_algorithm_1_of_mcmahan_2013(eps: float) -> None:
    """Per coordinate: w from z and n, then sigma, z and n from the gradient at that w.

    HugeCTR's constant under each root is the paper's algorithm with n that starts there.
    """
    alpha, beta, l1, l2 = 0.1, 1.0, 0.5, 0.25
    rule = hb.Ftrl(lr=alpha, beta=beta, l1=l1, l2=l2, initial_accumulator=0.0, eps=eps)
    table = hb.Table("user", dim=4, rule=rule, init=hb.Zeros())
    slots, z, n = table.find_or_insert(IDS), np.zeros((NUM_IDS, 4)), np.full((NUM_IDS, 4), eps)

    def weights() -> np.ndarray:
        return np.where(
            np.abs(z) <= l1, 0.0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2)
        )

    for grads in gradients(4):
        table.update(slots, grads)
        g = grads.astype(np.float64)
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
        z += g - sigma * weights()
        n += g * g
        np.testing.assert_allclose(table.lookup(IDS), weights(), rtol=1e-5, atol=1e-6)
    assert 0.02 < (table.lookup(IDS) == 0).mean() < 0.5


def test_clip_bounds_the_norm_of_a_rows_summed_gradient() -> None:
    table = hb.Table("user", dim=3, rule=hb.Sgd(lr=1.0, clip=0.5), init=hb.Zeros())
    slots = table.find_or_insert(np.array([1, 2, 1]))
    table.update(slots, np.array([[3, 0, 0], [0.1, 0.2, 0.2], [0, 4, 0]], np.float32))
    np.testing.assert_allclose(
        table.lookup(np.array([1, 2])), [[-0.3, -0.4, 0], [-0.1, -0.2, -0.2]], atol=1e-7
    )


@pytest.mark.parametrize("scope", ["touched", "all"])
@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_state_ends_at_the_largest_float_on_every_instruction_set(
    rule: Rule, scope: Any, every_isa: list[str]
) -> None:
    """Finite gradients whose squares, or whose sums over steps, overflow."""
    largest = np.finfo(np.float32).max
    rule = dataclasses.replace(rule, scope=scope)
    tables = {isa: hb.Table("user", dim=19, rule=rule) for isa in every_isa}
    reference = ReferenceTable("user", 19, rule=rule)
    for grad in (1.0, 3e19, -1e38, -1e38, largest, largest, 0.5):
        grads = np.full((2, 19), grad, np.float32)
        grads[1, ::3] = 0.25
        reference.update(reference.find_or_insert(IDS[:2]), grads)
        for isa, table in tables.items():
            _core.set_isa(isa)
            table.update(table.find_or_insert(IDS[:2]), grads)
            state = [one for batch in table.export() for one in batch.to_pydict().get("state", [])]
            assert np.isfinite(state).all()
            assert rows_of(table) == rows_of(reference), (isa, grad)


def test_a_huge_gradient_is_clipped_to_its_norm() -> None:
    for kind in (hb.Table, ReferenceTable):
        table = kind("user", 3, rule=hb.Sgd(lr=1.0, clip=0.5), init=hb.Zeros())
        for grad in (1e20, 3e38):
            table.update(
                table.find_or_insert([int(grad > 1e30)]), np.full((1, 3), grad, np.float32)
            )
        np.testing.assert_allclose(table.lookup([0, 1]), np.full((2, 3), -0.5 / 3**0.5), rtol=1e-6)


def test_l1_pulls_towards_zero() -> None:
    table = hb.Table("user", dim=2, rule=hb.Sgd(lr=0.1, l1=0.5), init=hb.Constant(1.0))
    table.update(table.find_or_insert(np.array([1])), np.array([[0, -0.5]], np.float32))
    np.testing.assert_allclose(table.lookup(np.array([1])), [[0.95, 1.0]], atol=1e-7)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"l2": 0.03, "l1": 0.01},
    {"clip": 0.7},
    {"scope": "all", "l2": 0.03},
]


# every width without options, and every option with one width
@pytest.mark.parametrize(
    ("options", "dim"), [({}, 1), ({}, 16), ({}, 40), *((options, 7) for options in OPTIONS)]
)
@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_native_rows_and_state_have_the_references_bits(
    rule: Rule, options: dict[str, Any], dim: int
) -> None:
    if isinstance(rule, hb.Ftrl):  # its l1 and l2 are its own
        options = {k: v for k, v in options.items() if k not in ("l1", "l2")}
    rule = dataclasses.replace(rule, **options)
    native, reference = hb.Table("user", dim=dim, rule=rule), ReferenceTable("user", dim, rule=rule)
    random = np.random.default_rng(2)
    for grads in gradients(dim, 12):
        ids = random.choice(IDS, NUM_IDS)  # some twice, some not at all
        native.update(native.find_or_insert(ids), grads)
        reference.update(reference.find_or_insert(ids), grads)
    got, expected = rows_of(native), rows_of(reference)
    for name in ("id", "value", "state"):
        if name in expected.column_names:
            assert got[name].combine_chunks().equals(expected[name].combine_chunks()), name


@pytest.mark.parametrize("options", [{}, {"l2": 0.03}, {"l1": 0.01, "clip": 0.5}], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_catch_up_has_the_bits_of_all(rule: Rule, options: dict[str, Any]) -> None:
    if isinstance(rule, hb.Ftrl):
        options = {k: v for k, v in options.items() if k == "clip"}
    eager = hb.Table("user", dim=9, rule=dataclasses.replace(rule, scope="all", **options))
    lazy = hb.Table("user", dim=9, rule=dataclasses.replace(rule, scope="catch_up", **options))
    random = np.random.default_rng(3)
    for table in (eager, lazy):
        table.find_or_insert(IDS)
    held = eager.find(IDS), lazy.find(IDS)
    for step, grads in enumerate(gradients(9)):
        ids, lr = random.choice(IDS, NUM_IDS // 3), rule.lr * (0.99**step)
        for table in (eager, lazy):
            table.update(table.find_or_insert(ids), grads[: len(ids)], lr=lr)
        if step % 20 == 0:
            assert lazy.gather(held[1]).tobytes() == eager.gather(held[0]).tobytes()
        if step % 10 == 0:
            seen = random.choice(IDS, 5)
            assert lazy.lookup(seen).tobytes() == eager.lookup(seen).tobytes()
    assert rows_of(lazy)["value"].equals(rows_of(eager)["value"])
    assert len(lazy) == NUM_IDS
    if lazy.rule.state_width(9):
        assert rows_of(lazy)["state"].equals(rows_of(eager)["state"])


def test_a_learning_rate_given_to_update_replaces_the_rules() -> None:
    table = hb.Table("user", dim=1, rule=hb.Sgd(lr=1.0), init=hb.Zeros())
    table.update(table.find_or_insert(np.array([1])), np.ones((1, 1), np.float32), lr=0.25)
    assert table.lookup(np.array([1])).tolist() == [[-0.25]]


POLICIES: list[dict[str, Any]] = [
    {},
    {"admit": hb.MinCount(2, max_candidates=4096), "evict": hb.Lru(60_000)},
    {
        "admit": hb.Probability(0.5),
        "evict": [hb.Ttl(seconds=3), hb.Lfu(60_000, half_life_seconds=2)],
    },
    {"dtype": "bfloat16"},
    {"dtype": "float16", "admit": hb.MinCount(2, sketch_bytes=1 << 20)},
    {"admit": hb.MinCount(3, admission_bytes=1 << 16, expire_seconds=2)},
]


RULES_BY_SCOPE: list[Rule] = [
    hb.RowwiseAdagrad(lr=0.1),
    hb.Adam(lr=0.01, scope="catch_up", l2=0.01),
    hb.Momentum(lr=0.1, scope="all"),
    hb.Ftrl(l1=0.1),
]


def quick_and_soak() -> list[Any]:
    """Each policy with each rule; `make test` runs each of both once at least."""
    quick = list(zip(cycle(RULES_BY_SCOPE), POLICIES, strict=False))
    return [
        pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.soak])
        for pair in product(RULES_BY_SCOPE, POLICIES)
    ]


@pytest.mark.parametrize(("rule", "policies"), quick_and_soak(), ids=str)
def test_one_two_and_four_threads_give_the_same_bits(rule: Rule, policies: dict[str, Any]) -> None:
    def run(threads: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
        hb.set_num_threads(threads)
        table, random = hb.Table("user", dim=8, rule=rule, **policies), np.random.default_rng(4)
        for step in range(6):
            ids = random.zipf(1.05, 40_000) % 100_000  # enough to be cut into ranges
            slots = table.find_or_insert(
                ids, step * 500_000 + random.integers(0, 500_000, len(ids))
            )
            table.update(slots, random.normal(size=(len(ids), 8)).astype(np.float32))
            if step == 4:
                table.evict(step * 500_000)
        return list(table.export()), [*table.candidates(), *table.sketch()]

    try:
        one = run(1)
        assert sum(batch.num_rows for batch in one[0]) > 2_000
        assert run(2) == one
        assert run(4) == one
    finally:
        hb.set_num_threads(2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
class TestHalfRows:
    def test_values_are_what_the_type_can_hold(self, dtype: str) -> None:
        table = hb.Table("user", dim=16, rule=hb.Adagrad(), dtype=dtype)
        for grads in gradients(16, 10):
            table.update(table.find_or_insert(IDS), grads)
        rows = torch.from_numpy(table.lookup(IDS))
        assert rows.dtype == torch.float32
        assert torch.equal(rows, rows.to(getattr(torch, dtype)).float())

    def test_they_stay_close_to_fp32_rows(self, dtype: str) -> None:
        half, full = (
            hb.Table("user", dim=16, rule=hb.Adam(lr=0.01), dtype=d) for d in (dtype, "float32")
        )
        for grads in gradients(16):
            half.update(half.find_or_insert(IDS), grads)
            full.update(full.find_or_insert(IDS), grads)
        np.testing.assert_allclose(half.lookup(IDS), full.lookup(IDS), atol=0.02)

    def test_optimizer_state_is_fp32(self, dtype: str) -> None:
        half, full = (
            hb.Table("user", dim=16, rule=hb.Adagrad(lr=0.01), dtype=d) for d in (dtype, "float32")
        )
        for grads in gradients(16):
            half.update(half.find_or_insert(IDS), grads)
            full.update(full.find_or_insert(IDS), grads)
        assert rows_of(half)["state"].equals(rows_of(full)["state"])

    def test_rounding_is_stochastic_and_unbiased(self, dtype: str) -> None:
        """Steps of 1/100 of the spacing at 1.0 would all be lost in rounding to nearest."""
        ids, spacing = np.arange(4_000), 2.0**-7 if dtype == "bfloat16" else 2.0**-10
        table = hb.Table("user", dim=4, rule=hb.Sgd(lr=1.0), init=hb.Constant(1.25), dtype=dtype)
        slots = table.find_or_insert(ids)
        for _ in range(50):
            table.update(slots, np.full((len(ids), 4), spacing / 100, np.float32))
        moved = (1.25 - table.lookup(ids)) / spacing
        assert abs(moved.mean() - 0.5) < 0.03
        assert len(np.unique(moved)) > 2
        assert abs(np.corrcoef(moved.T) - np.eye(4)).max() < 0.08  # lanes draw on their own

    def test_rounding_depends_on_the_id_not_on_the_order(self, dtype: str) -> None:
        one, two = (hb.Table("user", dim=4, rule=hb.Sgd(lr=0.1), dtype=dtype) for _ in range(2))
        for grads in gradients(4, 10):
            order = np.random.default_rng(0).permutation(NUM_IDS)
            one.update(one.find_or_insert(IDS), grads)
            two.update(two.find_or_insert(IDS[order]), grads[order])
        assert rows_of(one).equals(rows_of(two))

    def test_catch_up_has_the_bits_of_all(self, dtype: str) -> None:
        eager, lazy = (
            hb.Table("user", dim=4, rule=hb.Momentum(lr=0.1, l2=0.1, scope=scope), dtype=dtype)
            for scope in ("all", "catch_up")
        )
        random = np.random.default_rng(0)
        for grads in gradients(4, 40):
            ids = random.choice(IDS, 5)
            for table in (eager, lazy):
                table.update(table.find_or_insert(ids), grads[:5])
        assert rows_of(lazy)["value"].equals(rows_of(eager)["value"])


@pytest.mark.parametrize("scope", ["all", "catch_up"])
@pytest.mark.parametrize(
    "rule",
    [
        hb.Sgd(0.1),
        hb.Sgd(0.1, l2=0.1),
        hb.Momentum(0.1),
        hb.Momentum(0.1, l1=0.1),
        hb.Nesterov(0.1),
        hb.Nesterov(0.1, lr_inside=True),
        hb.Adagrad(0.1, initial_accumulator=0.1),
        hb.RowwiseAdagrad(0.1),
        hb.RmsProp(0.1),
        hb.Adam(0.1),
        hb.Adam(0.1, decay=0.1),
        hb.Adam(0.1, eps_hat=True, l2=0.1),
    ],
    ids=repr,
)
def test_a_rule_says_whether_a_step_without_gradient_moves_a_new_row(rule: Any, scope: Any) -> None:
    rule = dataclasses.replace(rule, scope=scope)
    values = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    state = np.tile(rule.initial_state(4), (5, 1))
    moved, _ = rule.reference(values, state, np.zeros_like(values), step=3)
    assert rule.moves_new_rows == (not np.array_equal(moved, values))
    assert not dataclasses.replace(rule, scope="touched").moves_new_rows
