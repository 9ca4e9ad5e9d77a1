# SPDX-License-Identifier: Apache-2.0
"""A training run has the same bits for any number of threads and on every instruction set that this
processor has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from on_disk import on_disk

import hotbed as hb
from hotbed import _core
from hotbed.embedding.modules import Feature

pytestmark = pytest.mark.torch_core

FEATURES = [
    Feature("user", "user"),
    Feature("item", "item"),
    Feature("history", "item", "mean"),
    Feature("best", "item", "max"),
    Feature("genres", "genre", "sum"),
    Feature("last", "genre", "none"),
]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads, isa = _core.num_threads(), _core.isa_name()
    yield
    hb.set_num_threads(threads)
    assert _core.set_isa(isa)


def jagged(random: np.random.Generator, n: int, weighted: bool) -> hb.Ids:
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 5, n))])
    ids = (
        random.zipf(1.2, int(offsets[-1])) * random.choice([-1, 1], int(offsets[-1])) % 5_000
        - 2_500
    )
    weights = random.normal(size=len(ids)).astype(np.float32) if weighted else None
    return hb.Ids(ids.astype(np.int64), offsets.astype(np.int64), weights)


Trained = tuple[list[bytes], dict[str, list[pa.RecordBatch]]]


def train(rule: Any, policies: dict[str, Any], dim: int) -> Trained:
    """Outputs of each forward pass, and all rows at the end."""
    tables = {
        name: hb.Table(name, dim=dim + k, rule=rule, **policies)
        for k, name in enumerate(("user", "item", "genre"))
    }
    collection = hb.EmbeddingCollection(FEATURES, tables)
    optimizer, random, outputs = hb.SparseOptimizer(collection), np.random.default_rng(0), []
    for step in range(8):
        n = 700
        batch = {
            f.name: hb.Ids(random.zipf(1.1, n) % 3_000)
            if f.name in ("user", "item")
            else jagged(random, n, f.name == "genres")
            for f in FEATURES
        }
        for half in (slice(0, n // 2), slice(n // 2, n)):  # two micro-batches a step
            part = hb.Batch(
                ids={k: v[half] for k, v in batch.items()},
                time=np.arange(n)[half] * 1_000 + step * 1_000_000,
            )
            out = collection(part)
            loss = sum(
                (rows * torch.from_numpy(random.normal(size=rows.shape).astype("f4"))).sum()
                for rows in out.values()
            )
            outputs.extend(rows.detach().numpy().tobytes() for rows in out.values())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            for table in tables.values():
                table.evict(4_000_000)
    return outputs, {name: list(table.export()) for name, table in tables.items()}


CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "rowwise": (hb.RowwiseAdagrad(lr=0.1), {}, 16),
    "adam_caught_up": (
        hb.Adam(lr=0.01, scope="catch_up", l2=0.01, clip=1.0),
        {"evict": hb.Ttl(seconds=2)},
        9,
    ),
    "ftrl_admitted": (
        hb.Ftrl(lr=0.1, l1=0.1),
        {"admit": hb.MinCount(2), "evict": hb.Lru(16_384)},
        33,
    ),
    "momentum_bf16": (hb.Momentum(lr=0.1, scope="all"), {"dtype": "bfloat16"}, 8),
    "nesterov_fp16": (
        hb.Nesterov(lr=0.1, l1=0.01),
        {"dtype": "float16", "admit": hb.Probability(0.6)},
        7,
    ),
    "rms_prop": (hb.RmsProp(), {"evict": hb.Lfu(16_384, half_life_seconds=3)}, 1),
    "sgd_sketched": (hb.Sgd(lr=0.1), {"admit": hb.MinCount(4, admission_bytes=1 << 16)}, 3),
    "sgd_of_steps": (
        hb.Sgd(lr=0.1),
        {"admit": hb.MinCount(2, expire_steps=2), "evict": [hb.Ttl(steps=2), hb.Lru(16_384)]},
        4,
    ),
}


@functools.cache
def trained(case: str) -> Trained:
    """Return what a case has with two threads and the instruction set that the core chose."""
    hb.set_num_threads(2)
    outputs, rows = train(*CASES[case])
    assert sum(batch.num_rows for batch in rows["item"]) > 300
    return outputs, rows


@pytest.mark.parametrize("case", CASES)
def test_one_two_and_four_threads_train_to_the_same_bits(case: str) -> None:
    expected = trained(case)
    for threads in (1, 4):
        hb.set_num_threads(threads)
        assert train(*CASES[case]) == expected


@pytest.mark.parametrize("case", CASES)
def test_rows_on_a_disk_have_the_bits_of_rows_in_memory(case: str) -> None:
    rule, policies, dim = CASES[case]
    if rule.scope == "all":  # which a disk refuses
        rule = replace(rule, scope="catch_up")
    assert train(rule, {**policies, "tier": on_disk(1_500)}, dim) == trained(case)


@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_trains_to_the_same_bits(case: str) -> None:
    expected = trained(case)
    chosen = _core.isa_name()
    every = [name for name in ("baseline", "avx2", "avx512") if _core.set_isa(name)]
    assert {"baseline", chosen} <= set(every)
    for name in every:
        if name != chosen:
            _core.set_isa(name)
            assert train(*CASES[case]) == expected
