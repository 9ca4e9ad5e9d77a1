# SPDX-License-Identifier: Apache-2.0
"""Progress of callbacks, metrics and generators comes back as it was."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotbed.errors import PersistError
from hotbed.persist.container.manifest import decode, encode, packed, unpacked

KINDS = ["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", ">i4"]
ARRAYS = hnp.arrays(st.sampled_from(KINDS), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
SCALARS = ARRAYS.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), ARRAYS, SCALARS
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (np.ndarray, np.generic)):
        plain = a.dtype.newbyteorder("=")
        return (
            type(a) is type(b)
            and a.shape == b.shape
            and plain == b.dtype
            and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or a != a)


@given(TREES)
@settings(max_examples=60)
def test_any_nest_of_numbers_text_and_arrays_comes_back_as_it_was(tree: Any) -> None:
    plain, arrays = encode(tree, "progress")
    text = json.dumps(plain, allow_nan=False)
    assert same(tree, decode(json.loads(text), unpacked(packed(arrays))))


def test_a_later_change_of_an_array_does_not_reach_what_was_encoded() -> None:
    array = np.zeros(3)
    plain, arrays = encode({"a": array})
    array += 1
    assert not decode(plain, arrays)["a"].any()


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array(["a"]), np.array([1j]), np.datetime64(1, "s")]
)
def test_what_cannot_come_back_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(PersistError, match=r"progress/auc/0: cannot be saved"):
        encode({"auc": [value]}, "progress")
