# SPDX-License-Identifier: Apache-2.0
"""The hash of string ids is XXH64, pinned: a change would send every string to another row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hotbed import _core
from hotbed.data.columns import hash_strings

pytestmark = pytest.mark.core
GOLDEN = json.loads((Path(__file__).parent / "hash_bytes.json").read_text())


def hashed(data: list[bytes], seed: int = 0) -> list[int]:
    return [int(value) for value in hash_strings(pa.array(data, pa.binary()), seed).view(np.uint64)]


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: f"{len(case['hex']) // 2} bytes, seed {case['seed']}"
)
def test_hashes_are_those_of_the_golden_file(case: dict[str, str]) -> None:
    data, seed = bytes.fromhex(case["hex"]), int(case["seed"])
    assert (
        hashed([data], seed)
        == [int(case["hash"], 16)]
        == [xxhash.xxh64(data, seed=seed).intdigest()]
    )


@given(data=st.lists(st.binary(max_size=200)), seed=st.integers(0, 2**64 - 1))
def test_hashes_are_those_of_the_xxhash_package(data: list[bytes], seed: int) -> None:
    assert hashed(data, seed) == [xxhash.xxh64(item, seed=seed).intdigest() for item in data]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_offsets_outside_the_bytes_are_refused(kind: type) -> None:
    data = np.zeros(4, np.uint8)
    for offsets in ([0, 5], [2, 1], [-1, 2], []):
        with pytest.raises(ValueError, match="offsets"):
            _core.hash_strings(np.array(offsets, kind), data)
    assert len(_core.hash_strings(np.array([4], kind), data)) == 0
