# SPDX-License-Identifier: Apache-2.0
"""Files of a table: its keys and vectors, and their optimizer state.

Up to v3.0.1 a table is one file of records: the key (uint32 or int64), the slot (uint64, of
localized embeddings only), the vector. From v3.1 on it is a folder with the files `key` (int64),
`slot_id` (uint64, of localized embeddings only) and `emb_vector`. Vectors are float32.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hotbed.compat.hugectr.weights.arrays import FLOAT, INT64, check_size, file_size, read_array
from hotbed.compat.hugectr.weights.gathered import Rows
from hotbed.compat.hugectr.weights.rows import (
    batches,
    check_finite,
    check_keys,
    check_read,
    check_squares,
    lists_of,
    rows_of,
    warn_of_sums,
)
from hotbed.compat.hugectr.weights.slots import SlotsOfKeys
from hotbed.embedding import rule as rules
from hotbed.embedding.table import Table
from hotbed.errors import FormatError
from hotbed.files import new_file

log = logging.getLogger("hotbed.compat.hugectr")

UINT64 = np.dtype("<u8")
_MOST_SLOTS = 1 << 16
"""No embedding has as many slots."""
_TINY = 1e-18
_HUGE = 1e18
"""A weight that is not 0 lies between them."""
_SAMPLE = 65_536
"""Rows that show how a file is to be read."""


@dataclass(frozen=True)
class SparseFile:
    """The format of a table's file.

    Attributes:
        form: "folder" from v3.1 on, "file" up to v3.0.1.
        localized: whether each row has the number of its slot.
        i64: whether the keys of a file have 64 bits; a folder's always have.
        offsets: the first id of each slot, from which the slot of a row follows; empty if slots
            share ids.
        seen: the slots of such ids; without it they are of slot 0.
        keys: the keys that `slot_size_array` gives the table; None = any.
        keeps_times: whether a file of states holds the step of each row's last update.
    """

    form: Literal["folder", "file"] = "folder"
    localized: bool = False
    i64: bool = True
    offsets: Sequence[int] = ()
    seen: SlotsOfKeys | None = None
    keys: range | None = None
    keeps_times: bool = False

    def record(self, dim: int) -> np.dtype[Any]:
        """Return the record of a file with vectors of `dim`."""
        fields: list[Any] = [("key", "<i8" if self.i64 else "<u4")]
        if self.localized:
            fields.append(("slot_id", UINT64))
        return np.dtype([*fields, ("vector", FLOAT, (dim,))])

    def slots(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Return the slot of each id, uint64 [n]."""
        if not any(self.offsets) and self.seen is not None:
            return self.seen.of(ids).astype(UINT64)
        if not any(self.offsets):
            return np.zeros(len(ids), UINT64)
        return np.searchsorted(self.offsets[1:], ids, side="right").astype(UINT64)


def save_sparse(path: str | Path, table: Rows, format: SparseFile) -> None:
    """Write the rows of a table.

    Raises:
        FormatError: a key does not fit 32 bits.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if format.form == "file":
        record = format.record(table.dim)
        with new_file(path) as file:
            for ids, vectors in rows_of(table):
                check_keys(path, ids, i64=format.i64)
                records = np.empty(len(ids), record)
                records["key"] = ids
                records["vector"] = vectors
                if format.localized:
                    records["slot_id"] = format.slots(ids)
                file.write(records.tobytes())
        return
    path.mkdir(exist_ok=True)
    with new_file(path / "key") as keys, new_file(path / "emb_vector") as values:
        for ids, vectors in rows_of(table):
            keys.write(ids.astype(INT64).tobytes())
            values.write(vectors.astype(FLOAT).tobytes())
    if format.localized:
        with new_file(path / "slot_id") as slots:
            for ids, _ in rows_of(table):
                slots.write(format.slots(ids).tobytes())


def load_sparse(path: str | Path, table: Table, format: SparseFile) -> int:
    """Read the rows of a table and return their number.

    Rows that the table has already are overwritten. A folder is read as such, a file as a file.
    Slots are not needed; `format.seen` keeps them.

    Raises:
        PersistError: there is no such file.
        FormatError: a file does not have the size of its rows, its keys or slots have another
            width or kind, or a key comes twice. Nothing has changed.
    """
    keys, vectors = _read(Path(path), table.dim, format)
    if not len(keys):
        log.warning("%s: no rows, so that the ids of table %r have none", path, table.name)
    table.load(batches(keys, vectors))
    if format.localized and format.seen is not None:
        format.seen.keep(keys, _slots(Path(path), table.dim, format))
    return len(keys)


def load_served(path: str | Path, table: Table, format: SparseFile) -> None:
    """Read the rows of a table that is served.

    Raises:
        PersistError, FormatError: as `load_sparse`, and also if the file has no rows.
    """
    if not load_sparse(path, table, format):
        raise FormatError(
            f"{path}: expected the rows of a table, got none: every key would read the default "
            "value. Give the file of a trained model, written to its end."
        )


def save_sparse_states(
    path: str | Path, table: Rows, format: SparseFile, lr: float | None = None
) -> None:
    """Write the optimizer state of a table: each kind of state of all rows, in their order.

    With the update type LazyGlobal the step of each row's last update follows: one uint64 for each
    lane, as in HugeCTR's memory. HugeCTR does not read this part.

    Args:
        path: of the file.
        table: whose state it is.
        format: of its rows.
        lr: the current learning rate of the table; None = that of the rule. HugeCTR stores its
            momentum with this factor, and a rule without `lr_inside` stores it without.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    dim = table.dim
    with new_file(path) as file:
        for state in range(_num_states(table)):
            for batch in table.export():
                states = lists_of(batch.column("state"), table.state_width)
                block = states[:, state * dim : (state + 1) * dim]
                if _has_momentum(table):
                    block = rules.velocity(block, _rate(table, lr))
                file.write(np.ascontiguousarray(block, FLOAT).tobytes())
        if format.keeps_times and table.step:
            for batch in table.export():
                times = batch.column("updated").to_numpy().astype(UINT64)
                file.write(np.repeat(times, dim).tobytes())


