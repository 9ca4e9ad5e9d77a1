# SPDX-License-Identifier: Apache-2.0
"""Dialects: training files of other systems, which `hotbed train` runs, or `hotbed init` drafts.

A package that reads such files registers a `Dialect` in the entry-point group `hotbed.jobs`:

    [project.entry-points."hotbed.jobs"]
    mysystem = "mypackage.job:dialect"

Nothing in the engine names a dialect or imports one: the group says what is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed.errors import ConfigError
from hotbed.plugins import registered
from hotbed.yaml_files import read_mapping

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
            directory. None = a job is drafted of them instead.
        draft: returns the text of a job for the values of a file, given also its path and the name
            of one of its experiments ("" = the only one). None = they are trained as they are.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    train: Callable[[Mapping[str, Any]], None] | None = None
    draft: Callable[[Mapping[str, Any], Path, str], str] | None = None


def dialect_of(spec: Mapping[str, Any]) -> Dialect | None:
    """Return the installed dialect that `spec` is written in; None: it is a job.

    No dialect is asked about a spec with `schema` or `model`: that is a job. A dialect that cannot
    be loaded is logged.
    """
    if "schema" in spec or "model" in spec:
        return None
    return next((dialect for dialect in _installed() if dialect.recognises(spec)), None)


def drafted(where: str) -> str:
    """Return the text of a job for a training file of another system.

    Args:
        where: the file; `FILE#NAME` names one of several experiments in it.

    Raises:
        ConfigError: no dialect drafts a job of such a file, or a value has no counterpart.
    """
    file, _, name = where.partition("#")
    spec = read_mapping(file)
    for dialect in _installed():
        if dialect.draft is not None and dialect.recognises(spec):
            return dialect.draft(spec, Path(file), name)
    raise ConfigError(
        f"--from: not a training file that a job can be drafted of, got {file}. It takes a "
        "model_config.yaml of FuxiCTR."
    )


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
