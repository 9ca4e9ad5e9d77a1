# SPDX-License-Identifier: Apache-2.0
"""One entry tests a layer: against a NumPy reference, its gradients, and its ONNX export.

An entry is a `Case`: how the layer is made, the shapes of its inputs in letters, and the forward
pass in float64 NumPy. Letters are sizes that Hypothesis draws: `n` is the number of samples, 0 to
4, all others are 1 to 4.

    Case(
        "weighted_product",                                    # name of its output in the export
        lambda s: WeightedProduct(s.f, s.d),                   # s.f is the size of letter f
        [("n", "f"), ("n", "f", "d")],                         # one shape for each input
        lambda s, w, x, y: x[:, :, None] * y * w["weight"],    # w: parameters and buffers by name
    )

A file of tests holds the entries of one kind of layers, and two tests:

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_a_layer_equals_its_reference(case): check_layer(case)

    def test_the_layers_export(tmp_path): check_export(CASES, tmp_path)

`check_layer` compares the forward pass with the reference, and the gradients of all inputs and
parameters with central differences of the reference, all in float64. All parameters are drawn anew,
so that a bias that starts at 0 counts. `check_export` puts all layers into one network, trains it
for a few steps, exports it, and compares each output with `hb.InferenceSession` to 1e-6.

A dimension may be a product ("n*t"). A first dimension without `n` is an input that does not depend
on the samples: the export holds it as a constant. Inputs that are not drawn from a normal
distribution (masks, lengths) are an `Input` with a function of their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hotbed as hb

EXAMPLES = 5
STEP = 1e-7  # of the central differences
DIFFERENCES = 12  # elements of one tensor whose gradient is compared
TRAINED_ROWS = 12
SERVED_ROWS = (12, 7, 1)

Sizes = Any  # a namespace: s.n, s.d
Shape = tuple[str | int, ...]
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Input:
    """An input of a layer.

    Args:
        shape: Its dimensions in letters.
        values: (generator, shape, sizes) -> values; None draws from a normal distribution. Values
            that are not floats take no gradient.
    """

    shape: Shape
    values: Callable[[np.random.Generator, tuple[int, ...], Sizes], np.ndarray] | None = None

    def shape_at(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(_size_of(dimension, sizes) for dimension in self.shape)

    def draw(self, generator: np.random.Generator, sizes: Sizes) -> np.ndarray:
        shape = self.shape_at(sizes)
        if self.values is None:
            return generator.standard_normal(shape)
        return self.values(generator, shape, sizes)

    @property
    def is_constant(self) -> bool:
        """Whether the input does not depend on the samples."""
        return "n" not in str(self.shape[0]).split("*")


@dataclass(frozen=True)
class Case:
    """A layer, and what it must compute.

    Args:
        name: Name of the layer's output in the export; part of the test's name.
        make: sizes -> the layer.
        inputs: The shapes of its inputs, or `Input`s.
        reference: (sizes, weights by name, *inputs) -> output or tuple of outputs, in NumPy.
        sizes: Bounds of letters that need others than 1 to 4.
        prepare: Called with the layer after its weights were drawn, for buffers with bounds.
        training: Compare in training mode. The export is always in eval mode.
    """

    name: str
    make: Callable[[Sizes], nn.Module]
    inputs: Sequence[Shape | Input]
    reference: Callable[..., Any]
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None
    training: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def all_inputs(self) -> list[Input]:
        return [one if isinstance(one, Input) else Input(one) for one in self.inputs]

    @property
    def largest_sizes(self) -> Sizes:
        """The upper bound of each letter."""
        return SimpleNamespace(**{letter: high for letter, (_, high) in self.bounds.items()})

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Least and greatest size of each letter."""
        terms = [str(dimension).split("*") for one in self.all_inputs for dimension in one.shape]
        letters = {term for parts in terms for term in parts if not term.isdigit()}
        default = {letter: (0 if letter == "n" else 1, 4) for letter in sorted(letters | {"n"})}
        return default | dict(self.sizes)

    def layer(self, sizes: Sizes, generator: np.random.Generator, spread: float = 0.7) -> nn.Module:
        """Return the layer with weights drawn from a normal distribution."""
        layer = self.make(sizes)
        with torch.no_grad():
            for values in (*layer.parameters(), *layer.buffers()):
                if values.is_floating_point():
                    drawn = spread * generator.standard_normal(tuple(values.shape))
                    values.copy_(torch.as_tensor(drawn))
        if self.prepare is not None:
            self.prepare(layer)
        return layer.train(self.training)


