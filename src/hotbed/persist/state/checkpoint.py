# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint: network, tables, optimizers, progress and their description.

Example:
    >>> state = State(network=network, tables=tables, optimizers={"dense": optimizer})
    >>> saved = save(path, state)

`restoring` loads it again. During training, `capture` takes the state between two steps, and a
`Saver` writes it on another thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from hotbed.config import describe
from hotbed.connectors.live import SavedRows
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, PersistError
from hotbed.files import Lock, Where, lock_file
from hotbed.parallel import WHOLE, Shard, at
from hotbed.persist.container.format import CheckpointWriter, Saved, open_link
from hotbed.persist.container.manifest import (
    DENSE_FILE,
    PROGRESS_FILE,
    Arrays,
    DenseEntry,
    HeldEntry,
    Manifest,
    PartEntry,
    ProgressEntry,
    TableEntry,
    encode,
    packed,
)
from hotbed.persist.container.retention import retain
from hotbed.persist.container.store import JOURNAL, CheckpointStore, LocalStore, open_store
from hotbed.persist.state.chain import compact
from hotbed.persist.state.network import flatten, network_tensors
from hotbed.persist.state.open_rows import write_open_rows
from hotbed.persist.state.tables import (
    CapturedRows,
    CapturedTable,
    LiveRows,
    joined_scalars,
    write_rows,
    write_waiting,
)

log = logging.getLogger("hotbed.persist")


@dataclass(frozen=True)
class State:
    """Everything a checkpoint holds.

    Attributes:
        network: the dense part.
        tables: by name.
        optimizers: by name. None stands for a part without an optimizer.
        rows: parameters of `network` that are rows of tables. They are saved with the tables.
        model: how to build the model again, as JSON values; see docs/format.md.
        schema: what `Schema.to_json` returns.
        positions: positions of sources by name.
        counters: epochs, steps and samples learned.
        progress: nested dicts and lists with numbers, text and NumPy arrays (callbacks, metrics,
            the run).
        random: states of torch's generators by name.
        open_rows: what a join of streams holds open at its position, all of it, or what came since
            the state before, as `capture(changes=)` says.
        version: number of the state in its lineage.
        parent: digest of the state before.
        shard: the part of the rows that the tables hold. The processes that hold the other parts
            make the same calls, to write and read one state.
        held: why a gate does not publish the state; empty if it may be published.
    """

    network: nn.Module | None = None
    tables: Mapping[str, Table] = field(default_factory=dict)
    optimizers: Mapping[str, torch.optim.Optimizer | None] = field(default_factory=dict)
    rows: Iterable[nn.Parameter] = ()
    model: Mapping[str, Any] | None = None
    schema: Any = None
    positions: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Tensor] = field(default_factory=dict)
    open_rows: SavedRows | None = None
    version: int = 0
    parent: str | None = None
    shard: Shard = WHOLE
    held: tuple[HeldEntry, ...] = ()

    def check_shard(self) -> None:
        """Raise PersistError if other processes have rows of a table, which the shard leaves out.

        A state of the rows of one rank would look like that of all of them.
        """
        for name, table in self.tables.items():
            owned = table.owned
            if owned is not None and not np.array_equal(owned, self.shard.owned(name)):
                raise PersistError(
                    f"State.shard: several ranks hold the rows of a table, got table {name!r} and "
                    "not their shard. Give State(…, shard=loop.shard) on every rank, or "
                    "RecModel.state()."
                )


@dataclass(frozen=True)
class Capture:
    """A state at one moment, to be written while training continues.

    `write` closes it; a capture that is not written needs `close(saved=False)`.

    Attributes:
        manifest: its members, without files and tables.
        tensors: of the dense part.
        arrays: of the progress.
        tables: snapshots of the tables.
        open_rows: of a join of streams.
        changes: whether the tables hold only what changed.
        shard: the part of the rows that the tables hold.
    """

    manifest: Manifest
    tensors: Mapping[str, Tensor]
    arrays: Arrays
    tables: tuple[CapturedTable, ...]
    changes: bool
    shard: Shard = WHOLE
    open_rows: SavedRows | None = None

    def close(self, saved: bool) -> None:
        """End the snapshots. If it was not saved, the next capture holds these changes too."""
        for table in self.tables:
            table.rows.close(saved)


def capture(state: State, changes: bool = False, *, takes: bool = True) -> Capture:
    """Capture the state of this moment.

    Call it between two steps, on the thread that trains. It copies the dense part only.

    Args:
        state: the state.
        changes: capture only rows that changed or were removed since the last capture that was
            saved. Every table must `track`.
        takes: the tables record changes anew from here on; False leaves their records to another
            reader. See `Table.snapshot`.

    Raises:
        PersistError: a snapshot of a table is open, a value cannot be saved, or other ranks hold
            rows and the state does not say so; the message names it.
    """
    state.check_shard()
    with ExitStack() as undo:
        tables = []
        for name, table in sorted(state.tables.items()):
            rows = table.snapshot(changes=changes, takes=takes)
            undo.callback(rows.close, saved=False)
            tables.append(_captured_table(name, table, rows))
        captured = _capture(state, tuple(tables), changes=changes)
        undo.pop_all()
    return captured


