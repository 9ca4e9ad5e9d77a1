# SPDX-License-Identifier: Apache-2.0
"""Tables keep every row while they grow, shrink and grow again, also with several threads and
processes at work.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotbed as hb
from hotbed.testing import ReferenceTable

pytestmark = pytest.mark.core

SECOND = 1_000_000


def batches(seed: int, num_ids: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        -(2**63), 2**63 - 1, (num_ids // size, size), endpoint=True
    )


def test_half_a_million_ids_keep_their_rows_while_the_table_grows() -> None:
    table, ids = (
        hb.Table("user", dim=1, rule=hb.Sgd(lr=1.0), init=hb.Zeros()),
        batches(0, 500_000, 10_000),
    )
    for number, batch in enumerate(ids):
        table.update(table.find_or_insert(batch), np.full((len(batch), 1), -number - 1, np.float32))
    assert len(table) == ids.size
    slots = table.find(ids.reshape(-1))
    assert len(np.unique(slots)) == ids.size
    expected = np.repeat(np.arange(1, len(ids) + 1), ids.shape[1])
    assert (table.lookup(ids.reshape(-1))[:, 0] == expected).all()
    assert (table.find(batches(1, 100_000, 100_000).reshape(-1)) == -1).all()


def test_consecutive_ids_and_ids_that_differ_in_high_bits_only_are_all_kept() -> None:
    table = hb.Table("user", dim=1)
    runs = [
        np.arange(50_000),
        np.arange(50_000) << 32,
        np.arange(1, 50_000) << 47,
        np.arange(-50_000, 0),
        np.arange(1, 50_000) << 8,
    ]
    for run in runs:
        table.find_or_insert(run)
    every = np.unique(np.concatenate(runs))
    assert len(table) == len(every)
    assert len(np.unique(table.find(every))) == len(every)


def test_slots_of_rows_that_are_gone_are_used_again() -> None:
    table = hb.Table("user", dim=4, evict=hb.Ttl(seconds=2))
    sizes = []
    for now, batch in enumerate(batches(2, 400_000, 10_000)):
        table.find_or_insert(batch, now * SECOND)
        table.evict(now * SECOND)
        sizes.append(table.stats["row_bytes"])
    assert len(table) == 20_000
    assert sizes[-1] <= 1.5 * sizes[4]
    known = {i for batch in table.export() for i in batch["id"].to_pylist()}
    assert known == set(batches(2, 400_000, 10_000)[-2:].reshape(-1).tolist())


@pytest.mark.parametrize(
    "admit",
    [
        None,
        hb.MinCount(2, max_candidates=8_192),
        pytest.param(hb.Probability(0.4), marks=pytest.mark.soak),
    ],
    ids=repr,
)
def test_large_batches_that_are_cut_for_threads_do_what_the_reference_does(admit: Any) -> None:
    random = np.random.default_rng(0)
    keywords: dict[str, Any] = {"rule": hb.Sgd(lr=0.1), "admit": admit, "evict": hb.Ttl(seconds=2)}
    native, reference = hb.Table("user", dim=1, **keywords), ReferenceTable("user", 1, **keywords)
    for step in range(3):
        ids = random.zipf(1.05, 40_000) % 10_000 - 5_000
        times, grads = (
            step * SECOND + random.integers(0, SECOND, len(ids)),
            random.normal(size=(len(ids), 1)).astype("f4"),
        )
        for table in (native, reference):
            table.update(table.find_or_insert(ids, times), grads)
    assert native.evict(3 * SECOND) == reference.evict(3 * SECOND)
    got, expected = (pa.Table.from_batches(list(table.export())) for table in (native, reference))
    for name in expected.column_names:
        assert got[name].combine_chunks().equals(expected[name].combine_chunks()), name


def test_threads_of_the_caller_may_share_a_table() -> None:
    table = hb.Table("user", dim=2, rule=hb.Sgd(lr=1.0), init=hb.Zeros())
    mine, errors = [batches(seed, 40_000, 2_000) for seed in range(4)], []

    def work(k: int) -> None:
        try:
            for batch in mine[k]:
                table.update(
                    table.find_or_insert(batch), np.full((len(batch), 2), -k - 1, np.float32)
                )
                assert (table.lookup(batch) == k + 1).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(table) == 160_000
    for k, ids in enumerate(mine):
        assert (table.lookup(ids.reshape(-1)) == k + 1).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_goes_on_with_its_own_threads() -> None:
    table, ids = hb.Table("user", dim=2), batches(3, 60_000, 60_000)[0]
    table.find_or_insert(ids)
    child = os.fork()
    if child == 0:
        ok = (
            (table.find(ids) >= 0).all()
            and (table.find_or_insert(ids + 1) >= 0).all()
            and len(table) >= 120_000 - 2
        )
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(table) == 60_000
