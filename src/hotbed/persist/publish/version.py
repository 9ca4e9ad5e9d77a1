# SPDX-License-Identifier: Apache-2.0
"""A published version: what servers need of a state, and who publishes it."""

from __future__ import annotations

import json
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from hotbed.data.fitted import FittedMap
from hotbed.data.schema import Schema
from hotbed.errors import PersistError
from hotbed.persist.container.format import (
    CheckpointWriter,
    DenseTensor,
    Link,
    Reader,
    Saved,
    open_checkpoint,
)
from hotbed.persist.container.manifest import (
    DENSE_FILE,
    DenseEntry,
    GraphEntry,
    Manifest,
    PartEntry,
    TableEntry,
)
from hotbed.persist.state.tables import table_folder, with_columns, write_merged

VALUE_COLUMNS = ("partition", "id", "value", "count")
REMOVED_COLUMNS = ("partition", "id")
_NEVER = -(2**63)  # the watermark of a table that was given no time


@dataclass(frozen=True)
class IdsOnnx:
    """The id graph of a network that takes tensors: what computes the ids of its lookups.

    Both graphs have an input `argument/<name>` for each tensor that they use.

    Attributes:
        onnx: the graph.
        arguments: the tensors: `name`, `dtype`, `shape` without the first axis, and the `column` of
            the schema that feeds it with a `part` of its values: "values", "starts" (where the ids
            of each sample begin), "ends" (these, and where the last ones end), or "weights".
        lookups: of each lookup its `feature`, and the outputs with its `ids`, `offsets` and
            `weights`, where it has them. `ends`: the offsets include the last one. `padding`: the
            id that its bags leave out.
        widths: shape of each output without the first axis, where it has more than that.
    """

    file: ClassVar[str] = "ids.onnx"
    onnx: bytes
    arguments: Sequence[Mapping[str, Any]]
    lookups: Sequence[Mapping[str, Any]]
    widths: Mapping[str, Sequence[int]]

    def entry(self) -> dict[str, Any]:
        """Return everything but the graph itself, for the manifest."""
        entry: dict[str, Any] = {
            "file": self.file,
            "arguments": [dict(argument) for argument in self.arguments],
            "lookups": [dict(lookup) for lookup in self.lookups],
        }
        if self.widths:
            entry["widths"] = {name: list(width) for name, width in self.widths.items()}
        return entry


@dataclass(frozen=True)
class OnnxGraph:
    """An ONNX graph and its inputs.

    Attributes:
        onnx: the graph.
        weights: parameters of the network that the graph names and does not hold; each version
            brings its own.
        lookups: for each lookup of the network its features (name, table, pooling). The graph's
            input with the name of the lookup takes the pooled features side by side, float32
            [n, width]. For a feature that is not pooled, `<lookup>/<feature>` takes the rows,
            float32 [m, dim]. If it has lists, `offsets/<feature>` takes int64 [n + 1]; else m is n.
            If the network weighs its ids, the graph pools them, and `ids/<feature>` takes int64 [m]
            and `weights/<feature>` the weights of the request, float32 [m].
        dense: columns that the input `dense` takes side by side, float32 [n, sum of widths].
        outputs: names of the predictions, one for each label.
        lengths: of sequences, how many of their newest rows the network reads, where that is known.
        shares_histories: whether sequences that all candidates share may be given once: then all
            `offsets/<feature>` are int64 [2].
        columns_together: for each history of several sequences, their names. For a candidate, all
            of them have the same number of rows.
        schema: of the requests, as `Schema.to_json` returns it; None: that of the state.
        ids: what computes the ids of the lookups, if the network takes tensors instead of features.
    """

    file: ClassVar[str] = "graph.onnx"
    onnx: bytes
    weights: Sequence[str]
    lookups: Mapping[str, Sequence[tuple[str, str, str]]]
    dense: Sequence[str]
    outputs: Sequence[str]
    schema: dict[str, Any] | None = None
    ids: IdsOnnx | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    shares_histories: bool = False
    columns_together: Sequence[Sequence[str]] = ()

    def entry(self) -> GraphEntry:
        """Return everything but the graph itself, for the manifest."""
        lookups = []
        for name, features in self.lookups.items():
            lookups.append({"name": name, "features": [list(feature) for feature in features]})
        return GraphEntry(
            file=self.file,
            lookups=lookups,
            weights=list(self.weights),
            dense=list(self.dense),
            outputs=list(self.outputs),
            ids=None if self.ids is None else self.ids.entry(),
            lengths=dict(self.lengths) or None,
            shares_histories=self.shares_histories or None,
            columns_together=[list(columns) for columns in self.columns_together] or None,
        )