def load_sparse_states(
    path: str | Path,
    sparse_path: str | Path,
    table: Table,
    format: SparseFile,
    lr: float | None = None,
) -> None:
    """Read the optimizer state of the rows in `sparse_path`, and these rows themselves.

    State i belongs to key i, as where HugeCTR loads a model on one GPU. A file of HugeCTR holds
    the state of its whole memory: places behind the last key are left out.

    Args:
        path: of the state.
        sparse_path: of the rows.
        table: takes both.
        format: of the rows.
        lr: the current learning rate of the table; None = that of the rule. HugeCTR stores its
            momentum with this factor, and a rule without `lr_inside` stores it without.

    Raises:
        PersistError: there is no such file.
        FormatError: the sizes do not fit. Nothing has changed.
        ConfigError: the rule has momentum, and the rate is 0.
    """
    path = Path(path)
    num_states = _num_states(table)
    keys, vectors = _read(Path(sparse_path), table.dim, format)
    if not num_states:
        check_size(path, 0, f"the state of {type(table.rule).__name__}")
        return
    dim = table.dim
    row_bytes = num_states * dim * FLOAT.itemsize
    times = None
    if format.keeps_times:
        times = _times(path, row_bytes * len(keys), len(keys), dim)
    num_places = len(keys) if times is not None else _places(path, row_bytes, len(keys))
    states: Any = None
    if num_places:
        states = np.memmap(path, FLOAT, "r", shape=(num_states, num_places, dim))
        for number in range(num_states):
            check_finite(path, states[number, : len(keys)])
        if not _has_momentum(table):  # of Adam v, of Ftrl n, the only one of the others
            place = 1 if isinstance(table.rule, rules.Adam) else 0
            check_squares(path, states[place, : len(keys)])
    if num_places and _has_momentum(table):
        warn_of_sums(path, states[0, : len(keys)])
        states = rules.momentum_of(states, _rate(table, lr))
    missed = None
    if times is not None:
        step = int(times.max())
        table.load_scalars({**table.scalars(), "step": step})
        missed = step - times
    table.load(batches(keys, vectors, states, missed))


# --- parts ----------------------------------------------------------------------------------------


