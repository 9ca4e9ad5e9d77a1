# SPDX-License-Identifier: Apache-2.0
"""Integer operations of id graphs give torch's bits in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hotbed.errors import ConfigError
from hotbed.persist.publish.export import quiet
from hotbed.persist.publish.plain import PlainModel, ServedLookup, TensorSpec
from hotbed.persist.publish.plain.ids import IdStage
from hotbed.persist.publish.plain.model import argument

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

LARGE = (2**31, 2**53 + 1, 2**62, 2**63 - 1, 12345678901234567, 98765432109876543)
EDGES = torch.tensor([0, 1, -1, 2, -2, 3, -7, 63, -(2**63), *LARGE, *(-edge for edge in LARGE)])
FIRST = EDGES.repeat(len(EDGES))
SECOND = EDGES.repeat_interleave(len(EDGES))


class Graph(nn.Module):
    """Calls a function as an id graph."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("bounds", torch.tensor([-5, 3, 2**40]))

    def forward(self, *tensors):
        return self.function(self, *tensors)


def stage(function, num_outputs, dtypes=("int64", "int64")):
    tensors = [
        TensorSpec(name, dtype, (), "samples", len(EDGES))
        for name, dtype in zip("xy", dtypes, strict=False)
    ]
    lookups = [
        ServedLookup(
            path=f"path {number}",
            module=nn.Identity(),
            table="table",
            pooling="none",
            dim=1,
            ids=number,
            offsets=None,
            weights=None,
            weighted=False,
            ends=False,
            padding=None,
        )
        for number in range(num_outputs)
    ]
    return IdStage(PlainModel(nn.Identity(), tensors, None, Graph(function), lookups, None))


def export(own):
    with quiet():
        return own.export()


def run(onnx, names, tensors):
    import onnxruntime

    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    arguments = [value.name for value in session.get_inputs()]
    return session.run(names, {name: tensors[name].numpy() for name in arguments})


def hashed(self, x, y):
    mixed = (x ^ 0x5BD1E995) * -7046029254386353131
    mixed = mixed ^ (mixed >> 29)
    return (
        mixed % 1000,
        x * y + 31 * x - y,
        x % 7,
        x % -7,
        torch.fmod(x, 1000),
        torch.div(x, -7, rounding_mode="trunc"),
        torch.div(x, 7, rounding_mode="floor"),
        x // -3,
    )


def bits(self, x, y):
    return (
        x >> 5,
        x << 33,
        x >> (y & 63),
        x & 0x7FFFFFFF,
        x | y,
        ~x,
        x.to(torch.int32) * y.to(torch.int32),
        x.to(torch.int16) >> 3,
        x.to(torch.uint8),
    )


def compared(self, x, y):
    return (
        (x < y).long() + 2 * (x == y),
        torch.where(x > y, x, y),
        torch.maximum(x, y),
        torch.minimum(x, y),
        x.clamp(-5, 2**62),
        x.clamp(min=0),
        torch.clamp(x, max=y),
        x.sign(),
        x.abs(),
        torch.bucketize(x, self.bounds, right=True),
        torch.searchsorted(self.bounds, x),
        torch.isin(x, self.bounds).long(),
    )


def shaped(self, x, y):
    pairs = torch.stack([x, y], 1)
    return (
        torch.cat([x, y]),
        pairs.reshape(-1),
        pairs * torch.tensor([3, 2**40]) + torch.arange(2),
        torch.arange(x.shape[0]) + x,
        pairs.sum(1),
        pairs.prod(1),
        pairs.cumsum(1),
        pairs.amax(1),
        x**5,
        pairs @ torch.tensor([3, 2**40]),
        self.bounds[x % 3],
        x.masked_fill(x > y, 4),
        nn.functional.pad(pairs, (1, 0))[:, :-1],
    )


@pytest.mark.parametrize("function", [hashed, bits, compared, shaped])
def test_integer_operations_have_the_bits_of_torch(function):
    expected = function(Graph(function), FIRST, SECOND)
    own = stage(function, len(expected))
    onnx = export(own)
    outputs = run(onnx, own.names, {argument("x"): FIRST, argument("y"): SECOND})
    for number, (ours, theirs) in enumerate(zip(expected, outputs, strict=True)):
        assert theirs.dtype == np.int64
        np.testing.assert_array_equal(theirs, ours.to(torch.int64).numpy(), f"output {number}")


def test_numbers_become_ids_with_exact_operations_only():
    def rounded(self, x, y):
        return (torch.floor(x * 7.5 - 1).long(), torch.bucketize(x, torch.tensor([0.1, 0.5])))

    x = torch.linspace(-3, 3, 1001)
    own = stage(rounded, 2, ("float32", "int64"))
    outputs = run(export(own), own.names, {argument("x"): x, argument("y"): FIRST})
    for ours, theirs in zip(rounded(own, x, FIRST), outputs, strict=True):
        np.testing.assert_array_equal(theirs, ours.numpy())

    def logarithm(self, x, y):
        return ((x + 1).log().long(),)

    with pytest.raises(ConfigError, match=r"ids of 'path 0' cannot be computed .* got 'log'"):
        export(stage(logarithm, 1, ("float32", "int64")))


def test_division_by_a_value_of_the_request_is_refused():
    with pytest.raises(ConfigError, match="divides integers by constants only"):
        export(stage(lambda self, x, y: (x % y,), 1))
    with pytest.raises(ConfigError, match="divides integers by constants only"):
        export(stage(lambda self, x, y: (x // -1,), 1))


def test_ids_that_a_server_would_compute_otherwise_are_refused():
    # torch wraps around in a power of a constant, ONNX Runtime does not
    with pytest.raises(ConfigError, match="ids of 'path 0' would differ on a server"):
        export(stage(lambda self, x, y: (torch.pow(3, x & 63),), 1))
