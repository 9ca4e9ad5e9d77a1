# SPDX-License-Identifier: Apache-2.0
"""Dialects: training files of other systems, which `hotbed train` runs as they are.

A package that reads such files registers a `Dialect` in the entry-point group `hotbed.jobs`:

    [project.entry-points."hotbed.jobs"]
    mysystem = "mypackage.job:dialect"

Nothing in the engine names a dialect or imports one: the group says what is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotbed.plugins import registered

GROUP = "hotbed.jobs"
"""The entry-point group in which packages register their dialects."""

log = logging.getLogger("hotbed")


@dataclass(frozen=True)
class Dialect:
    """The training files of another system.

    Args:
        name: what messages call it.
        recognises: returns whether plain values, as JSON has them, are a file of the dialect.
        train: trains what such values describe. Paths in them are relative to the working
            directory.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    train: Callable[[Mapping[str, Any]], None]


def dialect_of(spec: Mapping[str, Any]) -> Dialect | None:
    """Return the installed dialect that `spec` is written in; None: it is a job.

    No dialect is asked about a spec with `schema` or `model`: that is a job. A dialect that cannot
    be loaded is logged.
    """
    if "schema" in spec or "model" in spec:
        return None
    for dialect in _installed():
        if dialect.recognises(spec):
            return dialect
    return None


def _installed() -> Iterator[Dialect]:
    for entry in registered(GROUP):
        try:
            dialect = entry.load()
        except Exception as error:  # a package of somebody else
            log.warning(
                "%s: the entry point %s = %s cannot be loaded (%s). Its files are not recognised.",
                GROUP,
                entry.name,
                entry.value,
                error,
            )
        else:
            yield dialect