def _read(path: Path, dim: int, format: SparseFile) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return keys [n] and vectors [n, dim] of a table, mapped."""
    if path.is_dir():
        keys = read_array(path / "key", INT64, "keys")
        size = len(keys) * dim * FLOAT.itemsize
        check_size(path / "emb_vector", size, f"{len(keys)} vectors of {dim}")
        if format.localized or (path / "slot_id").exists():
            check_size(path / "slot_id", len(keys) * UINT64.itemsize, f"{len(keys)} slots")
        vectors = read_array(path / "emb_vector", FLOAT, "numbers").reshape(-1, dim)
        check_finite(path / "emb_vector", vectors)
    else:
        _check_slots(path, dim, format)
        _check_width(path, dim, format)
        localized = format.localized
        what = "rows of a key, a slot and a vector" if localized else "rows of key and vector"
        records = read_array(path, format.record(dim), what)
        keys = records["key"]
        vectors = records["vector"]
        check_finite(path, vectors)
    check_read(path, keys, format.keys)
    return keys, vectors


def _slots(path: Path, dim: int, format: SparseFile) -> NDArray[Any]:
    """Return the slots of the rows of a localized embedding."""
    if path.is_dir():
        return read_array(path / "slot_id", UINT64, "slots")
    return read_array(path, format.record(dim), "rows")["slot_id"]


def _check_slots(path: Path, dim: int, format: SparseFile) -> None:
    """Raise FormatError if the rows of a file have slots and should not, or the other way round.

    A file does not say it. But where slots would stand, rows without them have parts of keys and
    vectors, which are large as whole numbers.
    """
    for i64 in (format.i64, not format.i64):
        records = _records(path, dim, replace(format, localized=True, i64=i64))
        if records is None:
            continue
        largest = records["slot_id"].max()
        if format.localized and i64 == format.i64 and largest >= _MOST_SLOTS:
            raise FormatError(
                f"{path}: expected rows of a localized embedding with the number of a slot, got "
                f"{largest} in its place. Make it a distributed embedding, or give its own file."
            )
        is_here = largest < _MOST_SLOTS and not _num_odd(records) and _has_weights(records)
        if is_here and not format.localized:
            raise FormatError(
                f"{path}: expected rows of a distributed embedding, got the number of a slot in "
                "each row. Make it a localized embedding, or give its own file."
            )


def _check_width(path: Path, dim: int, format: SparseFile) -> None:
    """Raise FormatError if the keys of a file have the other width.

    A file does not say it, and one of 17 n rows of 72 bytes is one of 18 n rows of 68. But rows
    that are read in the wrong width have keys among their vectors, which as numbers are tiny or
    huge. Keys that are not have 64 bits where each upper half is 0, and 32 where one is not.
    """
    other = replace(format, i64=not format.i64)
    here = _records(path, dim, format)
    there = _records(path, dim, other)
    if here is None or there is None:
        return
    num_odd = {format.i64: _num_odd(here), other.i64: _num_odd(there)}
    long_keys = (here if format.i64 else there)["key"][:_SAMPLE]
    are_short = not (long_keys >> 32).any()
    if num_odd[True] != num_odd[False]:
        is_long = num_odd[True] < num_odd[False]
    else:
        is_long = are_short and len(np.unique(long_keys)) == len(long_keys)
    if is_long != format.i64 and _has_weights(here):
        bits = 64 if is_long else 32
        raise FormatError(
            f"{path}: expected keys of {96 - bits} bits, got a file whose {len(there)} rows have "
            f"keys of {bits}. Set i64_input_key={is_long}, or input_key_type to I{bits} in JSON."
        )


def _records(path: Path, dim: int, format: SparseFile) -> NDArray[Any] | None:
    """Return the rows of a file, mapped; None if it is empty or does not have their size."""
    record = format.record(dim)
    size = file_size(path)
    if not size or size % record.itemsize:
        return None
    return np.memmap(path, record, "r")


def _has_weights(records: NDArray[Any]) -> bool:
    """Return whether a vector of the first rows is not zero; rows of zeros show nothing."""
    return bool(np.count_nonzero(records[:_SAMPLE]["vector"].view(np.uint32)))


def _num_odd(records: NDArray[Any]) -> int:
    """Return how many numbers of the first rows cannot be weights, and how many not slots."""
    first = records[:_SAMPLE]
    values = first["vector"]
    with np.errstate(invalid="ignore"):  # NaN is not a weight
        is_above = (values > _TINY) & (values < _HUGE)
        is_below = (values < -_TINY) & (values > -_HUGE)
        num_weights = np.count_nonzero(is_above | is_below | (values == 0))
    num_odd = values.size - int(num_weights)
    if "slot_id" in (records.dtype.names or ()):
        num_odd += int(np.count_nonzero(first["slot_id"] >= _MOST_SLOTS))
    return num_odd


def _times(path: Path, first: int, num_keys: int, dim: int) -> NDArray[Any] | None:
    """Return the step of the last update of each row; None if the file does not hold them.

    A file of HugeCTR with twice as many places as keys has the same size. Its last half is numbers
    of v, which are not steps: as whole numbers they are 0 or have more than 32 bits.

    Args:
        path: of the states.
        first: where the steps begin.
        num_keys: number of rows.
        dim: steps of each row, all of them the same.
    """
    if not num_keys or file_size(path) != first + num_keys * dim * UINT64.itemsize:
        return None
    times = np.memmap(path, UINT64, "r", first, (num_keys, dim))
    if times.min() < 1 or times.max() >= 2**32:
        return None
    return times[:, 0]


def _places(path: Path, row_bytes: int, num_keys: int) -> int:
    """Return the rows that a file of states has room for.

    Raises:
        FormatError: they are fewer than the keys, or bytes are left over.
    """
    size = file_size(path)
    num_places, rest = divmod(size, row_bytes)
    if rest or num_places < num_keys:
        raise FormatError(
            f"{path}: expected {row_bytes} bytes of state for each of {num_keys} rows, got {size} "
            "bytes. Give the state of this very table."
        )
    if num_places > num_keys:
        log.warning(
            "%s: it holds %d places for %d keys, and does not say which is whose; place i is "
            "taken for key i, as HugeCTR loads it",
            path,
            num_places,
            num_keys,
        )
    return num_places


def _num_states(table: Rows) -> int:
    """Return the kinds of state of a row."""
    return len(range(0, table.state_width, table.dim))


def _has_momentum(table: Rows) -> bool:
    """Return whether the state is momentum, which HugeCTR keeps times -lr."""
    return isinstance(table.rule, (rules.Momentum, rules.Nesterov))


def _rate(table: Rows, lr: float | None) -> float:
    """Return the learning rate that HugeCTR's momentum contains, and the table's does not."""
    rule = table.rule
    if isinstance(rule, (rules.Momentum, rules.Nesterov)) and rule.lr_inside:
        return 1.0
    return rule.lr if lr is None else lr
