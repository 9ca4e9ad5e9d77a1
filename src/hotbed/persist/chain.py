# SPDX-License-Identifier: Apache-2.0
"""Fulls and the deltas on them: which stay, what applies to what, one full from a chain, and what
people ask about them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.config import build
from hotbed.embedding.table import Table
from hotbed.errors import DeltaGap, ForkedLineage, FormatError, PersistError
from hotbed.files import Where
from hotbed.persist.content import (
    VALUES,
    comparable_position,
    content_digest,
    flat,
    moments,
    network_bytes,
    only,
    settle_table,
    table_folder,
    table_names,
    tensors,
    write_values,
)
from hotbed.persist.format import (
    Link,
    Reader,
    Saved,
    Writer,
    open_checkpoint,
    open_folder,
    open_link,
    partition_ranges,
    read_newest,
)
from hotbed.persist.store import ADVICE, Store, number_of

if TYPE_CHECKING:
    from hotbed.persist.export import Graph

_REMEMBERED = 4096
_DENSE = "dense.safetensors"


class Lineage:
    """Which states somebody has taken, and which come next; the rules stand in docs/format.md under
    "Deltas".

    `digest`: of the state at hand; None = none yet.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        # digests of the state at hand: a compacted full is its parent too
        self._same: set[str] = set()
        self._taken: dict[str, None] = {}

    def accepts(self, manifest: Mapping[str, Any]) -> bool:
        """Whether this state is to be taken next; False = it was taken before. DeltaGap,
        ForkedLineage where it cannot be.
        """
        digest = manifest["digest"]
        version = manifest["version"]
        if digest in self._taken:
            return False
        if manifest["kind"] == "full" or manifest["parent"] in self._same:
            return True
        chain = [link["digest"] for link in manifest["chain"]]
        if self.digest is None:
            raise DeltaGap(
                f"delta {version}: there is no state yet to apply it to — received parent "
                f"{manifest['parent'][:12]} — "
                "take the full of its chain first"
            )
        if self._same & set(chain):
            missing = len(chain) - 1 - max(n for n, one in enumerate(chain) if one in self._same)
            raise DeltaGap(
                f"delta {version}: {missing} deltas before it are missing — received parent "
                f"{manifest['parent'][:12]} on {self.digest[:12]} — take them first, in order"
            )
        raise ForkedLineage(
            f"delta {version}: it belongs to a run that branched off — received parent "
            f"{manifest['parent'][:12]} on "
            f"{self.digest[:12]} — take the next full of its run"
        )

    def was_taken(self, manifest: Mapping[str, Any]) -> bool:
        """Whether this state was at hand before."""
        return manifest["digest"] in self._taken and manifest["digest"] != self.digest

    def took(self, manifest: Mapping[str, Any]) -> None:
        """The state of `manifest` is now at hand."""
        self.digest = digest = str(manifest["digest"])
        self._same = {digest, manifest["parent"]} if manifest.get("compacted") else {digest}
        for one in [*(link["digest"] for link in manifest.get("chain", ())), *self._same]:
            self._taken[one] = None
        while len(self._taken) > _REMEMBERED:
            del self._taken[next(iter(self._taken))]


class Replica:
    """Tables that follow a run: each full and delta once, in order, checked before anything
    changes.

    `tables`: made from the first state's description where none are given. Ids that wait for
    admission are not followed: a replica is read, and does not learn.

    Example:
        >>> replica = Replica()
        >>> for reader in Follower("published"):
        ...     replica.apply(reader)
    """

    def __init__(self, tables: Mapping[str, Table] | None = None) -> None:
        self.tables: dict[str, Table] = dict(tables or {})
        self.lineage = Lineage()

    def apply(self, state: Reader | Link) -> bool:
        """Take a state: a full, or the one delta that follows. False where it was taken before.

        A Reader whose whole chain is there is taken whole where its delta alone does not fit.
        Raises DeltaGap and ForkedLineage for a Link that does not fit, FormatError naming a bad
        file; the tables are then as before.
        """
        link = state.links[-1] if isinstance(state, Reader) else state
        try:
            if not self.lineage.accepts(link.manifest):
                return False
            links = [link]
        except (DeltaGap, ForkedLineage):
            if not isinstance(state, Reader):
                raise
            links = list(state.links)
        for one in links:
            one.verify()
        for one in links:
            self._take(one)
        return True

    def _take(self, link: Link) -> None:
        for entry in link.manifest["tables"]:
            name = entry["name"]
            if name not in self.tables:
                self.tables[name] = build(dict(entry["config"]), Table, f"tables.{name}")
            table = self.tables[name]
            if link.manifest["kind"] == "full":
                table.clear()
            for batch in link.parts(name, "removed"):
                table.remove(batch.column("id"))
            table.load(link.parts(name))
            settle_table(table, entry, link)
        self.lineage.took(link.manifest)


