# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint: network, tables, optimizers, progress and their description, in the
container of `format`.

saved = save(path, State(network=network, tables=tables, optimizers={"dense": optimizer}))
restore(open_checkpoint(path), State(network=network, tables=tables, optimizers={"dense":
optimizer}))

While training goes on: `capture` the state between two steps, and let a `Saver` write it on another
thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hotbed.config import describe
from hotbed.embedding.table import Table
from hotbed.errors import PersistError
from hotbed.files import Lock, Where, lock_file
from hotbed.optim.sparse import SparseOptimizer
from hotbed.persist.chain import retain
from hotbed.persist.format import CheckpointWriter, Reader, Saved, open_link
from hotbed.persist.manifest import DENSE_FILE, PROGRESS_FILE, Arrays, encode, packed
from hotbed.persist.network import (
    flatten,
    load_network,
    load_table_groups,
    network_tensors,
    set_rate,
    unflatten,
)
from hotbed.persist.resume import Meaning, compare, meaning
from hotbed.persist.store import JOURNAL, CheckpointStore, LocalStore, open_store
from hotbed.persist.tables import CapturedTable, LiveRows, load_table, write_table

log = logging.getLogger("hotbed.persist")


@dataclass(frozen=True)
class State:
    """Everything a checkpoint holds.

    `tables` by name; `optimizers` by name, None = there is none; `rows` = parameters of `network`
    that are rows of tables, which are saved with the tables instead; `progress` = nested dicts and
    lists with numbers, text and NumPy arrays (callbacks, metrics, the run); `random` = states of
    torch's generators by name. The rest is plain JSON, see docs/format.md.
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
    version: int = 0
    parent: str | None = None


@dataclass(frozen=True)
class Capture:
    """A state at one moment, to be written while training goes on. `write` closes it; else call
    `close(saved=False)`.
    """

    members: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    optimizers: Mapping[str, Any] | None
    progress: Mapping[str, Any]
    arrays: Arrays
    tables: tuple[CapturedTable, ...]
    changes: bool

    def close(self, saved: bool) -> None:
        """End the snapshots; not `saved`: the next capture of changes holds these changes too."""
        for table in self.tables:
            table.rows.close(saved)


def capture(state: State, changes: bool = False) -> Capture:
    """The state of this moment. Call it between two steps, on the thread that trains; it copies the
    dense part only.

    `changes`: of tables only rows that changed or went since the last capture that was saved; every
    table must `track`. Raises PersistError where a snapshot of a table is open, or where something
    cannot be saved, naming it.
    """
    with contextlib.ExitStack() as undo:
        tables = []
        for name, table in sorted(state.tables.items()):
            rows = table.snapshot(changes=changes)
            undo.callback(rows.close, saved=False)
            tables.append(CapturedTable(name, describe(table.config), len(table), rows))
        captured = _capture(state, tuple(tables), changes=changes)
        undo.pop_all()
    return captured


def write(where: Where, captured: Capture, keep: int = 1, parent: Saved | None = None) -> Saved:
    """Write a capture as the newest checkpoint under `where` and close it.

    `keep`: fulls that stay, each with the deltas on it. `parent`: the checkpoint that it descends
    from, needed for a capture of changes, which becomes a delta on it; else `State.parent` counts.
    Raises PersistError when the disk refuses or the parent is gone; what was newest before then
    stays so, and the changes are held by the next capture.
    """
    saved = False
    try:
        with CheckpointWriter(where) as writer:
            done = _write(writer, captured, parent)
        saved = True
    finally:
        captured.close(saved)
    if done.kind == "full":
        try:
            retain(writer.store, keep)
        except (PersistError, OSError) as error:
            log.warning("%s: older checkpoints stay: %s", where, error)
    return done


def save(where: Where, state: State, keep: int = 1) -> Saved:
    """Write `state` as the newest checkpoint under `where` (a path or URL), a full; `keep` = fulls
    that stay.

    What tables track is left alone. Raises PersistError when the disk refuses, where a stream that
    runs keeps its states, or when optimizer state is neither a tensor nor JSON; what was newest
    before then stays so. Raises FormatError where CURRENT is torn, or missing beside states.
    """
    tables = [
        CapturedTable(name, describe(t.config), len(t), LiveRows(t))
        for name, t in sorted(state.tables.items())
    ]
    store = open_store(where)
    with _only_writer(store):
        store.newest_state()  # raises where CURRENT is torn or lost: retention would remove the states
        return write(where, _capture(state, tuple(tables), changes=False), keep)


@contextlib.contextmanager
def _only_writer(store: CheckpointStore) -> Iterator[None]:
    """Hold the lock of the states where a stream keeps its own there."""
    if isinstance(store, LocalStore) and lock_file(store.root / JOURNAL).exists():
        with Lock(store.root / JOURNAL):
            yield
    else:
        yield


def restore(reader: Reader, state: State, allow: Sequence[str] = ()) -> None:
    """Load a checkpoint into the network, tables and optimizers of `state`, which were built alike.

    `reader.progress` and `reader.random` are for the caller. Every file is checked before anything
    changes. `allow`: names of fields that may differ although the state means something else with
    them; see docs/persist.md. Raises FormatError naming a bad file, PersistError naming the field,
    parameter, table or optimizer that the checkpoint does not fit.
    """
    if reader.manifest.get("contents") == "values":
        raise PersistError(
            f"{reader.folder}: published values, not a state — received contents 'values' — give "
            "the path that "
            "training saves to"
        )
    reader.verify()
    saved = {entry["name"]: entry for entry in reader.manifest["tables"]}
    if set(saved) != set(state.tables):
        raise PersistError(
            f"{reader.folder}: it has tables {sorted(saved)} — received a network with "
            f"{sorted(state.tables)} — build the network as it was when it was saved"
        )
    accepted = compare(reader.folder, *_meanings(reader, state), allow)
    loaded = safetensors.torch.load(bytes(reader.dense())) if reader.dense() else {}
    # clones lie where torch's allocator aligns them: kernels may give other last bits for other
    # alignments
    tensors = {name: tensor.clone() for name, tensor in loaded.items()}
    if state.network is not None:
        load_network(reader.folder, state.network, state.rows, tensors)
    for name in saved:
        load_table(reader, name, state.tables[name])
    optimizers = (reader.manifest["dense"] or {"optimizers": {}})["optimizers"]
    for name, optimizer in state.optimizers.items():
        if optimizer is None or name not in optimizers:
            continue
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            if isinstance(optimizer, SparseOptimizer):
                load_table_groups(optimizer, optimizers[name])
            else:
                unflatten(optimizer, name, tensors, optimizers[name])
        except PersistError as error:
            raise PersistError(f"{reader.folder}: {error}") from error
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            fields = [f"tables.{table}.rule.lr" for table in group.get("tables", ())] or [
                "optimizer.lr"
            ]
            if accepted.intersection(fields):
                set_rate(group, rate)


def _meanings(reader: Reader, state: State) -> tuple[Meaning, Meaning]:
    """What the checkpoint means, and what `state` does; parts that `state` does not describe are
    left out.
    """
    manifest = reader.manifest
    configs = {entry["name"]: entry["config"] for entry in manifest["tables"]}
    schema = None if state.schema is None else manifest["schema"]
    model = None if state.model is None else manifest["model"]
    own_configs = {name: describe(table.config) for name, table in state.tables.items()}
    own_schema = None if schema is None else state.schema
    own_model = None if model is None else state.model
    return meaning(configs, schema, model), meaning(own_configs, own_schema, own_model)


class Saver:
    """Writes captures under one path, one at a time, each on a thread of its own.

    `submit` hands a capture over and returns; `busy` tells whether one is being written; `wait`
    returns the last checkpoint on disk. A save that failed raises PersistError at the next `submit`
    or `wait`; the last good state stays newest, and the next capture has to be a full
    (`needs_full`).

    Example:
        >>> saver = Saver("model", keep=2)
        >>> if not saver.busy:
        ...     saver.submit(capture(state, changes=not saver.needs_full))
        >>> saved = saver.wait()
    """

    def __init__(self, where: Where, keep: int = 1) -> None:
        self._where = where
        self._keep = keep
        self._writing: Future[Saved] | None = None
        self._last: Saved | None = None
        self._failed = False

    @property
    def busy(self) -> bool:
        """Whether a capture is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def needs_full(self) -> bool:
        """Whether the next capture has to be a full: nothing was saved yet, or the last save
        failed.
        """
        failed = (
            self._writing is not None
            and self._writing.done()
            and self._writing.exception() is not None
        )
        return self._failed or failed or (self._last is None and self._writing is None)

    def submit(self, captured: Capture) -> None:
        """Write `captured` on the thread; waits where another is still being written.

        Raises PersistError for a failure of the save before, or for changes where a full is needed;
        `captured` is closed.
        """
        try:
            self.wait()
            if captured.changes and self.needs_full:
                raise PersistError(
                    f"{self._where}: a full is needed first — received a capture of changes — "
                    "capture with changes=not saver.needs_full"
                )
        except BaseException:
            captured.close(saved=False)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-saver")
        self._writing = self._thread.submit(write, self._where, captured, self._keep, self._last)
        self._thread.shutdown(wait=False)  # it ends with the save

    def wait(self) -> Saved | None:
        """The last checkpoint on disk, once nothing is being written; None before the first. Raises
        what a save raised.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            self._failed = True  # until the result says otherwise
            try:
                self._last = writing.result()
            except PersistError:
                raise
            except Exception as error:
                raise PersistError(
                    f"{self._where}: not saved — {error!r} — the last good state stays newest"
                ) from error
            finally:
                self._thread.shutdown()
            self._failed = False
        return self._last


def _capture(state: State, tables: tuple[CapturedTable, ...], *, changes: bool) -> Capture:
    tensors = {} if state.network is None else network_tensors(state.network, state.rows)
    optimizers: dict[str, Any] = {}
    for name, optimizer in state.optimizers.items():
        if optimizer is not None:
            found, optimizers[name] = flatten(optimizer, name)
            tensors |= found
    tree, arrays = encode(state.progress, "progress")
    random, states = encode(
        {name: one.cpu().numpy() for name, one in state.random.items()}, "random"
    )
    members = {
        "package_version": _package_version(),
        "contents": "state",
        "version": state.version,
        "parent": state.parent,
        "model": state.model,
        "schema": state.schema,
        "positions": dict(state.positions),
        "counters": dict(state.counters),
    }
    progress = {"tree": tree, "random": random}
    dense = None if state.network is None else optimizers
    return Capture(members, tensors, dense, progress, {**arrays, **states}, tables, changes)


def _write(writer: CheckpointWriter, captured: Capture, parent: Saved | None) -> Saved:
    if captured.changes:
        _check_chain(writer, parent)
    if captured.tensors:
        writer.write(DENSE_FILE, safetensors.torch.save(dict(captured.tensors)))
    if captured.arrays:
        writer.write(PROGRESS_FILE, packed(captured.arrays))
    tables = [write_table(writer, number, table) for number, table in enumerate(captured.tables)]
    chain = parent.chain if captured.changes and parent is not None else ()
    kind = "delta" if captured.changes else "full"
    dense = captured.optimizers
    progress = captured.progress
    members = {
        **captured.members,
        "kind": kind,
        "parent": captured.members["parent"] if parent is None else parent.digest,
        "chain": list(chain),
        "dense": None
        if dense is None
        else {"file": DENSE_FILE if captured.tensors else None, "optimizers": dense},
        "progress": {"file": PROGRESS_FILE if captured.arrays else None, **progress}
        if any(progress.values())
        else None,
        "tables": tables,
    }
    return writer.commit(members)


def _check_chain(writer: CheckpointWriter, parent: Saved | None) -> None:
    """A delta must never become newest without what it rests on."""
    for link in () if parent is None else parent.chain:
        if open_link(writer.store, link["folder"]).manifest["digest"] != link["digest"]:
            raise PersistError(
                f"{writer.store.place(link['folder'])}: a delta rests on it, but it is another "
                "checkpoint — "
                "received another digest — save a full"
            )
    if parent is None:
        raise PersistError(
            "write: a capture of changes needs the checkpoint that they follow — received "
            "parent=None — "
            "save a full first"
        )


def _package_version() -> str:
    try:
        return metadata.version("hotbed")
    except metadata.PackageNotFoundError:
        return "0"
