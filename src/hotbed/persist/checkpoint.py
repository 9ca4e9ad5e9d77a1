# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint: network, tables, optimizers, progress and their description.

Example:
    >>> state = State(network=network, tables=tables, optimizers={"dense": optimizer})
    >>> saved = save(path, state)
    >>> restore(open_checkpoint(path), state)

During training, `capture` takes the state between two steps, and a `Saver` writes it on another
thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hotbed.config import build, describe
from hotbed.connectors.live import SavedRows
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, PersistError, RankLost
from hotbed.files import Lock, Where, lock_file
from hotbed.optim.sparse import SparseOptimizer
from hotbed.parallel import WHOLE, Shard
from hotbed.persist.chain import compact
from hotbed.persist.format import CheckpointWriter, Reader, Saved, open_link
from hotbed.persist.manifest import (
    DENSE_FILE,
    PROGRESS_FILE,
    Arrays,
    DenseEntry,
    Manifest,
    PartEntry,
    ProgressEntry,
    TableEntry,
    encode,
    packed,
)
from hotbed.persist.network import (
    flatten,
    load_network,
    load_table_groups,
    network_misfit,
    network_tensors,
    set_rate,
    unflatten,
)
from hotbed.persist.open_rows import write_open_rows
from hotbed.persist.resume import Meaning, compare, meaning
from hotbed.persist.retention import retain
from hotbed.persist.store import JOURNAL, CheckpointStore, LocalStore, open_store
from hotbed.persist.tables import (
    CapturedRows,
    CapturedTable,
    LiveRows,
    check_rows,
    joined_scalars,
    load_table,
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


# --- saving -------------------------------------------------------------------------------------


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
        PersistError: a snapshot of a table is open, or a value cannot be saved; the message names
            it.
    """
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
    return CapturedTable(name, describe(table.config), len(table), rows)


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
        package_version=_package_version(),
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
    )
    return Capture(manifest, tensors, arrays, tables, changes, state.shard, state.open_rows)


def track_changes(tables: Iterable[Table]) -> bool:
    """Make every table track its changes; return False if a rule moves rows without gradients.

    The reason is logged. Every capture must then be a full.
    """
    try:
        for table in tables:
            table.track()
    except ConfigError as error:
        log.info("every checkpoint is a full: %s", error)
        return False
    return True


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
    if saved.kind == "full" and shard.is_first:
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
    totals = [(table.total, table.rows.scalars) for table in captured.tables]
    every = shard.gathered((files, parts, totals))
    tables = []
    for number, table in enumerate(captured.tables):
        candidates, sketch = write_waiting(writer, number, table, shard)
        counted = [totals[number] for _, _, totals in every]
        tables.append(
            TableEntry(
                name=table.name,
                config=dict(table.config),
                rows=sum(total for total, _ in counted),
                scalars=joined_scalars(table.name, [scalars for _, scalars in counted]),
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


def save(where: Where, state: State, keep: int = 1) -> Saved:
    """Write `state` as the newest checkpoint under `where`, a full.

    The changes that tables track stay tracked.

    Args:
        where: a path or URL.
        state: the state.
        keep: number of fulls that are kept.

    Raises:
        PersistError: the disk refuses, a running stream keeps its states there, or a value cannot
            be saved. The state that was newest stays so.
        FormatError: CURRENT is torn, or missing next to states.
    """
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


def _package_version() -> str:
    try:
        return metadata.version("hotbed")
    except metadata.PackageNotFoundError:
        return "0"


# --- restoring ----------------------------------------------------------------------------------


def restore(reader: Reader, state: State, allow: Sequence[str] = ()) -> None:
    """Load a checkpoint into network, tables and optimizers, which were built alike.

    Every file is checked before anything changes. `reader.progress` and `reader.random` are for
    the caller.

    Args:
        reader: the checkpoint.
        state: the network, tables and optimizers to load.
        allow: names of fields that may differ although the state means something else with them;
            see docs/persist.md.

    Raises:
        FormatError: a file is bad; the message names it.
        PersistError: a field, parameter, table or optimizer does not fit; the message names it.
    """
    shard = state.shard
    check_one_state(reader, shard.gathered(reader.manifest.digest))
    with shard.together():
        tensors, accepted = _checked(reader, state, allow)
    with shard.together():
        if state.network is not None:
            load_network(state.network, tensors)
        for name in reader.table_names:
            load_table(reader, name, state.tables[name], shard)
        _load_optimizers(reader, state, tensors, accepted)
    every = shard.gathered([len(state.tables[name]) for name in reader.table_names])
    for name, counts in zip(reader.table_names, zip(*every, strict=True), strict=True):
        check_rows(reader.newest_link, name, sum(counts))


def check_one_state(reader: Reader, digests: Sequence[str]) -> None:
    """Raise PersistError if the digests of the states that several processes opened differ."""
    if any(digest != digests[0] for digest in digests):
        raise PersistError(
            f"{reader.folder}: all ranks must read one state, got digests "
            f"{[digest[:12] for digest in digests]}. Give each rank the same path, in a folder "
            "that they share."
        )


def _checked(
    reader: Reader, state: State, allow: Sequence[str]
) -> tuple[Mapping[str, Tensor], set[str]]:
    """Check all that will be loaded; return the tensors, and the names of accepted changes."""
    folder = reader.folder
    if reader.manifest.contents == "values":
        raise PersistError(
            f"{folder}: expected a state, got published values. Give the path that training saves "
            "to."
        )
    reader.verify(state.shard.owned)
    if set(reader.table_names) != set(state.tables):
        raise PersistError(
            f"{folder}: it has tables {sorted(reader.table_names)}, got a network with "
            f"{sorted(state.tables)}. Build the network as it was when it was saved."
        )
    tensors = _loaded_tensors(reader)

    def misfit() -> str:
        return _misfit(reader, state, tensors)

    accepted = compare(folder, *_meanings(reader, state), allow, misfit)
    if reason := misfit():
        raise PersistError(
            f"{folder}: the model has other shapes, got this: {reason}. Build it as it was when it "
            "was saved."
        )
    for entry in reader.manifest.tables:
        state.tables[entry.name].check_clock(entry.scalars)
    return tensors, accepted


def _load_optimizers(
    reader: Reader, state: State, tensors: Mapping[str, Tensor], accepted: set[str]
) -> None:
    dense = reader.manifest.dense
    optimizers: Mapping[str, Any] = {} if dense is None else dense.optimizers
    for name, optimizer in state.optimizers.items():
        if optimizer is not None and name in optimizers:
            try:
                _load_optimizer(optimizer, name, tensors, optimizers[name], accepted)
            except PersistError as error:
                raise PersistError(f"{reader.folder}: {error}") from error


def _misfit(reader: Reader, state: State, tensors: Mapping[str, Tensor]) -> str:
    """Return which table or parameter has another shape than the checkpoint's; "" for none."""
    for entry in reader.manifest.tables:
        table = state.tables[entry.name]
        if table.dim != entry.config["dim"]:
            return f"table {entry.name!r} has dim {entry.config['dim']} there, and {table.dim} here"
        if describe(table.rule) == entry.config["rule"]:
            continue
        width = build(entry.config, Table, f"tables.{entry.name}").state_width
        if table.state_width != width:
            return (
                f"a row of table {entry.name!r} has {width} numbers of optimizer state there, and "
                f"{table.state_width} here"
            )
    if state.network is None:
        return ""
    return network_misfit(state.network, state.rows, tensors)


def _meanings(reader: Reader, state: State) -> tuple[Meaning, Meaning]:
    """Return what the checkpoint means, and what `state` does.

    Parts that one of them does not describe are left out of both.
    """
    manifest = reader.manifest
    configs = {entry.name: entry.config for entry in manifest.tables}
    schema = None if state.schema is None else manifest.schema
    model = None if state.model is None else manifest.model
    own_configs = {name: describe(table.config) for name, table in state.tables.items()}
    own_schema = None if schema is None else state.schema
    own_model = None if model is None else state.model
    return meaning(configs, schema, model), meaning(own_configs, own_schema, own_model)


def _loaded_tensors(reader: Reader) -> dict[str, Tensor]:
    data = reader.dense()
    if not data:
        return {}
    # clones lie where torch's allocator aligns them: with other alignments kernels may give other
    # last bits
    tensors = safetensors.torch.load(bytes(data))
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    name: str,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    accepted: set[str],
) -> None:
    """Load the state of an optimizer; learning rates in `accepted` stay as they were built."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if isinstance(optimizer, SparseOptimizer):
        load_table_groups(optimizer, plain)
    else:
        unflatten(optimizer, name, tensors, plain)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        fields = [f"tables.{table}.rule.lr" for table in group.get("tables", ())]
        if accepted.intersection(fields or ["optimizer.lr"]):
            set_rate(group, rate)


def warm_start_network(network: nn.Module, checkpoint: Reader, names: Mapping[str, str]) -> None:
    """Load parameters and buffers of another job's network into a network of this one.

    Args:
        network: the network of this job.
        checkpoint: the state of the other job.
        names: names of parameters here to names there.

    Raises:
        PersistError: a name is unknown, or a shape differs; nothing has changed.
        FormatError: the file is bad; nothing has changed.
    """
    targets = dict(network.named_parameters()) | dict(network.named_buffers())
    tensors = _loaded_tensors(checkpoint)
    sources = {here: tensors.get(f"network/{there}") for here, there in names.items()}
    for here, there in names.items():
        source = sources[here]
        if here not in targets or source is None or source.shape != targets[here].shape:
            raise PersistError(
                f"warm start: parameter {here!r} takes one of its shape, "
                f"{_shape_of(targets.get(here))}, got {there!r} of {_shape_of(source)}. "
                "Leave it out."
            )
    with torch.no_grad():
        for here, source in sources.items():
            assert source is not None
            targets[here].copy_(source)


def _shape_of(tensor: Tensor | None) -> list[int] | str:
    return "nothing" if tensor is None else list(tensor.shape)


# --- on another thread --------------------------------------------------------------------------


class Saver:
    """Writes captures under one path, one at a time, each on a thread of its own.

    A save that fails raises PersistError at the next `submit` or `wait`. The last good state stays
    the newest, and the next capture has to be a full.

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
        """Whether the next capture has to be a full: it is the first, or the last save failed."""
        writing = self._writing
        if writing is None:
            return self._failed or self._last is None
        has_failed = writing.done() and writing.exception() is not None
        return self._failed or has_failed

    def submit(self, captured: Capture, *, merges: bool = False) -> None:
        """Write `captured` on a thread; wait first if another capture is still being written.

        `merges`: make a full of changes and of the files before them.

        Raises:
            PersistError: the save before failed, or a full is needed and this is a capture of
                changes. `captured` is closed.
        """
        try:
            self.wait()
            if captured.changes and self.needs_full:
                raise PersistError(
                    f"{self._where}: a full is needed first, got a capture of changes. "
                    "Capture with changes=not saver.needs_full."
                )
        except BaseException:
            captured.close(saved=False)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-saver")
        work = write_merged if merges else write
        self._writing = self._thread.submit(work, self._where, captured, self._keep, self._last)
        self._thread.shutdown(wait=False)  # it ends with the save

    def wait(self) -> Saved | None:
        """Return the last checkpoint once nothing is being written; None before the first.

        Raises:
            PersistError: the save failed.
            RankLost: another process is gone, or stands still.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            self._failed = True  # until there is a result
            try:
                self._last = writing.result()
            except (PersistError, RankLost):
                raise
            except Exception as error:
                raise PersistError(
                    f"{self._where}: not saved, got {error!r}. The last good state stays newest."
                ) from error
            finally:
                self._thread.shutdown()
            self._failed = False
        return self._last