# --- values and gradients ---------------------------------------------------------------------------


def check_layer(case: Case) -> None:
    """Compare a layer with its reference, for sizes that Hypothesis draws."""
    bounds = {letter: st.integers(*limits) for letter, limits in case.bounds.items()}

    @settings(max_examples=EXAMPLES)
    @given(st.fixed_dictionaries(bounds), st.integers(0, 2**32 - 1))
    def check(drawn: dict[str, int], seed: int) -> None:
        _check_at(case, SimpleNamespace(**drawn), np.random.default_rng(seed))

    check()


def _check_at(case: Case, sizes: Sizes, generator: np.random.Generator) -> None:
    layer = case.layer(sizes, generator).double()
    arrays = [one.draw(generator, sizes) for one in case.all_inputs]
    state = layer.state_dict(keep_vars=True)
    weights = {name: values.detach().numpy().copy() for name, values in state.items()}
    inputs = [_tensor(array) for array in arrays]
    outputs = _as_tuple(layer(*inputs))
    expected = _as_tuple(case.reference(sizes, weights, *arrays))
    assert len(outputs) == len(expected)
    for output, values in zip(outputs, expected, strict=True):
        assert tuple(output.shape) == values.shape
        np.testing.assert_allclose(output.detach().numpy(), values, rtol=1e-9, atol=1e-9)

    factors = [generator.standard_normal(values.shape) for values in expected]
    total = sum(
        (output * torch.as_tensor(factor)).sum()
        for output, factor in zip(outputs, factors, strict=True)
    )
    assert isinstance(total, Tensor)

    def value() -> float:
        results = _as_tuple(case.reference(sizes, weights, *arrays))
        products = [
            np.sum(result * factor) for result, factor in zip(results, factors, strict=True)
        ]
        return float(np.sum(products))

    named = [
        (f"input {place}", *pair) for place, pair in enumerate(zip(inputs, arrays, strict=True))
    ]
    named += [(name, state[name], weights[name]) for name in dict(layer.named_parameters())]
    named = [entry for entry in named if entry[1].requires_grad]
    tensors = [tensor for _, tensor, _ in named]
    gradients: Sequence[Tensor] = [torch.zeros_like(tensor) for tensor in tensors]
    if tensors and total.requires_grad:
        gradients = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
    for (name, _, array), gradient in zip(named, gradients, strict=True):
        _compare_gradient(name, value, array, gradient.numpy(), generator)


def _compare_gradient(
    name: str,
    value: Callable[[], float],
    array: np.ndarray,
    gradient: np.ndarray,
    generator: np.random.Generator,
) -> None:
    """Compare a gradient with central differences of `value`, which reads `array`."""
    places = generator.permutation(array.size)[:DIFFERENCES]
    for place in places:
        index = np.unravel_index(place, array.shape)
        before = array[index]
        array[index] = before + STEP
        above = value()
        array[index] = before - STEP
        below = value()
        array[index] = before
        np.testing.assert_allclose(
            gradient[index],
            (above - below) / (2 * STEP),
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"gradient of {name} at {index}",
        )


# --- exports ----------------------------------------------------------------------------------------


