# SPDX-License-Identifier: Apache-2.0
"""Exports for servers: the dense half of a network as an ONNX graph, with the values of a state."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, Ids, SideBySide
from hotbed.data.fitted import FittedMap
from hotbed.data.schema import Id, Schema
from hotbed.data.transforms import Split
from hotbed.embedding.lookups import Feature, Pooled
from hotbed.embedding.modules import Flow, FlowModule, table_modules, with_flow
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError, MissingExtra, PersistError
from hotbed.files import Where
from hotbed.models.layers.inputs import columns_together
from hotbed.optim.modes import in_eval_mode, with_buffers_restored
from hotbed.persist.container.format import (
    CheckpointWriter,
    Reader,
    Saved,
    highest_version,
    newest_link,
    read_newest,
    refuse_states,
)
from hotbed.persist.container.store import open_store
from hotbed.persist.publish.independence import (
    Half,
    SharedPlaces,
    Trial,
    by_name,
    check_independence,
    made_up_lengths,
)
from hotbed.persist.publish.onnx_session import onnx_runtime, open_graph
from hotbed.persist.publish.pooled_inputs import pooled_inputs
from hotbed.persist.publish.read_lengths import read_lengths
from hotbed.persist.publish.rejection import rejection
from hotbed.persist.publish.version import OnnxGraph, write_published

DENSE_INPUT = "dense"
_OF_FEATURES = ("offsets", "ids", "weights")  # kinds of inputs
TOLERANCE = 1e-5
_ROWS = 5  # of the batch that the graph is traced and checked with


def export(checkpoint: Where, to: Where, graph: OnnxGraph, maps: Sequence[FittedMap] = ()) -> Saved:
    """Freeze the newest state under `checkpoint` for servers: values, weights, schema and graph.

    Args:
        checkpoint: a path or URL of states.
        to: where the export is written.
        graph: of the network that the checkpoint was made of.
        maps: files of the checkpoint's fitted maps that are elsewhere now.

    Raises:
        FormatError: a file of the checkpoint or of a fitted map is missing or changed.
        PersistError: `to` cannot be written, or holds states.
    """
    store = open_store(to)
    last = newest_link(store)
    refuse_states(last)
    highest = highest_version(store)

    def write(reader: Reader) -> Saved:
        before = highest
        if last is not None and last.manifest.source == reader.manifest.digest:
            before = last.manifest.version - 1  # the same state again has the same number
        with CheckpointWriter(to) as writer:
            return write_published(writer, reader, None, graph, maps, highest=before)

    return read_newest(checkpoint, write)


def export_graph(
    network: nn.Module, schema: Schema, activate: Callable[[Any], Any] | None = None
) -> OnnxGraph:
    """Return the network after its lookups as a graph, which is checked against torch.

    Args:
        network: the network.
        schema: of its features.
        activate: applied to the outputs, for example a sigmoid.

    Raises:
        ConfigError: the network cannot be exported: it looks up something else than whole
            features, or torch.export rejects it.
        MissingExtra: onnx is not installed.
    """
    check_installed()
    half = _DenseHalf(network, schema, activate or (lambda outputs: outputs))
    try:
        with (
            torch.no_grad(),
            in_eval_mode(network),
            with_buffers_restored(network),
            quiet(),
            torch.random.fork_rng(devices=[]),
        ):
            return _traced_graph(half, schema)
    except (ConfigError, PersistError):
        raise
    except Exception as error:
        raise rejection(error, network, schema, half.inputs) from error


def _traced_graph(half: _DenseHalf, schema: Schema) -> OnnxGraph:
    inputs = half.record()
    half(*inputs.values())
    check_independence(half)
    onnx, weights = _export(half, inputs)
    dense = [column.name for column in schema.dense]
    lengths = read_lengths(half, inputs)
    graph = OnnxGraph(
        onnx,
        weights,
        half.lookups,
        dense,
        half.outputs,
        lengths=lengths,
        shares_histories=half.shares_histories,
        columns_together=half.columns_together,
    )
    _check_version(half, graph, inputs, _ROWS, 1.0)
    _check_version(half, graph, inputs, 3, 1.25)  # a smaller request, other weights
    if half.shares_histories:
        _check_shared(half, graph, inputs)
    return graph


def _check_version(
    half: _DenseHalf, graph: OnnxGraph, inputs: Mapping[str, Tensor], num_rows: int, factor: float
) -> None:
    """Check a request of `num_rows` candidates, with all weights times `factor`."""
    state = dense_state(half)
    weights = {name: state[name] * factor for name in graph.weights}
    request = half.first(num_rows, inputs)
    expected = torch.func.functional_call(half, weights, tuple(request.values()))
    check_outputs(graph, request, weights, expected)


def _check_shared(half: _DenseHalf, graph: OnnxGraph, inputs: Mapping[str, Tensor]) -> None:
    """Check a request with one list of each history for all candidates, beside repeated lists."""
    shared = dict(inputs)
    repeated = dict(inputs)
    for name, values in inputs.items():
        kind, feature = _parts_of(name)
        if kind == "offsets":
            num_entries = int(values[-1])
            shared[name] = torch.tensor([0, num_entries])
            repeated[name] = torch.arange(_ROWS + 1) * num_entries
        elif feature is not None and f"offsets/{feature}" in inputs:
            repeated[name] = values.repeat(_ROWS, 1)
    state = dense_state(half)
    weights = {name: state[name] for name in graph.weights}
    check_outputs(graph, shared, weights, half(*repeated.values()))


class _DenseHalf(Half):
    """The network with its lookups replaced by inputs.

    `record` finds out which inputs there are; then `forward` takes them in order.
    """

    def __init__(self, network: nn.Module, schema: Schema, activate: Callable[[Any], Any]) -> None:
        super().__init__()
        self.network = network
        self.lookups: dict[str, list[tuple[str, str, str]]] = {}
        self.outputs: list[str] = []
        self._names: list[str] = []
        self._shapes: dict[str, torch.Size] = {}
        self._has_list = {column.name: _has_list(column) for column in schema.ids}
        self._bags = {column.name for column in schema.ids if _is_bag(column, schema)}
        self._has_weights = {column.name for column in schema.ids if column.weights is not None}
        self._widths = {column.name: column.width for column in schema.dense}
        self._modules_with_tables = table_modules(network)
        self._activate = activate
        lists = [
            name for name, has_list in self._has_list.items() if has_list or name in self._bags
        ]
        self._list_numbers = _list_numbers(network, lists)

    def record(self) -> dict[str, Tensor]:
        """Run the network once, and return made-up inputs by name.

        If it weighs bags, it runs again, with any number of ids in them.
        """
        inputs = self._recorded()
        weighed = {name for name in self._bags if f"ids/{name}" in inputs}
        if not all(self._has_list[name] for name in weighed):
            self._has_list.update(dict.fromkeys(weighed, True))
            self.lookups.clear()
            inputs = self._recorded()
        self._names = list(inputs)
        self._shapes = {name: values.shape[1:] for name, values in inputs.items()}
        return inputs

    def _recorded(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)  # the global one stays as it is
        ids = {}
        inputs = dict[str, Tensor]()
        for name, has_list in self._has_list.items():
            num_ids = _ROWS
            offsets = None
            if has_list:
                num_ids = _ROWS + 2 + self._list_numbers[name]
                offsets = torch.tensor([0, 2, 3, 3, 5, num_ids])
            weights = None
            if name in self._has_weights:
                weights = torch.rand(num_ids, generator=generator)
            ids[name] = Ids(torch.arange(num_ids) % 2, offsets, weights)
        if self._widths:
            width = sum(self._widths.values())
            inputs[DENSE_INPUT] = torch.rand(_ROWS, width, generator=generator)
        self._run(_Recording(self.lookups, ids, inputs, generator), ids, inputs)
        return inputs

    @property
    def inputs(self) -> list[str]:
        """Names of the graph's inputs, once they are recorded."""
        return self._names

    @property
    def starts(self) -> set[str]:
        """Names of the inputs that say where the items of candidates begin."""
        return {name for name in self._names if _parts_of(name)[0] == "offsets"}

    @property
    def shares_histories(self) -> bool:
        """Whether the network says that it takes one list of each history for all samples.

        What a base class says does not count, since a subclass may have another forward function.
        Ids that the graph pools itself have a list for each candidate.
        """
        pools_ids = any(_parts_of(name)[0] == "ids" for name in self._names)
        if not self.starts or pools_ids or "shares_histories" not in vars(type(self.network)):
            return False
        return bool(self.network.shares_histories)

    @property
    def columns_together(self) -> list[list[str]]:
        """The columns of each history that has several and that the network reads."""
        together = []
        for columns in columns_together(self.network):
            is_read = all(f"offsets/{name}" in self._names for name in columns)
            if len(columns) > 1 and is_read and columns not in together:
                together.append(columns)
        return together

    def trial(self, num_rows: int, shared: Sequence[int], seed: int) -> Trial:
        """Return a made-up request of `num_rows` candidates, once the inputs are recorded."""
        generator = torch.Generator().manual_seed(seed)
        lengths = {}
        for name, number in self._list_numbers.items():
            if f"offsets/{name}" in self._names:
                lengths[name] = made_up_lengths(num_rows, shared, number, len(self._list_numbers))
        inputs = {}
        for name in self._names:
            kind, feature = _parts_of(name)
            size = sum(lengths.get(feature or "", [1] * num_rows))
            if kind == "offsets":
                assert feature is not None
                inputs[name] = torch.tensor([0, *lengths[feature]]).cumsum(0)
            elif kind == "ids":
                inputs[name] = torch.randint(2, (size,), generator=generator)
            elif kind == "weights":
                inputs[name] = torch.rand(size, generator=generator)
            else:
                # numbers of columns may be places in a list: such as 0 and 0.5 are
                draw = torch.rand if name == DENSE_INPUT else torch.randn
                inputs[name] = draw(size, *self._shapes[name], generator=generator)
        return Trial(inputs, SharedPlaces(num_rows, shared, list(lengths.values())))

    def first(self, num_rows: int, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of recorded inputs that belongs to the first candidates."""
        request = {}
        for name, values in inputs.items():
            kind, feature = _parts_of(name)
            end = num_rows
            if kind == "offsets":
                end = num_rows + 1
            elif feature is not None and f"offsets/{feature}" in inputs:
                end = int(inputs[f"offsets/{feature}"][num_rows])
            request[name] = values[:end]
        return request

    def sizes(self) -> tuple[dict[int, Any], ...]:
        """Return which dimension of each input changes, as torch.export takes it."""
        rows = torch.export.Dim("rows")
        items = {}
        starts = dict[str | None, Any]()
        for name, number in self._list_numbers.items():
            items[name] = torch.export.Dim(f"items_{number}")
            starts[name] = torch.export.Dim(f"starts_{number}", min=2)
        sizes = []
        for name in self._names:
            kind, feature = _parts_of(name)
            size: Any = rows
            if kind == "offsets":
                size = starts[feature] if self.shares_histories else rows + 1
            elif feature is not None and f"offsets/{feature}" in self._names:
                size = items[feature]
            sizes.append({0: size})
        return tuple(sizes)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = by_name(self._activate(self.raw(*inputs)))
        self.outputs = list(outputs)
        return tuple(outputs.values())

    def raw(self, *inputs: Tensor) -> Any:
        """Return the output, or several by name, before they are activated."""
        named = dict(zip(self._names, inputs, strict=True))
        nothing = torch.zeros(0, dtype=torch.int64)
        ids = {}
        for name in self._has_list:
            values = named.get(f"ids/{name}", nothing)
            ids[name] = Ids(values, named.get(f"offsets/{name}"), named.get(f"weights/{name}"))
        return self._run(_Replaying(self.lookups, named), ids, named)

    # If its own trace fails, torch.onnx tries Dynamo, which lets sizes depend on values.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def _run(self, flow: Flow, ids: Mapping[str, Ids], inputs: Mapping[str, Tensor]) -> Any:
        dense = SideBySide(inputs[DENSE_INPUT], self._widths) if self._widths else {}
        batch = Batch(ids, dense, num_samples=_num_samples(inputs))
        with with_flow(flow, self._modules_with_tables):
            return self.network(batch)


def _list_numbers(network: nn.Module, names: list[str]) -> dict[str, int]:
    """Return a number for each list, by which the sizes of made-up ones differ.

    The columns of one history have the same: their lists go side by side.
    """
    numbers = {name: number for number, name in enumerate(names)}
    for first, *others in columns_together(network):
        numbers.update(dict.fromkeys(others, numbers[first]))
    return numbers


def _has_list(column: Id) -> bool:
    """Return whether a feature is looked up as a list, or has weights that a network may read."""
    return column.pooling == "none" or column.weights is not None


def _is_bag(column: Id, schema: Schema) -> bool:
    """Return whether a sample may have any number of ids."""
    is_split = any(isinstance(transform, Split) for transform in column.transforms)
    return is_split or schema.shapes.get(column.source, "value") != "value"


def _num_samples(inputs: Mapping[str, Tensor]) -> int:
    """Return the number of candidates by the first input that has one entry for each."""
    for name, values in inputs.items():
        kind, feature = _parts_of(name)
        if kind == "offsets":
            return values.shape[0] - 1
        if feature is None:
            return values.shape[0]
    return _ROWS


def _parts_of(name: str) -> tuple[str, str | None]:
    """Return the kind of an input, and its feature if it belongs to one.

    >>> _parts_of("lookup/0"), _parts_of("lookup/0/user"), _parts_of("offsets/user")
    (('lookup', None), ('lookup', 'user'), ('offsets', 'user'))
    """
    kind, *rest = name.split("/", 2)
    if kind in _OF_FEATURES:
        return kind, "/".join(rest)
    return kind, rest[1] if len(rest) == 2 else None


class _Recording(Flow):
    """Records which features are looked up, and makes up the rows, as `inputs` of the graph."""

    def __init__(
        self,
        lookups: dict[str, list[tuple[str, str, str]]],
        ids: Mapping[str, Ids],
        inputs: dict[str, Tensor],
        generator: torch.Generator,
    ) -> None:
        self.lookups = lookups
        self.ids = ids
        self.inputs = inputs
        self.generator = generator

    def pool(self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Any) -> Pooled:
        lookup = f"lookup/{len(self.lookups)}"
        specs = self.lookups[lookup] = []
        width = 0
        for feature, dim, ids in zip(
            module.layout.features, module.layout.dims, inputs, strict=True
        ):
            name, is_weighed = self._name_of(module, feature, ids)
            pooling = "none" if is_weighed else feature.pooling
            specs.append((name, feature.table, pooling))
            if pooling != "none":
                width += dim
        if width:
            self.inputs[lookup] = torch.rand(_ROWS, width, generator=self.generator)
        features = zip(specs, module.layout.features, module.layout.dims, strict=True)
        for (name, _, pooling), feature, dim in features:
            if pooling == "none":
                self._add_rows(lookup, name, dim)
                if feature.pooling != "none":
                    self._add_weighed(name)
        return pooled_inputs(module, lookup, specs, self.inputs, inputs)

    def _add_rows(self, lookup: str, name: str, dim: int) -> None:
        """Make the rows of a feature an input, and where those of each candidate begin."""
        ids = self.ids[name]
        rows = torch.rand(len(ids.values), dim, generator=self.generator)
        self.inputs[f"{lookup}/{name}"] = rows
        if ids.offsets is not None:
            self.inputs[f"offsets/{name}"] = ids.offsets

    def _add_weighed(self, name: str) -> None:
        """Make what a network may compute the weights of a feature from an input."""
        ids = self.ids[name]
        self.inputs[f"ids/{name}"] = ids.values
        if ids.weights is not None:
            self.inputs[f"weights/{name}"] = ids.weights

    def _name_of(self, module: FlowModule, feature: Feature, ids: Ids) -> tuple[str, bool]:
        """Return the name of looked up ids, and whether the network gave them other weights."""
        for name, original in self.ids.items():
            if original is ids:
                return name, False
            is_alike = original.values is ids.values and original.offsets is ids.offsets
            if is_alike and feature.pooling != "none":
                return name, True
        raise ConfigError(
            f"export: {type(module).__name__} must look up features of the schema, got ids that "
            "the network made. Give it batch.ids[name] as it is, or batch.with_weights."
        )


class _Replaying(Flow):
    """Returns the inputs of the graph, for the recorded lookups in order."""

    def __init__(
        self, lookups: Mapping[str, Sequence[tuple[str, str, str]]], inputs: Mapping[str, Tensor]
    ) -> None:
        self.lookups = lookups
        self.inputs = inputs
        self._rest = iter(lookups)

    def pool(self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Any) -> Pooled:
        lookup = next(self._rest)
        specs = self.lookups[lookup]
        return pooled_inputs(module, lookup, specs, self.inputs, inputs)


def _export(half: _DenseHalf, inputs: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return the graph without its weights, and their names."""
    outputs = {f"output/{name}": name for name in half.outputs}
    program = torch.onnx.export(
        half,
        tuple(inputs.values()),
        dynamo=True,
        input_names=list(inputs),
        output_names=list(outputs),  # no value of torch has such a name
        dynamic_shapes=(half.sizes(),),
        optimize=False,
        verbose=False,
    )
    assert program is not None
    names = {f"network.{name}" for name in dense_state(half.network)}
    model = program.model_proto  # made anew at each access
    weights = finish_graph(model, names, outputs)
    return model.SerializeToString(), weights


def finish_graph(model: Any, names: Collection[str], outputs: Mapping[str, str]) -> list[str]:
    """Take the weights out of an ONNX model, rename its outputs, and return the weights' names.

    Args:
        model: as torch made it.
        names: of the parameters of the network.
        outputs: new names of the outputs by their names.
    """
    graph = model.graph
    for node in graph.node:  # traces with paths of this machine, most of the bytes
        node.ClearField("metadata_props")
    inputs = {value.name for value in graph.input}
    inner = {name: f"inner/{name}" for name in outputs.values() if name not in inputs}
    _rename(graph, {**inner, **outputs})
    weights = [tensor for tensor in graph.initializer if tensor.name in names]
    for tensor in weights:  # a server brings them, before anything is derived from them
        tensor.ClearField("raw_data")
        tensor.data_location = tensor.EXTERNAL
        tensor.external_data.add(key="location", value="weights")
    return [tensor.name for tensor in weights]


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename the values of an ONNX graph, and of the graphs inside its loops and conditions."""
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)


def check_outputs(
    graph: OnnxGraph,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    expected: Sequence[Tensor],
) -> None:
    """Raise PersistError unless the graph's outputs are those of the network."""
    values = [(name, weight.detach().numpy()) for name, weight in weights.items()]
    session = open_graph(graph.onnx, values)
    arguments = {}
    for argument in session.get_inputs():
        arguments[argument.name] = inputs[argument.name].numpy()
    outputs = session.run(list(graph.outputs), arguments)
    for name, ours, theirs in zip(graph.outputs, expected, outputs, strict=True):
        difference = _largest_difference(ours.numpy(), theirs)
        if not difference <= TOLERANCE:
            raise PersistError(
                f"export: output {name!r} of the graph is not the network's, got a difference of "
                f"{difference:.2g}. Do not serve it; report the network."
            )


def _largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest relative difference; of values that are NaN or the same infinity, 0.

    Made-up inputs may give NaN, such as a softmax over a sequence of no items.
    """
    is_same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    if is_same.all():
        return 0.0
    scale = np.maximum(1, np.abs(ours))
    return float((np.abs(ours - theirs) / scale)[~is_same].max())


def check_installed() -> None:
    """Raise MissingExtra unless the packages that an export needs are installed."""
    try:
        onnx_runtime()
        import onnx
        import onnxscript

        del onnx, onnxscript
    except ImportError as error:
        raise MissingExtra(
            f"export: {error.name} is not installed. Run pip install hotbed[export]."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch, which logs its own deprecations and every library that it misses.

    It also prints the whole trace of a network that cannot be exported; the error names the place.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