# --- what stays -----------------------------------------------------------------------------------


def retain(store: Store, keep: int) -> None:
    """Remove all but the newest `keep` fulls, the deltas that rest on them, and what the newest
    state needs.
    """
    newest = store.newest()
    if newest is None:
        return
    needed = {link.folder for link in open_folder(store, newest.folder).links}
    folders = store.folders()
    bases = {folder: _base(store, folder) for folder in folders}
    kept = [folder for folder in folders if bases[folder] == folder][-keep:]
    for folder in reversed(folders):  # deltas before what they rest on
        late = number_of(folder) > number_of(newest.folder)
        unknown = bases[folder] is None and number_of(folder) > number_of(kept[0])
        if not (late or unknown or folder in needed or bases[folder] in kept):
            store.remove(folder)


def _base(store: Store, folder: str) -> str | None:
    """The full that a checkpoint rests on, itself for a full; None where its manifest cannot be
    read.
    """
    try:
        chain = open_link(store, folder).manifest.get("chain")
    except PersistError:
        return None
    return str(chain[0]["folder"]) if chain else folder


def compact(where: Where) -> Saved | None:
    """Make a full of the newest state under `where`, of the same content digest; None where it is a
    full already.

    The chain stays until retention gives it up, so what rests on it goes on; a follower takes
    either.
    """
    reader = open_checkpoint(where)
    if len(reader.links) == 1:
        return None
    reader.verify()
    with Writer(reader.store) as writer:
        newest = reader.links[-1]
        named = {part["file"] for entry in newest.manifest["tables"] for part in _parts_of(entry)}
        for name in newest.manifest["files"]:
            if name not in named:
                writer.write(name, newest.read(name))
        tables = [
            write_merged(writer, number, reader, name)
            for number, name in enumerate(table_names(reader))
        ]
        dropped = ("format", "format_version", "files", "digest")
        members = {name: value for name, value in newest.manifest.items() if name not in dropped}
        link = {"kind": "full", "parent": newest.manifest["digest"], "chain": [], "compacted": True}
        if (latest := reader.store.newest()) is None or latest.folder != newest.folder:
            raise PersistError(
                f"{where}: another became newest meanwhile — received {latest} — compact again"
            )
        return writer.commit({**members, **link, "tables": tables})


def write_merged(
    writer: Writer, number: int, reader: Reader, name: str, columns: tuple[str, ...] = ()
) -> dict[str, Any]:
    """All rows of a table of a chain as parts of a full; returns the table's entry. `columns`: only
    these, where they are.
    """
    entry = reader.links[-1].entry(name)
    spans = partition_ranges(entry["rows"])
    parts = []
    for span, batch in zip(spans, reader.spans(name, spans), strict=True):
        if batch is not None:
            file = f"{table_folder(number, name)}/rows-{span.start:03d}-{span.stop - 1:03d}.arrow"
            rows = writer.write_batches(file, [only(batch, columns) if columns else batch])
            parts.append({"file": file, "first": span.start, "last": span.stop - 1, "rows": rows})
    return {**entry, "parts": parts, "removed": []}


