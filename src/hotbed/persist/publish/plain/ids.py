# SPDX-License-Identifier: Apache-2.0
"""The id graph of a model as ONNX, checked against torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError
from hotbed.persist.publish.export import finish_graph
from hotbed.persist.publish.independence import (
    REQUESTS,
    Request,
    SharedPlaces,
    Trial,
    differ,
    share,
)
from hotbed.persist.publish.onnx_session import open_graph

from .integers import check_exact, exact
from .model import FEW_ROWS, PlainModel, argument, example_lengths, examples, num_rows_of
from .tracing import drop_unused_inputs, inputs_of, traced

_EDGES = (0, 1, -1, 2, -3, 63, 2**31, -(2**31), 2**53 + 1, 2**62, -(2**63) + 1, 2**63 - 1)


class IdStage(nn.Module):
    """The id graph with outputs of their own: ids and offsets as int64, weights as float32."""

    def __init__(self, model: PlainModel) -> None:
        super().__init__()
        self.ids = model.ids
        self.lookups = model.lookups
        self.tensors = model.tensors

    @property
    def names(self) -> list[str]:
        """Names of the outputs."""
        names = []
        for number, lookup in enumerate(self.lookups):
            names.append(f"ids/{number}")
            if lookup.offsets is not None:
                names.append(f"offsets/{number}")
            if lookup.weights is not None:
                names.append(f"weights/{number}")
        return names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self.ids(*tensors)
        values = []
        for lookup in self.lookups:
            values.append(outputs[lookup.ids].to(torch.int64, copy=True))
            if lookup.offsets is not None:
                values.append(outputs[lookup.offsets].to(torch.int64, copy=True))
            if lookup.weights is not None:
                values.append(outputs[lookup.weights].to(torch.float32, copy=True))
        return tuple(values)

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name."""
        return dict(zip(self.names, self(*tensors), strict=True))

    def export(self) -> bytes:
        """Return the id graph, which is checked with extreme values.

        Raises:
            ConfigError: its ids cannot be computed to the bit without torch.
        """
        names = [argument(spec.name) for spec in self.tensors]
        few = examples(self.tensors, FEW_ROWS)
        many = examples(self.tensors, num_rows_of(self.tensors))
        program = exact(traced(self, many, few))
        whole = {}
        for number, name in enumerate(self.names):
            kind, _, lookup = name.partition("/")
            if kind != "weights":
                whole[number] = self.lookups[int(lookup)].path
        check_exact(program, whole)
        translated = torch.onnx.export(
            program,
            (),
            input_names=names,
            output_names=self.names,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        assert translated is not None
        model = translated.model_proto  # made anew at each access
        drop_unused_inputs(model)
        finish_graph(model, (), {})
        onnx: bytes = model.SerializeToString()
        for edges in (_EDGES, (0, 1)):
            for num_rows in (num_rows_of(self.tensors), FEW_ROWS):
                self._check(onnx, examples(self.tensors, num_rows, edges))
        return onnx

    def check_independence(self) -> None:
        """Raise ConfigError if the ids of a sample depend on the other samples of a request."""
        for integers in (_EDGES, (0, 1)):
            for here, there in REQUESTS:
                first = self._trial(here, integers, seed=0)
                second = self._trial(there, integers, seed=1)
                starts = {argument(spec.name) for spec in self.tensors if spec.is_offsets}
                share(first, second, starts)
                try:
                    ours = self.named(list(first.inputs.values()))
                    theirs = self.named(list(second.inputs.values()))
                except (IndexError, RuntimeError):
                    continue  # an extreme id may be outside of a map that the model keeps
                for name, values in ours.items():
                    kind, _, number = name.partition("/")
                    if kind != "offsets" and differ(values, theirs[name], first, second):
                        path = self.lookups[int(number)].path
                        raise ConfigError(
                            f"export: the {kind} of {path!r} must not depend on the other "
                            "candidates of a request, got others for the same candidate. Compute "
                            "over the other axes: axis 0 holds the candidates."
                        )

    def _trial(self, request: Request, integers: Sequence[int], seed: int) -> Trial:
        tensors = examples(self.tensors, request.num_rows, integers, seed)
        names = [argument(spec.name) for spec in self.tensors]
        places = SharedPlaces(request.num_rows, request.shared, [example_lengths(request.num_rows)])
        return Trial(dict(zip(names, tensors, strict=True)), places)

    def _check(self, onnx: bytes, tensors: Sequence[Tensor]) -> None:
        """Raise ConfigError unless the graph gives torch's ids for these tensors."""
        try:
            expected = self(*tensors)
        except (IndexError, RuntimeError):
            return  # an extreme id may be outside of a map that the model keeps
        arguments = {}
        for spec, tensor in zip(self.tensors, tensors, strict=True):
            arguments[argument(spec.name)] = tensor.numpy()
        session = open_graph(onnx)
        feeds = {name: arguments[name] for name in inputs_of(onnx)}
        outputs = session.run(self.names, feeds)
        for name, ours, theirs in zip(self.names, expected, outputs, strict=True):
            served = torch.from_numpy(theirs)
            is_same = served.shape == ours.shape
            if name.startswith("weights/"):
                is_same = is_same and torch.allclose(served, ours, rtol=1e-6, equal_nan=True)
            else:
                is_same = is_same and torch.equal(served, ours)
            if not is_same:
                path = self.lookups[int(name.partition("/")[2])].path
                raise ConfigError(
                    f"export: the ids of {path!r} would differ on a server, got "
                    f"{served.reshape(-1)[:4].tolist()} for {ours.reshape(-1)[:4].tolist()}. "
                    "Compute them with other operations, or before the model."
                )