class Publisher(ABC):
    """Hands saved states on to servers. Publishing the same bits again changes nothing.

    `graph`: the network for servers, as `hotbed.persist.publish.export.export_graph` returns it.
    Each full brings the graph along, so that a server needs nothing else to start. None: servers
    start from an export.
    """

    graph: OnnxGraph | None = None

    @abstractmethod
    def publish(self, saved: Saved | Reader, *, forced: str | None = None) -> Saved | None:
        """Publish a checkpoint: as a delta if its parent is the version published last, else full.

        The number of the version is the state's, or one more than the highest number published
        here, whichever is higher: a number names one version for ever.

        Args:
            saved: what a save returned, or any state, as `open_checkpoint` returns it.
            forced: why a state that a gate held is published all the same.

        Returns:
            What was published; None if it was published before.

        Raises:
            PersistError: it cannot be published, or a gate held it; the message says why.
        """

    def newest_source(self) -> str | None:
        """Return the digest of the state that was published last; None if it is not known."""
        return None


def opened(saved: Saved | Reader, forced: str | None = None) -> Reader:
    """Return the state to publish.

    Args:
        saved: the state.
        forced: why a state that a gate held is published all the same.

    Raises:
        PersistError: it is something else, or published values; or a gate held it.
    """
    if isinstance(saved, Saved):
        saved = open_checkpoint(saved.folder)
    if not isinstance(saved, Reader):
        raise PersistError(
            f"publish: not a state, got {type(saved).__name__}. Give what a save returned, or "
            "hb.checkpoints.open_checkpoint(path)."
        )
    if saved.manifest.contents != "state":
        raise PersistError(
            f"{saved.folder}: expected a state, got published values. Give a state of the run."
        )
    if saved.manifest.held and not (forced or "").strip():
        reasons = "; ".join(entry.reason for entry in saved.manifest.held)
        raise PersistError(
            f"{saved.folder}: a gate held this state, got {reasons}. Publish an earlier state, or "
            "this one with `hotbed publish --force REASON`."
        )
    return saved


def write_published(
    writer: CheckpointWriter,
    reader: Reader,
    last: Link | None,
    graph: OnnxGraph | None = None,
    maps: Sequence[FittedMap] = (),
    *,
    highest: int = -1,
    forced: str | None = None,
) -> Saved:
    """Write what a server needs of a checkpoint.

    It is a delta if `last`, the version published before, is its parent; else a full with `graph`.

    Args:
        writer: of the version.
        reader: the state.
        last: the version published before.
        graph: the network for servers.
        maps: files of its fitted maps that are elsewhere now.
        highest: the highest number that was published here; the version gets a higher one.
            -1: none.
        forced: why a state that a gate held is published.
    """
    manifest = reader.manifest
    delta_on = None
    if last is not None and manifest.kind == "delta" and last.manifest.source == manifest.parent:
        delta_on = last
    tables = _write_tables(writer, reader, is_delta=delta_on is not None)
    dense = _write_network(writer, reader)
    starts_servers = graph is not None and delta_on is None
    schema = _write_schema(writer, manifest, graph, maps, starts_servers=starts_servers)
    graph_entry = None
    if graph is not None and delta_on is None:
        graph_entry = _write_graph(writer, graph)
    return writer.commit(
        Manifest(
            package_version=manifest.package_version,
            version=max(manifest.version, highest + 1),
            model=manifest.model,
            schema=schema,
            counters=manifest.counters,
            graph=graph_entry,
            kind="full" if delta_on is None else "delta",
            contents="values",
            parent=None if last is None else last.manifest.digest,
            chain=() if delta_on is None else delta_on.chain,
            source=manifest.digest,
            published=time.time(),
            learned=_learned(manifest),
            caught=_caught(manifest),
            positions={},
            dense=dense,
            tables=tables,
            held=manifest.held,
            forced=forced if manifest.held else None,
        )
    )


def _write_graph(writer: CheckpointWriter, graph: OnnxGraph) -> GraphEntry:
    writer.write(graph.file, graph.onnx)
    if graph.ids is not None:
        writer.write(graph.ids.file, graph.ids.onnx)
    return graph.entry()


