# SPDX-License-Identifier: Apache-2.0
"""Whether everything that a job reads and writes is there, before its first row is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hotbed.connectors.files import FileSource
from hotbed.files import check_folder
from hotbed.job.job import Job


def check_job(job: Job) -> None:
    """Check the sources and callbacks of all parts of a job.

    Raises:
        ConfigError: a secret is missing, a broker refuses it, or a folder cannot be written.
        DataError: a file, a folder or a topic is missing, or no broker answers.
        PersistError: a topic to publish in is missing, or no broker answers.
    """
    check_folder(job.output, "job.output")
    for source in (job.valid, job.stream):
        check_ready(source)
    check_ready(job.make_callbacks())
    if job.stream is not None:
        check_ready(job.make_callbacks(stream=True))


def check_ready(value: Any) -> None:
    """Call `check_ready` of a value, or of the values that it holds: sources, callbacks, ..."""
    check = getattr(value, "check_ready", None)
    if callable(check):
        check()
    if isinstance(value, FileSource):
        value.files()  # raises where there are none
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            if is_dataclass(inner) or hasattr(inner, "check_ready"):
                check_ready(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            check_ready(getattr(value, item.name))
