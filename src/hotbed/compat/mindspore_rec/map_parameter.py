# SPDX-License-Identifier: Apache-2.0
"""MapParameter: a table of MindSpore's kind, from integer keys to values, as a torch module."""

from __future__ import annotations

import logging
import math
import numbers
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from hotbed import checks
from hotbed.compat.mindspore_rec.no_effect import ARGUMENTS
from hotbed.compat.mindspore_rec.tensor import Tensor, with_asnumpy
from hotbed.config import did_you_mean
from hotbed.data.batch import Ids, as_ids
from hotbed.embedding.changed_rows import ChangeReader, Changes
from hotbed.embedding.hashing import partition
from hotbed.embedding.init import Constant, Init, Normal, Uniform, Zeros
from hotbed.embedding.modules import Embedding
from hotbed.embedding.policy import ADMISSION_BYTES, MinCount, Ttl
from hotbed.embedding.rule import Rule
from hotbed.embedding.table import Table
from hotbed.embedding.tier import Ram, Ssd, Tier
from hotbed.errors import ConfigError, RowShapeError
from hotbed.files import local_path
from hotbed.optim.modes import in_eval_mode
from hotbed.parallel import at

log = logging.getLogger("hotbed.compat.mindspore_rec")
UNCHANGED = 0
MODIFIED = 1
ERASED = 2
NAME = "embedding_table"
"""The name of a table that was given none, until RecModel names it by its place in the network."""

_INITS: dict[str, Init] = {
    "normal": Normal(0.01),
    "zeros": Zeros(),
    "zero": Zeros(),
    "ones": Constant(1.0),
    "one": Constant(1.0),
    "uniform": Uniform(0.07),
}
_KEY_DTYPES = ("int32", "int64", torch.int32, torch.int64, np.int32, np.int64, None)
_VALUE_DTYPES = ("float32", torch.float32, np.float32, None)


class Exported(NamedTuple):
    """What `MapParameter.export_data` returns.

    Attributes:
        keys: int64 [n].
        values: float32, those of the first m keys, each of the value shape; erased keys have none.
        statuses: int32 [n]: 0 unchanged, 1 modified, 2 erased.
    """

    keys: NDArray[np.int64]
    values: NDArray[np.float32]
    statuses: NDArray[Any]


