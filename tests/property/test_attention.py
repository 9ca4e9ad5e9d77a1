# SPDX-License-Identifier: Apache-2.0
"""Attention over packed rows by the native core, against padded rows and softmax of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed import _core
from hotbed.models.layers.sequence.attend import ALL, attend

pytestmark = pytest.mark.torch_core


def padded(queries: Tensor, rows: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Pad histories to one length, and pool them by torch."""
    histories = [
        rows[begin:end][-length:]
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    longest = max([1, *map(len, histories)])
    table = torch.stack(
        [torch.cat([h, h.new_zeros(longest - len(h), h.shape[1])]) for h in histories]
    )
    is_entry = torch.arange(longest) < torch.tensor([[len(h)] for h in histories])
    scores = torch.einsum("nd,nkd->nk", queries, table).masked_fill(~is_entry, -1e30)
    return torch.einsum("nk,nkd->nd", scores.softmax(1) * is_entry, table)


def inputs(lengths: list[int], dim: int, scale: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = np.random.default_rng(seed)
    queries, rows = (
        torch.from_numpy(draw.normal(size=(n, dim)).astype("f4"))
        for n in (len(lengths), sum(lengths))
    )
    return queries * scale / dim**0.5, rows, torch.tensor([0, *np.cumsum(lengths)])


def results(queries: Tensor, rows: Tensor, offsets: Tensor, length: int) -> list[Tensor]:
    """Return the means, and gradients of queries and rows."""
    queries, rows = (one.clone().requires_grad_() for one in (queries, rows))
    pooled = (
        attend(queries, rows, offsets, length)[0]
        if rows.dtype == torch.float32
        else padded(queries, rows, offsets, length)
    )
    grad = torch.from_numpy(np.random.default_rng(0).normal(size=pooled.shape)).to(pooled.dtype)
    return [pooled.detach(), *torch.autograd.grad(pooled, [queries, rows], grad)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 40) | st.integers(0, 1000), min_size=1, max_size=12),
    st.sampled_from([1, 3, 16, 20, 32, 64]),
    st.integers(1, 50) | st.just(ALL),
    st.sampled_from([0.1, 1.0]),
    st.integers(0, 9),
)
@example([0, 0], 16, ALL, 1.0, 0)
@example([1000, 0, 1, 999], 16, 16, 1.0, 0)
def test_means_and_gradients_are_those_of_padded_rows(
    lengths: list[int], dim: int, length: int, scale: float, seed: int
) -> None:
    """Numbers of 64 bits say what is exact."""
    queries, rows, offsets = inputs(lengths, dim, scale, seed)
    exact = results(queries.double(), rows.double(), offsets, length)
    native = results(queries, rows, offsets, length)
    # the terms of gradients cancel out
    for result, expected, error in zip(native, exact, (1e-6, 1e-5, 1e-5), strict=True):
        size = 1 + float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=error * size)


def test_no_bit_depends_on_threads_and_instruction_set() -> None:
    lengths = np.random.default_rng(0).integers(0, 400, 200).tolist()
    for dim in (16, 40):
        given_inputs = inputs(lengths, dim, 3.0, 0)
        threads, isa = _core.num_threads(), _core.isa_name()
        seen = set()
        for name in ("baseline", "avx2", "avx512"):
            for num_threads in (1, 2, 4):
                hb.set_num_threads(num_threads)
                _core.set_isa(name)
                tensors = results(*given_inputs, 100)
                seen.add(tuple(tensor.numpy().tobytes() for tensor in tensors))
        hb.set_num_threads(threads)
        assert _core.set_isa(isa)
        assert len(seen) == 1


def test_the_operator_fits_what_torch_asks_of_one() -> None:
    queries, rows, offsets = inputs([3, 0, 2], 4, 1.0, 0)
    arguments = (queries.requires_grad_(), rows.requires_grad_(), offsets, 2)
    torch.library.opcheck(attend, arguments)


def test_scores_of_any_size_give_weights_with_sum_1() -> None:
    queries, rows, offsets = inputs([500], 16, 1e5, 0)
    pooled, weights = attend(queries, rows, offsets, ALL)
    best = int((rows @ queries[0]).argmax())
    assert weights.sum() == weights[best] == 1
    assert torch.equal(pooled[0], rows[best])


def test_a_number_that_is_not_one_stays_in_its_sample() -> None:
    queries, rows, offsets = inputs([20, 20], 16, 1.0, 0)
    rows[3] = torch.nan
    pooled, weights = attend(queries, rows, offsets, ALL)
    assert pooled[0].isnan().all()
    assert not pooled[1].isnan().any()
    assert weights[:20].isnan().all()


@pytest.mark.parametrize("offsets", [[0, 2], [0, 3, 2], [1, 2, 3], [0, 2, 4]])
def test_offsets_that_do_not_fit_are_rejected(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^attention: offsets must .* number of rows, 3\. Give"):
        attend(torch.ones(2, 4), torch.ones(3, 4), torch.tensor(offsets), ALL)
