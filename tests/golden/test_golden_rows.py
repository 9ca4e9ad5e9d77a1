# SPDX-License-Identifier: Apache-2.0
"""The id hash, the name hash and the initial rows never change: checkpoints, shards and servers
depend on their bits.

A failure here is not mended by writing the files anew: that breaks every stored model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.embedding.hashing import mix64, name_hash, partition
from hotbed.embedding.init import Init

HERE = Path(__file__).parent
HASHES = json.loads((HERE / "id_hash.json").read_text(encoding="utf-8"))
ROWS = json.loads((HERE / "initial_rows.json").read_text(encoding="utf-8"))["cases"]
INITS = {"uniform": hb.Uniform, "normal": hb.Normal, "zeros": hb.Zeros, "constant": hb.Constant}

pytestmark = pytest.mark.core


def case_name(case: dict[str, Any]) -> str:
    return "-".join(
        str(v) for v in (*case["init"].values(), case["seed"], case["table"], case["dim"])
    )


def init_of(case: dict[str, Any]) -> Init:
    keywords = {k: v for k, v in case["init"].items() if k != "kind"}
    return INITS[case["init"]["kind"]](**keywords)


def bits(rows: np.ndarray) -> list[str]:
    return [" ".join(f"{lane:08x}" for lane in row.view(np.uint32).tolist()) for row in rows]


def test_the_id_hash_is_murmur3s_finalizer() -> None:
    assert int(mix64([1])[0]) == 0xB456BCFC34C2CB2C  # published value


def test_the_reference_hashes_ids_and_names_as_pinned() -> None:
    ids = np.array([entry["id"] for entry in HASHES["ids"]], np.int64)
    assert [f"{h:016x}" for h in mix64(ids).tolist()] == [entry["hash"] for entry in HASHES["ids"]]
    assert partition(ids).tolist() == [entry["partition"] for entry in HASHES["ids"]]
    for entry in HASHES["tables"]:
        assert f"{name_hash(entry['name']):016x}" == entry["hash"]


def test_the_native_core_puts_ids_into_the_pinned_partitions() -> None:
    table = hb.Table("user", dim=1)
    table.find_or_insert(np.array([entry["id"] for entry in HASHES["ids"]], np.int64))
    exported = {
        i: p
        for b in table.export()
        for i, p in zip(b["id"].to_pylist(), b["partition"].to_pylist(), strict=True)
    }
    assert exported == {entry["id"]: entry["partition"] for entry in HASHES["ids"]}


@pytest.mark.parametrize("case", ROWS, ids=case_name)
def test_the_reference_starts_rows_with_the_pinned_bits(case: dict[str, Any]) -> None:
    rows = init_of(case).rows(case["seed"], name_hash(case["table"]), case["ids"], case["dim"])
    assert bits(rows) == case["rows"]


@pytest.mark.parametrize("case", [c for c in ROWS if c["table"]], ids=case_name)
def test_the_native_core_starts_rows_with_the_pinned_bits(case: dict[str, Any]) -> None:
    table = hb.Table(case["table"], dim=case["dim"], init=init_of(case), seed=case["seed"])
    ids = np.array(case["ids"], np.int64)
    assert bits(table.lookup(ids)) == case["rows"]
    assert bits(table.gather(table.find_or_insert(ids))) == case["rows"]


@pytest.mark.parametrize("init", [hb.Uniform(0.05), hb.Normal(0.01)], ids=repr)
def test_both_give_the_same_bits_for_a_million_lanes(init: Init) -> None:
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 62_500, endpoint=True)
    table = hb.Table("user", dim=17, init=init, seed=9)
    assert table.lookup(ids).tobytes() == init.rows(9, name_hash("user"), ids, 17).tobytes()


def test_normal_rows_are_normal() -> None:
    rows = hb.Normal(2.0).rows(0, name_hash("user"), np.arange(100_000), 4)
    assert abs(rows.mean()) < 0.02
    assert abs(rows.std() - 2.0) < 0.02
    assert abs((rows**4).mean() / 16.0 - 3.0) < 0.1
    assert abs(np.corrcoef(rows.T) - np.eye(4)).max() < 0.02


def test_uniform_rows_fill_their_range() -> None:
    rows = hb.Uniform(0.5).rows(0, name_hash("user"), np.arange(100_000), 4)
    assert rows.min() >= -0.5
    assert rows.max() < 0.5
    assert np.abs(np.histogram(rows, bins=10, range=(-0.5, 0.5))[0] / rows.size - 0.1).max() < 0.003