class MapParameter(nn.Module):
    """A parameter that maps integer keys to values, and grows with new keys.

    It is a torch module over one `hb.Table`: an attribute of your network, trained with it. All
    64-bit integers are keys, -1 and -2 too. Its signature is that of
    `mindspore.experimental.MapParameter`.

    Args:
        key_dtype: int32 or int64; without effect.
        value_dtype: float32.
        value_shape: of one value, a number or a tuple; default (1,).
        key_tensor: keys that are put at once, with `value_tensor`.
        value_tensor: their values.
        default_value: the start of a new key: "normal" (deviation 0.01), "zeros", "ones",
            "uniform", a number, or an initializer of hotbed.
        permit_filter_value: a key gets a value once it was looked up in so many batches.
        evict_filter_value: a key that was not looked up for so many steps is erased at the next
            `export_data` or `ModelCheckpoint`, or by `hb.callbacks.Evict`. A step is an update of
            the values; `get` alone makes none.
        name: of the table; None = its place in the network, given by `RecModel`.
        requires_grad: False: the values are not trained.
        rule: how a step changes the values, such as `hb.Adam(lr=1e-3)`; None = as the optimizer of
            `RecModel` does.
        admission_bytes: memory for the counts of keys that wait for `permit_filter_value`, see
            "Memory for ids that wait" in docs/embedding.md.
        vocab_cache_size: with `ssd_data_path`, the values that stay in memory.
        ssd_data_path: a folder on a local disk, where the other values lie (`hb.Ssd`), with the
            same results. None: all values stay in memory.

    Raises:
        ConfigError: (a ValueError) an argument is wrong.

    Example:
        >>> values = MapParameter(value_shape=3, default_value="zeros")
        >>> values.put(torch.tensor([1, 2]), torch.ones(2, 3))
        >>> values.get(torch.tensor([1, 7]))
    """

    def __init__(
        self,
        key_dtype: Any = None,
        value_dtype: Any = None,
        value_shape: int | Sequence[int] | None = None,
        key_tensor: Any = None,
        value_tensor: Any = None,
        default_value: Any = "normal",
        permit_filter_value: int = 1,
        evict_filter_value: int = sys.maxsize,
        name: str | None = None,
        requires_grad: bool = True,
        *,
        rule: Rule | None = None,
        admission_bytes: int = ADMISSION_BYTES,
        vocab_cache_size: int = 0,
        ssd_data_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        _check_dtype("MapParameter.key_dtype", key_dtype, _KEY_DTYPES, "Give int32 or int64.")
        _check_dtype("MapParameter.value_dtype", value_dtype, _VALUE_DTYPES, "Give float32.")
        checks.one_of("MapParameter.requires_grad", requires_grad, (True, False))
        if (key_tensor is None) != (value_tensor is None):
            raise ConfigError(
                "MapParameter: key_tensor and value_tensor belong together, got one of them. Give "
                "both, or neither."
            )
        if value_shape is None and value_tensor is not None:
            value_tensor = _values("MapParameter.value_tensor", value_tensor)
            value_shape = value_tensor.shape[1:]
        self.value_shape = (1,) if value_shape is None else _shape(value_shape)
        self.key_dtype = torch.int32 if key_dtype is None else key_dtype
        self.value_dtype = torch.float32 if value_dtype is None else value_dtype
        self.default_value = default_value
        self.permit_filter_value = permit_filter_value
        self.evict_filter_value = evict_filter_value
        self._has_own_name = name is not None
        self._has_own_rule = rule is not None
        self._memory: dict[str, Any] = {
            "admission_bytes": admission_bytes,
            "vocab_cache_size": vocab_cache_size,
            "ssd_data_path": ssd_data_path,
        }
        table = _table(
            NAME if name is None else name,
            self.value_shape,
            default_value,
            _admission(permit_filter_value, evict_filter_value, admission_bytes),
            evict_filter_value,
            rule,
            tier_of("MapParameter", vocab_cache_size, ssd_data_path),
        )
        self.embedding = Embedding(table)
        self.reader = ChangeReader(table, own_rows=True)
        self._lookups = (0, 0)  # the step of the table, and the lookups that count since then
        table.requires_grad_(requires_grad)
        if key_tensor is not None:
            self.put(key_tensor, value_tensor)

    @property
    def table(self) -> Table:
        """The table that holds the values."""
        return self.embedding.tables[0]

    @property
    def name(self) -> str:
        """The name of the table."""
        return self.table.name

    @property
    def requires_grad(self) -> bool:
        """Whether the values are trained."""
        return not self.table.frozen

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, keys: Any) -> torch.Tensor:
        return self.get(keys)

    def __setitem__(self, keys: Any, values: Any) -> None:
        self.put(keys, values)

    def forward(self, keys: Any) -> torch.Tensor:
        """Return `get(keys)`."""
        return self.get(keys)

    def get(self, key_tensor: Any, insert_default_value: bool = True) -> torch.Tensor:
        """Return the values of keys, each of the value shape; gradients flow to them.

        Args:
            key_tensor: integers of any shape; or a column of a `Batch` as it is, `batch.ids[name]`
                with m ids, for m values of a network that can be exported.
            insert_default_value: insert keys that are new, and count all; False only reads. A
                module in eval mode only reads, too.

        Raises:
            RowShapeError: (a ValueError) `key_tensor` holds something else than integers.
        """
        keys = key_tensor
        shape: tuple[int, ...] = (-1,)
        if not isinstance(keys, Ids):
            keys = _keys(keys)
            shape = tuple(keys.shape)
        if insert_default_value:
            if self.embedding.training:
                self._count_lookup()
            rows = self.embedding(keys)
        else:
            with in_eval_mode(self.embedding):
                rows = self.embedding(keys)
        values: torch.Tensor = rows.view(*shape, *self.value_shape)
        return values

    @at("MapParameter.put")
    def put(self, key_tensor: Any, value_tensor: Any) -> MapParameter:
        """Insert or overwrite the values of n keys; return self.

        Raises:
            RowShapeError: (a ValueError) keys are not integers of shape [n], or values are not
                finite numbers of the shape `[n, *value_shape]`.
        """
        keys = as_ids(key_tensor, "MapParameter.put: keys")
        values = _values("MapParameter.put: value_tensor", value_tensor)
        self._check_values("put", keys, values)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), self.table.dim)
        if self.table.spread is not None:
            digest = zlib.crc32(values.tobytes(), zlib.crc32(keys.tobytes()))
            self.table.spread.check_equal({f"values to put into {self.name!r}": digest})
        columns = {"id": pa.array(keys), "value": lists}
        if self.table.clock == "steps":  # put now: their age begins here
            columns["last_seen"] = pa.array(np.full(len(keys), self.table.step + 1))
        self.table.load([pa.record_batch(columns)])
        return self

    @at("MapParameter.erase")
    def erase(self, key_tensor: Any) -> MapParameter:
        """Remove keys with their values; return self."""
        self.table.remove(as_ids(key_tensor, "MapParameter.erase: keys"))
        return self

    def get_keys(self) -> Tensor:
        """Return all keys, int64 [n]."""
        return self.get_data()[0]

    def get_values(self) -> Tensor:
        """Return all values, float32, n of the value shape."""
        return self.get_data()[1]

    @at("MapParameter.get_data")
    def get_data(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, also of other ranks, which call it, too."""
        batches = list(self.table.export())
        if self.table.spread is not None:
            every = self.table.spread.gathered(batches)
            batches = sorted((batch for of_rank in every for batch in of_rank), key=_partition)
        keys = [batch["id"].to_numpy() for batch in batches]
        values = [batch["value"].flatten().to_numpy() for batch in batches]
        num_keys = sum(map(len, keys))
        flat = np.concatenate([np.empty(0, np.float32), *values])
        shaped = flat.reshape(num_keys, *self.value_shape)
        return with_asnumpy(np.concatenate([np.empty(0, np.int64), *keys])), with_asnumpy(shaped)

    @at("MapParameter.export_data")
    def export_data(self, incremental: bool = False) -> Exported:
        """Return keys, values and statuses, after erasing keys by `evict_filter_value`.

        The first export is a full one. Keys that were erased since the last export are part of an
        incremental one, also if nothing else has changed. On several ranks, all call it, and each
        gets the keys of all of them.

        Args:
            incremental: only what changed since the last export.

        Raises:
            ConfigError: `incremental`, and the `rule` moves rows without gradients.
            TableError: the changes since the last export are not known, because a `Checkpoint` with
                deltas took them, or a checkpoint was restored. Export everything, and save with
                `ModelCheckpoint` or `Checkpoint(full_every=1)`.
        """
        if self.table.evictions:
            self._warn_ageless()
            self.table.evict()
        if incremental and self.reader.has_read:
            changes = self.reader.changes()
        else:
            changes = self.reader.all()
        if self.table.spread is not None:
            changes = _joined(self.table.spread.gathered(changes))
        modified = np.full(len(changes.ids), MODIFIED, np.int32)
        erased = np.full(len(changes.removed), ERASED, np.int32)
        return Exported(
            np.concatenate([changes.ids, changes.removed]),
            changes.values.reshape(-1, *self.value_shape),
            np.concatenate([modified, erased]),
        )

    def export_slice_data(self, incremental: bool = False) -> tuple[Any, Any, Any, bool]:
        """Return what `export_data` returns, and True: all of it is one slice, the last."""
        exported = self.export_data(incremental)
        return exported[0], exported[1], exported[2], True

    @at("MapParameter.import_data")
    def import_data(self, data: Sequence[Any]) -> None:
        """Put what `export_data` returned: put keys with values, erase those that were erased.

        Raises:
            ConfigError: it is not keys and values, with or without a status of each key.
        """
        if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
            raise ConfigError(
                "MapParameter.import_data: keys and values are needed, and the status of each key "
                f"if some were erased, got {data!r}. Give what export_data returned."
            )
        keys = as_ids(data[0], "MapParameter.import_data: keys")
        values = _values("MapParameter.import_data: values", data[1])
        if len(data) > 2:
            statuses = _statuses(data[2], len(keys))
            erased = keys[statuses == ERASED]
            keys = keys[statuses != ERASED]
            self._check_values("import_data", keys, values)
            self.erase(erased)
        self.put(keys, values)

    def clone(self, init: Any = "same") -> MapParameter:
        """Return a parameter without keys that is made as this one.

        Args:
            init: its `default_value`; "same": that of this one.
        """
        config = self.table.config
        return MapParameter(
            self.key_dtype,
            self.value_dtype,
            self.value_shape,
            default_value=self.default_value if init == "same" else init,
            permit_filter_value=self.permit_filter_value,
            evict_filter_value=self.evict_filter_value,
            name=self.name if self._has_own_name else None,
            requires_grad=self.requires_grad,
            rule=config["rule"] if self._has_own_rule else None,
            **self._memory,
        )

    def set_param_ps(self, init_in_server: bool = False) -> None:
        """Log that there is no parameter server: the processes that train hold the values."""
        ARGUMENTS.log_no_effect("MapParameter.set_param_ps")

    def settle(self, name: str, rule: Rule | None) -> bool:
        """Give the table its place in the network as name, and the rule of the optimizer.

        A name and a rule of its own stay. Rows are kept, those of a trained table with the state of
        the optimizer if the rule is of the same kind.

        Returns:
            Whether it has the rule of the optimizer.
        """
        follows = not self._has_own_rule and rule is not None
        old = self.embedding
        config = self.table.config
        if not self._has_own_name:
            config["name"] = name
        if follows:
            config["rule"] = rule
        if config == self.table.config:
            return follows
        table = _copied(self.table, config)
        self.embedding = Embedding(table, max_norm=old.max_norm).to(old._device.device)
        self.embedding.train(old.training)
        self.reader = ChangeReader(table, own_rows=True)
        return follows

    def _check_values(
        self, caller: str, keys: NDArray[np.int64], values: NDArray[np.float32]
    ) -> None:
        """Raise RowShapeError unless there is one value for each key."""
        expected = [len(keys), *self.value_shape]
        if list(values.shape) != expected:
            raise RowShapeError(
                f"MapParameter.{caller}: values must have the shape {expected}, got "
                f"{list(values.shape)}. Give one value a key."
            )

    def _count_lookup(self) -> None:
        step, lookups = self._lookups
        if step != self.table.step:
            lookups = 0
        self._lookups = (self.table.step, lookups + 1)

    def _warn_ageless(self) -> None:
        """Log that no key gets older while keys are looked up and no step trains the values."""
        step, lookups = self._lookups
        if step != self.table.step or lookups <= self.evict_filter_value:
            return
        log.warning(
            "MapParameter %r: evict_filter_value=%d counts training steps, got %d lookups after "
            "training step %d, so that no key became older. Train the values, or call erase(keys)",
            self.name,
            self.evict_filter_value,
            lookups,
            step,
        )
        self._lookups = (step, 0)

    def extra_repr(self) -> str:
        return f"value_shape={self.value_shape}"


def tier_of(where: str, vocab_cache_size: int, ssd_data_path: str | Path | None) -> Tier:
    """Return where values lie: in memory, or on the disk of a folder but for those in a cache.

    Raises:
        ConfigError: one of the arguments of `where` is wrong, or the disk lacks a size.
    """
    checks.whole_number(f"{where}.vocab_cache_size", vocab_cache_size, 0)
    if ssd_data_path is None:
        ARGUMENTS.log_no_effect("vocab_cache_size", when=vocab_cache_size > 0)
        return Ram()
    if not vocab_cache_size:
        raise ConfigError(
            f"{where}.ssd_data_path: vocab_cache_size says how many rows stay in memory, got 0. "
            "Give at least the distinct keys of the batches in flight."
        )
    folder = local_path(ssd_data_path, f"{where}.ssd_data_path")
    return Ssd(folder, vocab_cache_size).named("vocab_cache_size")


def _check_dtype(where: str, dtype: Any, choices: Sequence[Any], advice: str) -> None:
    """Raise ConfigError unless `dtype` is among `choices`."""
    is_listed = not isinstance(dtype, (np.ndarray, torch.Tensor)) and dtype in choices
    if not is_listed:
        raise ConfigError(f"{where}: unknown value, got {dtype!r:.60}. {advice}")


def _shape(value_shape: Any) -> tuple[int, ...]:
    """Return the shape of a value; raise ConfigError unless it is sizes of 1 or more."""
    sizes: Any = [value_shape] if isinstance(value_shape, numbers.Number) else value_shape
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ConfigError(
            f"MapParameter.value_shape: must be a number or a tuple of numbers, got "
            f"{value_shape!r:.60}. Give such as 3 or (2, 3)."
        )
    for size in sizes:
        checks.whole_number("MapParameter.value_shape", size, 1)
    return tuple(int(size) for size in sizes)


def _keys(keys: Any) -> torch.Tensor:
    """Return keys of any shape as a tensor; raise RowShapeError if they are not numbers."""
    if isinstance(keys, (list, tuple)) and not keys:
        return torch.zeros(0, dtype=torch.int64)
    if isinstance(keys, Mapping):
        raise RowShapeError(
            f"MapParameter.get: keys: integers are needed, got a dict with {', '.join(keys)}. "
            "Items of data without a schema are tuples, (data, label): give the network "
            "batch[name], or data that yield tuples."
        )
    try:
        return torch.as_tensor(keys)
    except (TypeError, ValueError, RuntimeError):
        pass
    where = "MapParameter.get: keys"
    if not isinstance(keys, (list, tuple)):
        return torch.from_numpy(as_ids(keys, where))
    # numbers of the upper half of 64 bits, or a mistake that as_ids names
    try:
        listed = np.array(keys, dtype=object)
    except ValueError:
        listed = np.empty(1, dtype=object)
        listed[0] = keys
    flat = torch.from_numpy(as_ids(list(listed.flat), where))
    return flat.view(listed.shape)


def _values(where: str, values: Any) -> NDArray[np.float32]:
    """Return values as float32; raise RowShapeError unless they are numbers of one shape."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fiub":
            return array.astype(np.float32, copy=False)
    except (TypeError, ValueError):
        pass
    raise RowShapeError(
        f"{where}: must be numbers, as many for each key, got {values!r:.60}. Give an array or a "
        "tensor of floats."
    )


def _statuses(statuses: Any, count: int) -> NDArray[np.int64]:
    """Return the status of each key; raise ConfigError if one is unknown or missing."""
    array = as_ids(np.asarray(statuses), "MapParameter.import_data: statuses")
    wrong = {int(status) for status in set(array.tolist())} - {UNCHANGED, MODIFIED, ERASED}
    if len(array) != count or wrong:
        got = f"the status {min(wrong)}" if wrong else f"{len(array)} for {count} keys"
        raise ConfigError(
            f"MapParameter.import_data: each key has a status of 0 (unchanged), 1 (modified) or 2 "
            f"(erased), got {got}. Give what export_data returned."
        )
    return array


def _admission(
    permit_filter_value: int, evict_filter_value: int, admission_bytes: int
) -> MinCount | None:
    checks.whole_number("permit_filter_value", permit_filter_value, 0)
    checks.whole_number("evict_filter_value", evict_filter_value, 0)
    expires = evict_filter_value if evict_filter_value < sys.maxsize else None
    admit = MinCount(
        permit_filter_value,
        expire_steps=expires,
        once_a_batch=True,
        admission_bytes=admission_bytes,
    )
    return admit if permit_filter_value > 1 else None


def _table(
    name: str,
    value_shape: tuple[int, ...],
    default_value: Any,
    admit: MinCount | None,
    evict_filter_value: int,
    rule: Rule | None,
    tier: Tier,
) -> Table:
    init = _init(default_value)
    evict = None
    if evict_filter_value < sys.maxsize:
        evict = Ttl(steps=evict_filter_value)
    return Table(
        name,
        math.prod(value_shape),
        rule=rule,
        admit=admit,
        evict=evict,
        tier=tier,
        init=init,
        default=init.value if isinstance(init, Constant) else 0.0,
    )


def _partition(batch: pa.RecordBatch) -> int:
    return int(batch.column("partition")[0].as_py())


def _joined(every: Sequence[Changes]) -> Changes:
    """Return the changes of all ranks, in the order of one process."""
    ids = np.concatenate([changes.ids for changes in every])
    order = np.argsort(partition(ids), kind="stable")
    values = np.concatenate([changes.values for changes in every])
    removed = np.concatenate([changes.removed for changes in every])
    return Changes(ids[order], values[order], removed[np.argsort(removed)])


def _copied(old: Table, config: Mapping[str, Any]) -> Table:
    """Return a table with another name or rule that has the rows of `old`."""
    table = Table(**config)
    has_state = old.step > 0 and type(table.rule) is type(old.rule)
    for batch in old.export():
        names = [name for name in batch.schema.names if has_state or name != "state"]
        table.load([batch.select(names)])
    table.load_candidates(old.candidates())
    table.load_sketch(old.sketch())
    table.load_scalars(old.scalars())
    table.spread = old.spread
    table.requires_grad_(not old.frozen)
    return table


def _init(value: Any) -> Init:
    if isinstance(value, Init):
        return value
    if isinstance(value, str):
        advice = did_you_mean(value, _INITS)
        checks.one_of("default_value", value.lower(), _INITS, advice)
        return _INITS[value.lower()]
    checks.finite_number("default_value", value)
    return Constant(float(value))
