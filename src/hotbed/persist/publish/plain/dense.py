# SPDX-License-Identifier: Apache-2.0
"""The dense graph of a model that takes tensors, over these tensors and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError
from hotbed.persist.publish.export import check_outputs, finish_graph
from hotbed.persist.publish.independence import Half, SharedPlaces, Trial, by_name
from hotbed.persist.publish.version import OnnxGraph

from .ids import IdStage
from .integers import exact
from .model import FEW_ROWS, PlainModel, argument, example_lengths, examples, num_rows_of
from .places import LookupPlace, answered
from .tracing import drop_unused_inputs, traced


class PlainHalf(Half):
    """The model with its lookups replaced by inputs."""

    def __init__(self, model: PlainModel, activate: Callable[[Any], Any], stage: IdStage) -> None:
        super().__init__()
        self.network = model.network
        self.outputs: list[str] = []
        self.widths: dict[str, list[int]] = {}
        self.num_rows = num_rows_of(model.tensors)
        self._model = model
        self._activate = activate
        self._stage = [stage]  # in a list, so that torch does not register it
        self.places = self._placed()
        self._names = list(self.inputs(FEW_ROWS))

    @property
    def lookups(self) -> dict[str, list[tuple[str, str, str]]]:
        """The features of each group of lookups."""
        lookups: dict[str, list[tuple[str, str, str]]] = {}
        for place in self.places:
            lookups.setdefault(place.group, []).append(place.spec)
        return lookups

    def _placed(self) -> list[LookupPlace]:
        """Return the places of all lookups: those with a bag or row for each sample share one."""
        few = self._bags(FEW_ROWS)
        many = self._bags(self.num_rows)
        width = 0
        num_groups = 1
        places = []
        features: list[str] = []
        for number, lookup in enumerate(self._model.lookups):
            feature = lookup.path
            if feature in features:
                feature = f"{feature}:{number}"
            features.append(feature)
            group = "lookup/0"
            start = 0
            if lookup.is_pooled:
                if (few[number], many[number]) == (FEW_ROWS, self.num_rows):
                    start = width
                    width += lookup.dim
                else:
                    group = f"lookup/{num_groups}"
                    num_groups += 1
            places.append(LookupPlace(lookup, number, group, feature, start))
        return places

    def _bags(self, num_rows: int) -> list[int]:
        """Return how many bags each lookup has for `num_rows` samples."""
        outputs = self._stage[0].named(examples(self._model.tensors, num_rows))
        counts = []
        for number, lookup in enumerate(self._model.lookups):
            count = len(outputs[f"ids/{number}"])
            if lookup.offsets is not None:
                count = len(outputs[f"offsets/{number}"]) - int(lookup.ends)
            counts.append(count)
        return counts

    def inputs(self, num_rows: int, seed: int = 0) -> dict[str, Tensor]:
        """Return made-up inputs of the dense graph by name."""
        tensors = examples(self._model.tensors, num_rows, seed=seed)
        ids = self._stage[0].named(tensors)
        bags = self._bags(num_rows)
        generator = torch.Generator().manual_seed(num_rows + seed)
        inputs = {}
        for spec, tensor in zip(self._model.tensors, tensors, strict=True):
            inputs[argument(spec.name)] = tensor
        pooled: dict[str, list[int]] = {}
        for place in self.places:
            dim = place.lookup.dim
            if place.lookup.is_pooled:
                size = pooled.setdefault(place.group, [bags[place.number], 0])
                size[1] += dim
            else:
                shape = ids[f"ids/{place.number}"].shape
                inputs[place.input] = torch.rand(*shape, dim, generator=generator)
        for group, size in pooled.items():
            inputs[group] = torch.rand(*size, generator=generator)
        return inputs

    @property
    def starts(self) -> set[str]:
        """Names of the inputs that say where the ids of candidates begin."""
        return {argument(spec.name) for spec in self._model.tensors if spec.is_offsets}

    def trial(self, num_rows: int, shared: Sequence[int], seed: int) -> Trial:
        """Return a made-up request of `num_rows` candidates."""
        inputs = self.inputs(num_rows, seed)
        for name, values in self.inputs(FEW_ROWS).items():
            if values.shape == inputs[name].shape:  # of all requests, such as rows of positions
                inputs[name] = values
        return Trial(inputs, SharedPlaces(num_rows, shared, [example_lengths(num_rows)]))

    def export(self) -> tuple[bytes, list[str]]:
        """Return the dense graph without its weights, and their names."""
        many = self.inputs(self.num_rows)
        few = self.inputs(FEW_ROWS)
        self(*few.values())
        widths = self.widths
        self(*many.values())
        if widths != self.widths:
            raise ConfigError(
                "export: a prediction must not depend on how many samples a request has, got "
                f"outputs of {widths} for {FEW_ROWS} samples and {self.widths} for "
                f"{self.num_rows}. Return scores of each sample alone."
            )
        program = exact(traced(self, list(many.values()), list(few.values())))
        outputs = [f"output/{name}" for name in self.outputs]
        translated = torch.onnx.export(
            program,
            (),
            input_names=self._names,
            output_names=outputs,  # no value of torch has such a name
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        assert translated is not None
        model = translated.model_proto
        renamed = dict(zip(outputs, self.outputs, strict=True))
        weights = []
        for name, value in dense_state(self).items():
            if value.dtype == torch.float32:
                weights.append(name)
            elif value.is_floating_point():
                kind = str(value.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"export: servers take float32, got {name.removeprefix('network.')!r} of "
                    f"{kind}. Convert the model with model.float()."
                )
        drop_unused_inputs(model)
        names = finish_graph(model, weights, renamed)
        return model.SerializeToString(), names

    def check(self, graph: OnnxGraph, num_rows: int, factor: float) -> None:
        """Check a request of `num_rows` samples, with all weights times `factor`."""
        request = self.inputs(num_rows)
        state = dense_state(self)
        weights = {name: state[name] * factor for name in graph.weights}
        expected = torch.func.functional_call(self, weights, tuple(request.values()))
        check_outputs(graph, request, weights, expected)

    def raw(self, *inputs: Tensor) -> Any:
        """Return the outputs before they are activated, [n] instead of [n, 1]."""
        named = dict(zip(self._names, inputs, strict=True))
        tensors = [named[argument(spec.name)] for spec in self._model.tensors]
        with answered(self.places, named):
            return _columns(self._model.call(tensors))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = by_name(self._activate(self.raw(*inputs)))
        self.outputs = list(outputs)
        self.widths = {}
        for name, output in outputs.items():
            if output.shape[1:]:
                self.widths[name] = [int(size) for size in output.shape[1:]]
        return tuple(outputs.values())


def _columns(outputs: Any) -> Tensor | dict[str, Tensor]:
    """Return the output of a model, or several by name, [n] instead of [n, 1].

    Raises:
        ConfigError: they are something else than tensors with a row for each sample.
    """
    if torch.is_tensor(outputs):
        return _column(outputs)
    if dataclasses.is_dataclass(outputs):
        fields = dataclasses.fields(outputs)
        outputs = {field.name: getattr(outputs, field.name) for field in fields}
    elif hasattr(outputs, "_asdict"):
        outputs = outputs._asdict()
    elif isinstance(outputs, (tuple, list)):
        outputs = {f"prediction_{number}": output for number, output in enumerate(outputs)}
    elif not isinstance(outputs, Mapping):
        raise _not_served(outputs)
    columns = {}
    for name, part in outputs.items():
        is_loss = torch.is_tensor(part) and not part.dim()
        if part is not None and not is_loss:  # of the whole batch: it scores no sample
            columns[name] = _column(part)
    if not columns:
        raise _not_served(next(iter(outputs.values()), None))
    return columns


def _column(output: Any) -> Tensor:
    if not torch.is_tensor(output) or not output.dim():
        raise _not_served(output)
    column: Tensor = output
    if column.dim() == 2 and column.shape[1] == 1:
        column = column.squeeze(1)
    return column.float()


def _not_served(output: Any) -> ConfigError:
    received = "one number" if torch.is_tensor(output) else type(output).__name__
    return ConfigError(
        "export: a model must return tensors with a row for each sample, alone, in a dict or in a "
        f"tuple, got {received}. Return what a server answers."
    )