def _captured_table(name: str, table: Table, rows: CapturedRows) -> CapturedTable:
    return CapturedTable(name, describe(table.config), len(table), rows, table.edits)


def _capture(state: State, tables: tuple[CapturedTable, ...], *, changes: bool) -> Capture:
    tensors: dict[str, Tensor] = {}
    dense = None
    optimizers: dict[str, Any] = {}
    for name, optimizer in state.optimizers.items():
        if optimizer is not None:
            optimizer_tensors, optimizers[name] = flatten(optimizer, name)
            tensors |= optimizer_tensors
    if state.network is not None:
        tensors = {**network_tensors(state.network, state.rows), **tensors}
        dense = DenseEntry(file=DENSE_FILE if tensors else None, optimizers=optimizers)
    generators = {name: generator.cpu().numpy() for name, generator in state.random.items()}
    tree, arrays = encode(state.progress, "progress")
    random, random_arrays = encode(generators, "random")
    arrays |= random_arrays
    progress = None
    if tree or random:
        file = PROGRESS_FILE if arrays else None
        progress = ProgressEntry(file=file, tree=tree, random=random)
    manifest = Manifest(
        package_version=package_version(),
        kind="full",
        contents="state",
        version=state.version,
        parent=state.parent,
        model=None if state.model is None else dict(state.model),
        schema=state.schema,
        positions=dict(state.positions),
        counters=dict(state.counters),
        dense=dense,
        progress=progress,
        tables=(),
        held=state.held or None,
    )
    return Capture(manifest, tensors, arrays, tables, changes, state.shard, state.open_rows)


def track_changes(tables: Iterable[Table], *, saved: bool = False) -> bool:
    """Make every table track its changes; return False if a rule moves rows without gradients.

    The reason is logged. Every capture must then be a full.

    Args:
        tables: the tables.
        saved: their rows are those of a state that was loaded just now, see `Table.track`.
    """
    try:
        for table in tables:
            table.track(saved=saved)
    except ConfigError as error:
        log.info("every checkpoint is a full: %s", error)
        return False
    return True


def num_taken(tables: Iterable[Table]) -> list[int]:
    """Return how often the record of changes of each table began anew.

    If the numbers are others than after a capture, a delta on it would lack changes.
    """
    return [table.num_taken for table in tables]


def write(
    where: Where,
    captured: Capture,
    keep: int = 1,
    parent: Saved | None = None,
    *,
    stands_back: bool = True,
) -> Saved:
    """Write a capture as the newest checkpoint under `where` and close it.

    Args:
        where: a path or URL.
        captured: the capture.
        keep: number of fulls that are kept, each with the deltas on it.
        parent: the checkpoint that it descends from. A capture of changes needs it, and becomes a
            delta on it. None: `State.parent` counts.
        stands_back: whether it pauses while other threads of the process work, as in training.

    Raises:
        PersistError: the disk refuses, or the parent is gone. The state that was newest stays so,
            and the next capture holds these changes too.
    """
    is_saved = False
    shard = captured.shard
    shard.enter("save", captured.manifest.counters.get("steps", 0))
    try:
        with ExitStack() as opened:
            writer = _opened(where, shard, opened, stands_back=stands_back)
            saved = _write(writer, captured, parent)
        is_saved = True
    finally:
        captured.close(is_saved)
    if read := sum(table.rows.read_bytes for table in captured.tables):
        log.info("%s: the %s read %.1f MiB from the disk", saved.folder, saved.kind, read / 2**20)
    if saved.kind == "full":
        with shard.together():
            if shard.is_first:
                _retain(where, keep)
    return saved


def write_merged(where: Where, captured: Capture, keep: int, parent: Saved | None) -> Saved:
    """Write changes, and make a full of them and the files before: no table is read whole.

    If the files cannot be merged, the delta is the newest state.
    """
    saved = write(where, captured, keep, parent)
    try:
        full = compact(where)
    except (PersistError, OSError) as error:
        log.warning("%s: the newest state stays a delta: %s", where, error)
        return saved
    _retain(where, keep)
    return full or saved


def _retain(where: Where, keep: int) -> None:
    try:
        retain(open_store(where), keep)
    except (PersistError, OSError) as error:
        log.warning("%s: older checkpoints are kept: %s", where, error)