class _AllLayers(nn.Module):
    """Layers side by side: `x` holds the inputs of all of them, each output is one label.

    An output becomes one number for each sample, a weighted sum of its elements, so that every
    element counts. The weights are parameters. Operations are few: exporting one costs 20 ms.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = list(cases)
        generator = np.random.default_rng(0)
        self.layers = nn.ModuleList()
        self.factors = nn.ParameterDict()
        self.arrays: list[list[np.ndarray]] = []
        for case in self.cases:
            sizes = case.largest_sizes
            sizes.n = TRAINED_ROWS
            # outputs near 1: their errors are absolute
            layer = case.layer(sizes, generator, spread=0.3)
            arrays = [one.draw(generator, sizes) for one in case.all_inputs]
            weights = {name: values.numpy() for name, values in layer.state_dict().items()}
            outputs = _as_tuple(case.reference(sizes, weights, *arrays))
            self.layers.append(layer)
            self.arrays.append(arrays)
            for label, output in zip(_labels(case, len(outputs)), outputs, strict=True):
                width = output.size // TRAINED_ROWS
                factor = generator.standard_normal(width) / width
                self.factors[label] = nn.Parameter(torch.tensor(factor, dtype=torch.float32))

    @property
    def labels(self) -> list[str]:
        return list(self.factors)

    def data(self) -> np.ndarray:
        """The inputs of all layers that depend on the samples, side by side."""
        parts = [
            array.reshape(TRAINED_ROWS, -1)
            for case, arrays in zip(self.cases, self.arrays, strict=True)
            for one, array in zip(case.all_inputs, arrays, strict=True)
            if not one.is_constant
        ]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def forward(self, batch: hb.Batch) -> dict[str, Tensor]:
        widths = [
            array.size // TRAINED_ROWS
            for case, arrays in zip(self.cases, self.arrays, strict=True)
            for one, array in zip(case.all_inputs, arrays, strict=True)
            if not one.is_constant
        ]
        columns = iter(batch.dense["x"].split(widths, dim=1))
        outputs: dict[str, Tensor] = {}
        for case, layer, arrays in zip(self.cases, self.layers, self.arrays, strict=True):
            tensors = []
            for one, array in zip(case.all_inputs, arrays, strict=True):
                if one.is_constant:
                    tensor = torch.as_tensor(array)
                else:
                    tensor = next(columns).reshape(-1, *array.shape[1:])
                tensors.append(tensor.to(_dtype_of(array)))
            results = _as_tuple(layer(*tensors))
            for label, result in zip(_labels(case, len(results)), results, strict=True):
                factor = self.factors[label]
                outputs[label] = result.to(torch.float32).reshape(-1, len(factor)) @ factor
        return outputs


def check_export(cases: Sequence[Case], folder: Path) -> None:
    """Train all layers in one network, export it, and compare each output with the session's."""
    pytest.importorskip("onnx", reason="onnx absent")
    torch.manual_seed(0)
    network = _AllLayers(cases)
    matrix = network.data()
    width = matrix.shape[1]
    columns: dict[str, Any] = {"x": list(matrix)}
    generator = np.random.default_rng(1)
    for label in network.labels:
        columns[label] = generator.standard_normal(len(matrix)).astype(np.float32)
    labels = [hb.Label(label) for label in network.labels]
    schema = hb.Schema([*labels, hb.Dense("x", width=width)])
    losses = {label: hb.losses.MSE() for label in network.labels}
    model = hb.RecModel(network, losses, torch.optim.SGD(network.parameters(), lr=1e-3))
    data = hb.Dataset(hb.sources.Memory(columns), schema, batch_size=TRAINED_ROWS)
    model.fit(data, epochs=2, progress=False)
    session = hb.InferenceSession(model.export(folder / "exported"))
    network.eval()
    for num_rows in SERVED_ROWS:
        rows = matrix[:num_rows]
        with torch.no_grad():
            expected = network(hb.Batch({}, {"x": torch.as_tensor(rows)}, num_samples=num_rows))
        served = session.predict({"x": list(rows)})
        if not isinstance(served, dict):
            served = {network.labels[0]: served}
        assert sorted(served) == sorted(expected)
        for label, values in expected.items():
            np.testing.assert_allclose(
                served[label], values.numpy(), rtol=1e-6, atol=1e-6, err_msg=label
            )


def _labels(case: Case, count: int) -> list[str]:
    if count == 1:
        return [case.name]
    return [f"{case.name}_{place}" for place in range(count)]


# --- arrays and tensors -----------------------------------------------------------------------------


def _tensor(array: np.ndarray) -> Tensor:
    tensor = torch.tensor(array)
    return tensor.requires_grad_(tensor.is_floating_point())


def _dtype_of(array: np.ndarray) -> torch.dtype:
    if array.dtype.kind == "f":
        return torch.float32
    return torch.as_tensor(array[:0]).dtype


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _size_of(dimension: str | int, sizes: Sizes) -> int:
    terms = str(dimension).split("*")
    return math.prod(int(term) if term.isdigit() else getattr(sizes, term) for term in terms)
