# SPDX-License-Identifier: Apache-2.0
"""A published version: what servers need of a state, and who publishes it."""

from __future__ import annotations

import json
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np

from hotbed.persist.format import CheckpointWriter, Link, Reader, Saved
from hotbed.persist.manifest import DENSE_FILE
from hotbed.persist.rows import with_columns
from hotbed.persist.tables import table_folder, write_merged

VALUES = ("partition", "id", "value", "count")
_NEVER = -(2**63)  # the watermark of a table that was told no time


@dataclass(frozen=True)
class Graph:
    """An ONNX graph and what it is fed with.

    `weights`: parameters of the network that the graph names and does not hold; each version brings
    its own. `lookups`: for each lookup of the network, its name and its features (name, table,
    pooling); the graph's input of that name takes the pooled ones side by side, float32 [n, width].
    Of one that is not pooled `<lookup>/<feature>` takes the rows, float32 [m, dim], and where it is
    a sequence in the schema `offsets/<feature>` int64 [n + 1]; else m is n. `dense`: columns that
    the input `dense` takes side by side, float32 [n, sum of widths]. `outputs`: names of the
    predictions, one a label.
    """

    file: ClassVar[str] = "graph.onnx"
    onnx: bytes
    weights: Sequence[str]
    lookups: Mapping[str, Sequence[tuple[str, str, str]]]
    dense: Sequence[str]
    outputs: Sequence[str]

    def describe(self) -> dict[str, Any]:
        """Everything but the graph itself, as JSON values."""
        lookups = [
            {"name": name, "features": [list(one) for one in found]}
            for name, found in self.lookups.items()
        ]
        plain = {
            "weights": list(self.weights),
            "dense": list(self.dense),
            "outputs": list(self.outputs),
        }
        return {"file": self.file, "lookups": lookups, **plain}


class Publisher(ABC):
    """Hands saved states on. Publishing the same bits again changes nothing.

    `graph`: the network for servers, as `hotbed.persist.publish.export.export_graph` returns it.
    Each full brings the graph along, so that a server needs nothing else to start. None: servers
    start from an export.
    """

    graph: Graph | None = None

    @abstractmethod
    def publish(self, saved: Saved) -> Saved | None:
        """Publish a checkpoint, as a delta where the version published last is its parent, else in
        full.

        Returns what was published; None where it was published before. Raises PersistError, naming
        what is wrong.
        """


def write_published(
    writer: CheckpointWriter, reader: Reader, last: Link | None, graph: Graph | None = None
) -> Saved:
    """Write what a server needs of a checkpoint: a delta where `last` is its parent, else a full
    with `graph`.
    """
    manifest = reader.manifest
    link = reader.links[-1]
    delta = (
        last is not None
        and manifest["kind"] == "delta"
        and last.manifest["source"] == manifest["parent"]
    )
    names = reader.table_names
    tables = [
        write_values(writer, number, link, name)
        if delta
        else write_merged(writer, number, reader, name, VALUES)
        for number, name in enumerate(names)
    ]
    if network := network_bytes(reader):
        writer.write(DENSE_FILE, network)
    if graph is not None and not delta:
        writer.write(graph.file, graph.onnx)
    return writer.commit(
        {
            **{
                name: manifest[name]
                for name in ("package_version", "version", "model", "schema", "counters")
            },
            **({"graph": graph.describe()} if graph is not None and not delta else {}),
            "kind": "delta" if delta else "full",
            "contents": "values",
            "parent": None if last is None else last.manifest["digest"],
            "chain": last.chain if delta and last is not None else [],
            "source": manifest["digest"],
            "published": time.time(),
            **moments(manifest),
            "positions": {},
            "dense": {"file": DENSE_FILE, "optimizers": {}} if network else None,
            "progress": None,
            "tables": [{**entry, "candidates": None} for entry in tables],
        }
    )


def write_values(writer: CheckpointWriter, number: int, link: Link, name: str) -> dict[str, Any]:
    """Write the values of a delta's own rows, and its removed ids; returns the table's entry in the
    manifest.
    """
    entry = dict(link.entry(name))
    folder = table_folder(number, name)
    for member, columns in (("parts", VALUES), ("removed", VALUES[:2])):
        parts = []
        for part in entry[member]:
            file = f"{folder}/{PurePosixPath(part['file']).name}"
            rows = link.part(link.entry(name), member, part)
            writer.write_batches(file, (with_columns(batch, columns) for batch in rows))
            parts.append({**part, "file": file})
        entry[member] = parts
    return entry


def moments(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Unix seconds, where known: `learned`, of the newest event in a state; `caught`, when training
    had come to it.
    """
    tree = (manifest["progress"] or {}).get("tree") or {}
    known = [
        (tree.get("run") or {}).get("now"),
        *(entry["scalars"]["watermark"] for entry in manifest["tables"]),
    ]
    times = [micros for micros in known if micros is not None and micros != _NEVER]
    caught = {"caught": float(tree["wall_caught"])} if "wall_caught" in tree else {}
    return {"learned": max(times) / 1e6, **caught} if times else caught


def network_bytes(reader: Reader) -> bytes:
    """The network's tensors alone as the bytes of a safetensors file, without torch; empty where
    there are none.
    """
    found = [one for one in reader.tensors() if one[0].startswith("network/")]
    found.sort(
        key=lambda one: (-len(one[3]) // max(1, int(np.prod(one[2]))), one[0])
    )  # wide types first: all are aligned
    header = {}
    at = 0
    for name, dtype, shape, data in found:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(one[3] for one in found) if found else b""
