# SPDX-License-Identifier: Apache-2.0
"""What TorchRec's plans and constraints ask for, and what that means for tables of Hotbed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hotbed import config
from hotbed.errors import ConfigError

_ON_DISK = ("key_value", "ssd_virtual_table", "dram_ssd_virtual_table")
"""The compute kernels whose rows lie on a disk."""
_LONG = ("sharding_spec",)
"""Fields that say the same as others, in many words."""


def plan_notes(plan: Any, tables: Iterable[str]) -> tuple[str, ...]:
    """Return the notes of a report on a plan.

    Args:
        plan: TorchRec's `ShardingPlan`, or its `ParameterConstraints` by the names of tables; None
            = there is none.
        tables: names of the tables of the model.

    Raises:
        ConfigError: it is something else, or names a table that the model does not have.
    """
    names = list(tables)
    settings = []
    on_disk = []
    for name, entry in _entries(plan):
        if name not in names:
            raise ConfigError(
                f"hb.auto.plan: the model has no table of this name, got {name!r}. "
                f"{config.did_you_mean(name, names)}"
            )
        fields = dict(_fields(entry))
        settings.append(f"{name} ({', '.join(f'{key}={value}' for key, value in fields.items())})")
        if any(
            kernel in str(fields.get("compute_kernel", fields.get("compute_kernels", "")))
            for kernel in _ON_DISK
        ):
            on_disk.append(name)
    notes = []
    if settings:
        notes.append(
            "The plan has no effect, because rows are spread over ranks by hash: "
            f"{'; '.join(settings)}."
        )
    if on_disk:
        notes.append(
            f"The plan has rows of {', '.join(on_disk)} on a disk. Give these tables "
            "{'tier': hb.Ssd(folder)}."
        )
    return tuple(notes)


def _entries(plan: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names of tables with what a plan says of each."""
    if plan is None:
        return
    modules = getattr(plan, "plan", None)
    if isinstance(modules, Mapping):
        for of_module in modules.values():
            yield from of_module.items()
    elif isinstance(plan, Mapping) and all(
        dataclasses.is_dataclass(item) for item in plan.values()
    ):
        yield from plan.items()
    else:
        raise ConfigError(
            "hb.auto.plan: expected a ShardingPlan of TorchRec, or a dict of its "
            f"ParameterConstraints by table, got {type(plan).__name__}. Leave it out."
        )


def _fields(entry: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a plan's entry that differ from their defaults."""
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name not in _LONG and value is not None and value != default:
            yield field.name, value
