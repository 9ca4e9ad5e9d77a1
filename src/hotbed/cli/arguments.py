# SPDX-License-Identifier: Apache-2.0
"""What commands make of their arguments: a job, and values that `--set` assigns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from hotbed.job.job import Job


def read_job(job_file: Path, assignments: list[str] | None) -> Job:
    """Return the job of a file, with values set by dotted path; a foreign file is an error."""
    from hotbed.job import run

    job = run.read(job_file, assigned(assignments, "job"))
    if isinstance(job, run.ForeignJob):
        raise ConfigError(
            f"{job_file}: not a job, got a training file of {job.dialect.name}. Only `hotbed "
            "train` reads it."
        )
    return job


def assigned(assignments: list[str] | None, prefix: str) -> dict[str, Any]:
    """Return the values of `--set a.b=c` by dotted path; `prefix` may stand before a path."""
    from hotbed.yaml_files import parse_value

    values: dict[str, Any] = {}
    for assignment in assignments or []:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set: no '=' in it, got {assignment!r}. Write a.b=c.")
        values[path.strip().removeprefix(f"{prefix}.")] = parse_value(text)
    return values
