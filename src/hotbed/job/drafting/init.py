# SPDX-License-Identifier: Apache-2.0
"""Write drafts to files that do not exist yet: the work of `hotbed init`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotbed.errors import ConfigError
from hotbed.job.dialect import drafted
from hotbed.job.drafting.draft import Sample, draft
from hotbed.job.drafting.preparation import draft_preparation
from hotbed.job.job import Job
from hotbed.persist.container.store import write_text
from hotbed.yaml_files import parse_value


def init_job(
    data_file: str, out: Path, label: str | None = None, columns: Sequence[str] | None = None
) -> None:
    """Write a commented job for a data file to `out`; `label`, `columns`: as in `draft`.

    Raises:
        ConfigError: `out` exists.
        NotWritten: `out` cannot be written.
    """
    _refuse_existing(out)
    text = draft(data_file, label, columns)
    write_text(out, text)
    Job.read(out)


def init_from(where: str, out: Path) -> None:
    """Write a job for a training file of another system to `out`; `where`: as in `drafted`.

    Raises:
        ConfigError: `out` exists, or the file has values without a counterpart.
    """
    _refuse_existing(out)
    text = drafted(where)
    Job.from_json(parse_value(text))
    write_text(out, text)


def init_preparation(
    data_file: str,
    out: Path,
    columns: Sequence[str] | None = None,
    *,
    label: str | None = None,
    user: str | None = None,
    item: str | None = None,
) -> Path:
    """Write a commented job to `out`, and beside it the preparation of its rows.

    Args:
        data_file: raw rows.
        out: the job.
        columns: as in `Sample.of`.
        label: as in `draft_preparation`, like the others.
        user: the column that says who chose.
        item: the column that says what was chosen.

    Returns:
        The file of the preparation, `prepare.yaml`.

    Raises:
        ConfigError: one of the files exists.
        NotWritten: a file cannot be written.
    """
    preparation = out.with_name("prepare.yaml")
    for path in (out, preparation):
        _refuse_existing(path)
    sample = Sample.of(data_file, columns)
    drafts = draft_preparation(
        sample, str(out.with_name("prepared")), label=label, user=user, item=item
    )
    write_text(preparation, drafts.preparation)
    write_text(out, drafts.job)
    Job.read(out)
    return preparation


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(
            f"{out}: the file exists and is not overwritten, got --out {out}. Give another name."
        )