def _write_tables(
    writer: CheckpointWriter, reader: Reader, *, is_delta: bool
) -> tuple[TableEntry, ...]:
    tables = []
    for number, name in enumerate(reader.table_names):
        if is_delta:
            entry = _write_values(writer, number, reader.newest_link, name)
        else:
            entry = write_merged(writer, number, reader, name, VALUE_COLUMNS)
        tables.append(replace(entry, candidates=None, sketch=None))
    return tuple(tables)


def request_schema(manifest: Manifest) -> dict[str, Any] | None:
    """Return the schema of a server's requests: of raw rows, where training read prepared ones."""
    if manifest.schema is None:
        return None
    raw: dict[str, Any] = manifest.schema.get("raw", manifest.schema)
    return raw


def _write_schema(
    writer: CheckpointWriter,
    manifest: Manifest,
    graph: OnnxGraph | None,
    maps: Sequence[FittedMap],
    *,
    starts_servers: bool,
) -> dict[str, Any] | None:
    """Return the schema of requests, with its fitted maps in the folder of the version.

    The files of the maps are written where servers start from the version.
    """
    plain = request_schema(manifest)
    if graph is not None and graph.schema is not None:
        plain = graph.schema
    if plain is None:
        return None
    schema = Schema.from_json(plain)
    here = {fitted.digest: fitted for fitted in maps}
    paths = {}
    for fitted in schema.maps:
        name = f"maps/{fitted.digest[:32]}.rows"
        paths[fitted.digest] = Path(name)
        if starts_servers:
            file = here.get(fitted.digest, fitted)
            writer.write(name, file.data())
    if not paths:
        return plain
    return schema.with_maps(paths).to_json()


def _write_network(writer: CheckpointWriter, reader: Reader) -> DenseEntry | None:
    network = network_bytes(reader)
    if not network:
        return None
    writer.write(DENSE_FILE, network)
    return DenseEntry(file=DENSE_FILE, optimizers={})


def _write_values(writer: CheckpointWriter, number: int, link: Link, name: str) -> TableEntry:
    """Write the values of a delta's own rows, and its removed ids; return the table's entry."""
    entry = link.entry(name)
    folder = table_folder(number, name)

    def write(part: PartEntry, columns: tuple[str, ...], *, removed: bool) -> PartEntry:
        file = f"{folder}/{PurePosixPath(part.file).name}"
        batches = link.part(entry, part, removed=removed)
        writer.write_batches(file, (with_columns(batch, columns) for batch in batches))
        return replace(part, file=file)

    parts = [write(part, VALUE_COLUMNS, removed=False) for part in entry.parts]
    removed = [write(part, REMOVED_COLUMNS, removed=True) for part in entry.removed]
    return replace(entry, parts=tuple(parts), removed=tuple(removed))


def _tree(manifest: Manifest) -> Mapping[str, Any]:
    return {} if manifest.progress is None else manifest.progress.tree


def _learned(manifest: Manifest) -> float | None:
    """Return the time of the newest event in a state, in Unix seconds; None if unknown."""
    run = _tree(manifest).get("run") or {}
    watermarks = [entry.scalars["watermark"] for entry in manifest.tables]
    times = [micros for micros in (run.get("now"), *watermarks) if micros not in (None, _NEVER)]
    return max(times) / 1e6 if times else None


def _caught(manifest: Manifest) -> float | None:
    """Return when training had come to a state, in Unix seconds; None if unknown."""
    tree = _tree(manifest)
    return float(tree["wall_caught"]) if "wall_caught" in tree else None


def network_bytes(reader: Reader) -> bytes:
    """Return the network's tensors alone as a safetensors file, without torch; empty for none."""
    tensors = [tensor for tensor in reader.tensors() if tensor.name.startswith("network/")]
    if not tensors:
        return b""
    tensors.sort(key=_alignment)
    header = {}
    end = 0
    for tensor in tensors:
        start = end
        end += len(tensor.data)
        offsets = [start, end]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors)


def _alignment(tensor: DenseTensor) -> tuple[int, str]:
    """Sort wide types first, so that all tensors are aligned."""
    num_values = max(1, int(np.prod(tensor.shape)))
    return -len(tensor.data) // num_values, tensor.name
