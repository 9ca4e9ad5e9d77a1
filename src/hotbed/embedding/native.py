# SPDX-License-Identifier: Apache-2.0
"""What the native core takes of a table and gives to no pickle, and the threads of the core."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from hotbed import _core, checks
from hotbed.errors import ConfigError
from hotbed.files import check_scratch

from .footprint import row_bytes
from .hashing import name_hash
from .init import Constant, Init, Zeros
from .policy import (
    Admission,
    Eviction,
    admission_fields,
    counts_once,
    eviction_fields,
    kept_columns,
)
from .rule import Rule
from .tier import MAX_ROW_BYTES, Ssd, Tier

T = TypeVar("T")


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of the native core (default: all processors).

    Results never depend on it. Raises ConfigError unless it is an integer >= 1.
    """
    checks.whole_number("num_threads", num_threads, 1)
    _core.set_num_threads(num_threads)


def num_threads() -> int:
    """Return the number of threads of the native core."""
    return _core.num_threads()


class TableSettings(Protocol):
    """The settings of a table that the native core needs."""

    name: str
    seed: int
    dim: int
    dtype: Any
    default: float
    always_default: bool
    init: Init
    rule: Rule
    tier: Tier
    admit: Admission | None
    evictions: tuple[Eviction, ...]

    @property
    def clock(self) -> str | None: ...


def native_table(table: TableSettings) -> _core.Table:
    """Return a new table of the native core, without rows.

    Raises:
        ConfigError: rows cannot lie where the settings say.
    """
    config = native_config(table)
    try:
        return _core.Table(config)
    except MemoryError as error:
        if not isinstance(table.tier, Ssd):
            raise
        num_bytes = table.tier.ram_rows * row_bytes(table.dim, table.dtype, table.rule)
        raise ConfigError(
            f"table {table.name!r}: tier.ram_rows: the system does not give the memory for so many "
            f"rows, got {table.tier.ram_rows:,}, which take {num_bytes / 1e9:,.1f} GB. Give a "
            "smaller number: rows beyond it lie on the disk."
        ) from error


def native_config(table: TableSettings) -> _core.TableConfig:
    """Return the keywords of a table for the native core."""
    config = _core.TableConfig()
    config.name = table.name
    config.name_hash = name_hash(table.name)
    config.seed = table.seed % 2**64
    config.dim = table.dim
    # whole numbers are copied as they are: to the core, lanes of four bytes
    config.dtype = "float32" if table.dtype == "int32" else table.dtype
    if isinstance(table.tier, Ssd):
        _set_disk(config, table, table.tier)
    config.tier = type(table.tier).__name__
    config.default_value = table.default
    config.always_default = table.always_default
    init = table.init
    if isinstance(init, Zeros):
        init = Constant(0.0)
    config.init_kind = type(init).__name__
    config.init_scale = next(iter(dataclasses.asdict(init).values()))
    config.rule = _rule(table.rule)
    config.admission = _with_fields(_core.Admission(), admission_fields(table.admit))
    config.admission.once_a_batch = counts_once(table.admit)
    config.eviction = _with_fields(_core.Eviction(), eviction_fields(table.evictions))
    columns = kept_columns(table.admit, table.evictions)
    config.keep_count = "count" in columns
    config.keep_seen = "last_seen" in columns
    config.counts_steps = table.clock == "steps"
    return config


def _set_disk(config: _core.TableConfig, table: TableSettings, tier: Ssd) -> None:
    """Set where rows lie; raise ConfigError if they cannot lie there."""
    where = f"table {table.name!r}"
    if table.rule.scope == "all":
        raise ConfigError(
            f"{where}: a rule of scope 'all' would read and write every row on the disk at each "
            f"step, got scope='all' with tier={tier!r}. Use scope='catch_up', which has its bits, "
            "or tier=hb.Ram()."
        )
    num_bytes = row_bytes(table.dim, table.dtype, table.rule)
    if num_bytes > MAX_ROW_BYTES:
        raise ConfigError(
            f"{where}: a row on a disk has at most {MAX_ROW_BYTES:,} bytes with its optimizer "
            f"state, got {num_bytes:,} of dim={table.dim} and {type(table.rule).__name__}. Use a "
            "smaller dim, or tier=hb.Ram()."
        )
    if tier.engine == "io_uring" and not _core.can_use_uring():
        raise ConfigError(
            f"{where}: tier.engine: the kernel does not let this process use io_uring, as in many "
            "containers, got 'io_uring'. Use engine='best'."
        )
    check_scratch(str(tier.path), f"{where}: tier.path")
    config.folder = str(tier.path)
    config.ram_rows = tier.ram_rows
    config.rows_name = tier.rows_name
    config.engine = tier.engine


def _rule(rule: Rule) -> _core.Rule:
    """Return a rule as the native core takes it: by the names of its class and fields."""
    fields = dataclasses.asdict(rule)
    scope = fields.pop("scope")
    fields["clip"] = rule.clip or 0.0  # 0 = off
    return _core.Rule(type(rule).__name__, scope=scope, fields=fields)


def _with_fields(native: T, fields: Mapping[str, Any]) -> T:
    for name, value in fields.items():
        setattr(native, name, value)
    return native


def unpicklable(*names: str) -> ConfigError:
    """Return the error of pickling tables of these names, whose rows the native core holds."""
    return ConfigError(
        f"tables {', '.join(map(repr, names))}: a table cannot be pickled, got pickle, torch.save "
        "or copy.copy. Save the model with RecModel.save, or with "
        "torch.save(model.state_dict(), path); copy it with copy.deepcopy."
    )