def _opened(
    where: Where, shard: Shard, opened: ExitStack, *, stands_back: bool
) -> CheckpointWriter:
    """Return a writer of a new checkpoint, which all processes write."""
    writers = []

    def enter(draft: str | None) -> None:
        writer = CheckpointWriter(where, draft, stands_back=stands_back)
        writers.append(opened.enter_context(writer))

    with shard.together():
        if shard.is_first:
            enter(None)
    draft = shard.from_first(lambda: writers[0].draft)
    with shard.together():
        if not shard.is_first:
            enter(draft)
    return writers[0]


def _write(writer: CheckpointWriter, captured: Capture, parent: Saved | None) -> Saved:
    shard = captured.shard
    manifest = captured.manifest
    if captured.changes:
        parent = shard.from_first(lambda: _checked_parent(writer, parent))
        manifest = replace(manifest, kind="delta", chain=parent.chain)
    if parent is not None:
        manifest = replace(manifest, parent=parent.digest)
    with shard.together():
        if shard.is_first and captured.tensors:
            writer.write(DENSE_FILE, safetensors.torch.save(dict(captured.tensors)))
        if shard.is_first and captured.arrays:
            writer.write(PROGRESS_FILE, packed(captured.arrays))
        if shard.is_first and captured.open_rows is not None:
            manifest = replace(manifest, open_rows=write_open_rows(writer, captured.open_rows))
        parts = [
            write_rows(writer, number, table, shard) for number, table in enumerate(captured.tables)
        ]
        files = writer.entries()
    totals = [(table.total, table.rows.scalars, table.edits) for table in captured.tables]
    every = shard.gathered((files, parts, totals))
    tables = []
    for number, table in enumerate(captured.tables):
        candidates, sketch = write_waiting(writer, number, table, shard)
        rows, scalars, edits = zip(*(totals[number] for _, _, totals in every), strict=True)
        tables.append(
            TableEntry(
                name=table.name,
                config=dict(table.config),
                rows=sum(rows),
                scalars=joined_scalars(table.name, scalars, edits),
                parts=_in_order(parts[number][0] for _, parts, _ in every),
                removed=_in_order(parts[number][1] for _, parts, _ in every),
                candidates=candidates,
                sketch=sketch,
            )
        )
    if shard.is_first:
        for files, _, _ in every:
            writer.add(files)
    shard.enter("commit")
    return shard.from_first(lambda: writer.commit(replace(manifest, tables=tuple(tables))))


def _in_order(parts: Iterable[Sequence[PartEntry]]) -> tuple[PartEntry, ...]:
    """Return the parts of all processes by rising partition."""
    return tuple(sorted(itertools.chain(*parts), key=lambda part: part.first))


def _checked_parent(writer: CheckpointWriter, parent: Saved | None) -> Saved:
    """Return the parent of a delta, which must never become newest without its chain."""
    if parent is None:
        raise PersistError(
            "write: a capture of changes needs the checkpoint before them, got parent=None. "
            "Save a full first."
        )
    for link in parent.chain:
        digest = open_link(writer.store, link.folder).manifest.digest
        if digest != link.digest:
            raise PersistError(
                f"{writer.store.place(link.folder)}: a delta rests on another checkpoint of this "
                f"name, got digest {digest} instead of {link.digest}. Save a full."
            )
    return parent


@at("save")
def save(where: Where, state: State, keep: int = 1) -> Saved:
    """Write `state` as the newest checkpoint under `where`, a full.

    The changes that tables track stay tracked.

    Args:
        where: a path or URL.
        state: the state.
        keep: number of fulls that are kept.

    Raises:
        PersistError: the disk refuses, a running stream keeps its states there, a value cannot be
            saved, or other ranks hold rows and the state does not say so. The state that was newest
            stays so.
        FormatError: CURRENT is torn, or missing next to states.
    """
    state.check_shard()
    tables = []
    for name, table in sorted(state.tables.items()):
        tables.append(_captured_table(name, table, LiveRows(table)))
    store = open_store(where)
    with ExitStack() as locked:
        with state.shard.together():
            if state.shard.is_first:
                locked.enter_context(_only_writer(store))
                # raises if CURRENT is lost: retention would remove the states
                store.newest_state()
        captured = _capture(state, tuple(tables), changes=False)
        return write(where, captured, keep, stands_back=False)


@contextlib.contextmanager
def _only_writer(store: CheckpointStore) -> Iterator[None]:
    """Hold the lock of the states if a stream keeps its own there."""
    if isinstance(store, LocalStore) and lock_file(store.root / JOURNAL).exists():
        with Lock(store.root / JOURNAL):
            yield
    else:
        yield


def package_version() -> str:
    try:
        return metadata.version("hotbed")
    except metadata.PackageNotFoundError:
        return "0"