def write_version(
    writer: Writer, reader: Reader, last: Link | None, graph: Graph | None = None
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
    names = table_names(reader)
    tables = [
        write_values(writer, number, link, name)
        if delta
        else write_merged(writer, number, reader, name, VALUES)
        for number, name in enumerate(names)
    ]
    if network := network_bytes(reader):
        writer.write(_DENSE, network)
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
            "dense": {"file": _DENSE, "optimizers": {}} if network else None,
            "progress": None,
            "tables": [{**entry, "candidates": None} for entry in tables],
        }
    )


def _parts_of(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*entry["parts"], *entry.get("removed", ())]


# --- what people ask ------------------------------------------------------------------------------


def verify(where: Where) -> dict[str, Any]:
    """Check everything about a checkpoint: files, row numbers, order, partitions. FormatError names
        what is wrong.

    Returns `{"folder", "kind", "version", "digest", "content_digest", "links", "files", "bytes"}`.
    """
    return read_newest(where, _verified)


def _verified(reader: Reader) -> dict[str, Any]:
    reader.verify()
    for entry in reader.manifest["tables"]:
        rows = sum(batch.num_rows for batch in reader.rows(entry["name"]))
        if rows != entry["rows"]:
            raise FormatError(
                f"{reader.folder}: table {entry['name']!r} has {rows} rows — received "
                f"{entry['rows']} in the "
                f"manifest — {ADVICE}"
            )
    files = [entry for link in reader.links for entry in link.manifest["files"].values()]
    return {
        **_head(reader),
        "content_digest": content_digest(reader),
        "links": len(reader.links),
        "files": len(files),
        "bytes": sum(entry["bytes"] for entry in files),
    }


def describe(where: Where) -> dict[str, Any]:
    """Describe a checkpoint by plain values: tables, sizes, histograms, positions, digests, chain.

    Histograms are `{"from", "to", "rows"}` lists: of the Euclidean norms of rows, and of counts
    where they are kept.
    """
    return read_newest(where, _description)


def _description(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    tables = [_described(reader, entry) for entry in manifest["tables"]]
    dense = [(name, shape) for name, _, shape, _ in tensors(reader) if name.startswith("network/")]
    return {
        **_head(reader),
        "parent": manifest["parent"],
        "chain": manifest.get("chain", []),
        "package_version": manifest["package_version"],
        "format_version": manifest["format_version"],
        "bytes": [
            sum(entry["bytes"] for entry in link.manifest["files"].values())
            for link in reader.links
        ],
        "positions": manifest["positions"],
        "counters": manifest["counters"],
        "dense": {
            "tensors": len(dense),
            "parameters": sum(int(np.prod(shape)) for _, shape in dense),
        },
        "tables": tables,
    }


def _head(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    return {
        "folder": reader.folder,
        **{name: manifest[name] for name in ("kind", "version", "digest")},
    }


def _described(reader: Reader, entry: Mapping[str, Any]) -> dict[str, Any]:
    norms = _Histogram()
    counts = _Histogram()
    for batch in reader.rows(entry["name"]):
        values = flat(batch.column("value")).reshape(batch.num_rows, -1).astype(np.float64)
        norms.add(np.sqrt(np.square(values).sum(axis=1)))
        if "count" in batch.schema.names:
            counts.add(batch.column("count").to_numpy().astype(np.float64))
    files = reader.manifest["files"]
    own = [part["file"] for part in _parts_of(entry)]
    waiting = entry["candidates"]
    return {
        "name": entry["name"],
        "dim": entry["config"]["dim"],
        "rows": entry["rows"],
        "bytes": sum(files[name]["bytes"] for name in own),
        "changed": sum(part["rows"] for part in entry["parts"]),
        "removed": sum(part["rows"] for part in entry.get("removed", ())),
        "candidates": waiting["rows"] if waiting else 0,
        "scalars": {name: value for name, value in entry["scalars"].items() if name != "rates"},
        "norms": norms.bins(),
        "counts": counts.bins(),
    }


class _Histogram:
    """Counts by powers of two; zero apart."""

    def __init__(self) -> None:
        self._counts: dict[int | None, int] = {}

    def add(self, values: NDArray[np.float64]) -> None:
        exponents = np.frexp(values[values > 0])[1]
        for exponent, n in zip(*np.unique(exponents, return_counts=True), strict=True):
            self._counts[int(exponent)] = self._counts.get(int(exponent), 0) + int(n)
        if zeros := int((values == 0).sum()):
            self._counts[None] = self._counts.get(None, 0) + zeros

    def bins(self) -> list[dict[str, float]]:
        known = sorted(exponent for exponent in self._counts if exponent is not None)
        found = [{"from": 2.0 ** (e - 1), "to": 2.0**e, "rows": self._counts[e]} for e in known]
        return (
            [{"from": 0.0, "to": 0.0, "rows": self._counts[None]}] if None in self._counts else []
        ) + found


def diff(a: Where, b: Where) -> dict[str, Any]:
    """What differs between two checkpoints, as plain values; `{"same": True, ...}` where their
    content is the same.

    `tables`: rows added, removed and changed from `a` to `b`, and the largest difference of a
    value; `dense`: the largest difference by tensor, only those that differ; None = only in one, or
    of another shape. `positions` (without `now` and `topic`), `counters`: [a's, b's].
    """
    return read_newest(a, lambda one: read_newest(b, lambda two: _difference(one, two)))


def _difference(one: Reader, two: Reader) -> dict[str, Any]:
    names = sorted({*table_names(one), *table_names(two)})
    tables = {name: _table_difference(one, two, name) for name in names}
    first, second = (
        {name: (dtype, shape, data) for name, dtype, shape, data in tensors(reader)}
        for reader in (one, two)
    )
    dense: dict[str, float | None] = {}
    for name in sorted({*first, *second}):
        if name not in first or name not in second or first[name][:2] != second[name][:2]:
            dense[name] = None
        elif first[name][2] != second[name][2]:
            values = [_floats(*rest) for rest in (first[name], second[name])]
            dense[name] = float(np.abs(values[0] - values[1]).max())
    positions = [comparable_position(reader.manifest["positions"]) for reader in (one, two)]
    counters = [reader.manifest["counters"] for reader in (one, two)]
    digests = [content_digest(reader) for reader in (one, two)]
    return {
        "same": digests[0] == digests[1],
        "content_digests": digests,
        "tables": tables,
        "dense": dense,
        "positions": positions,
        "counters": counters,
    }


def _floats(dtype: str, shape: list[int], data: memoryview) -> NDArray[np.float64]:
    if dtype == "BF16":  # the upper half of a float32
        return (
            (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        )
    kinds = {"F": "f", "I": "i", "U": "u", "B": "?"}
    kind = "?" if dtype == "BOOL" else f"<{kinds[dtype[0]]}{int(dtype[1:]) // 8}"
    return np.frombuffer(data, kind).astype(np.float64)


def _table_difference(one: Reader, two: Reader, name: str) -> dict[str, Any] | None:
    if name not in table_names(one) or name not in table_names(two):
        return None
    added = removed = changed = 0
    largest = 0.0
    spans = partition_ranges(one.links[-1].entry(name)["rows"], 1 << 16)
    for old, new in zip(one.spans(name, spans), two.spans(name, spans), strict=True):
        if old is None or new is None:
            added = added + (new.num_rows if new else 0)
            removed = removed + (old.num_rows if old else 0)
            continue
        _, here, there = np.intersect1d(
            old.column("id"), new.column("id"), assume_unique=True, return_indices=True
        )
        added = added + new.num_rows - len(there)
        removed = removed + old.num_rows - len(here)
        columns = [column for column in old.schema.names if column in new.schema.names]
        differs = np.zeros(len(here), bool)
        for column in columns if len(here) else ():
            left, right = (
                _matrix(batch, column)[rows] for batch, rows in ((old, here), (new, there))
            )
            differs |= (left != right).any(axis=1) if left.shape == right.shape else True
            if column == "value" and left.shape == right.shape:
                largest = max(largest, float(np.abs(left.astype(np.float64) - right).max()))
        changed += int(differs.sum())
    return {"added": added, "removed": removed, "changed": changed, "largest": largest}


def _matrix(batch: pa.RecordBatch, column: str) -> NDArray[Any]:
    return flat(batch.column(column)).reshape(batch.num_rows, -1)
