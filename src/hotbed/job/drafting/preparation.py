# SPDX-License-Identifier: Apache-2.0
"""Draft a first preparation for a data file, and the job that trains on what it writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from hotbed import config
from hotbed.errors import SchemaError
from hotbed.job.drafting.draft import (
    Sample,
    check_features,
    columns_text,
    flow,
    lines_of,
    rest_of_job,
)
from hotbed.job.drafting.line import Line, plain_id, quoted
from hotbed.job.drafting.moments import find_time
from hotbed.job.drafting.roles import find_item, find_label, find_user, follow_item, positive_share

NEGATIVES = 4
"""Rows that are added for each event of implicit feedback."""

HISTORY = 20
"""Earlier items of a user that are a feature."""

RARE_SHARE = 0.05
"""Share of positives below which the draft shows how to leave out negatives."""

_SHUFFLE_ROWS = 100_000
_EVENT_LABEL = "chosen"
_FILL = "{kind: fill_missing, value: 0}"


@dataclass(frozen=True)
class Roles:
    """The columns that decide what a preparation does; None where there is no such column."""

    label: str | None
    time: str | None
    user: str | None
    item: str | None
    guess: str = ""  # why the label is a guess


@dataclass(frozen=True)
class Drafts:
    """A preparation and a job, as YAML."""

    preparation: str
    job: str


def draft_preparation(
    sample: Sample,
    output: str = "prepared",
    *,
    label: str | None = None,
    user: str | None = None,
    item: str | None = None,
) -> Drafts:
    """Return a commented preparation for a data file, and the job that trains on its output.

    Without a label, each row is an event that happened: rows of other items are added, with the
    label 0.

    Args:
        sample: the first rows of the file.
        output: the folder that the preparation will write.
        label: the column to predict; None = guessed from the names.
        user: the column that says who chose; None = guessed from the names.
        item: the column that says what was chosen; None = guessed from the names.

    Raises:
        SchemaError: a column is missing; or there is neither a label, nor a user and an item.
    """
    frame = sample.frame
    roles = _roles(sample, label, user, item)
    lines = [*_lines(frame, roles), *_derived_lines(roles)]
    check_features(sample.path, frame, lines)
    schema = columns_text(lines)
    parts = [
        _HEAD.format(
            path=sample.path,
            rows=f"{len(frame):,}",
            output=output,
            source=flow(config.describe(sample.source)),
            columns=schema,
        )
        + _guessed(roles),
        _derive(roles),
        _negatives(frame, roles),
        _split(roles),
        _down_sample(frame, roles),
        _END.format(output=quoted(output)),
    ]
    preparation = "\n".join(part for part in parts if part)
    num_rows = len(frame)
    ranked_by = None
    if roles.label is None:
        num_rows *= 1 + NEGATIVES
        ranked_by = roles.user
        base_rate = 1 / (1 + NEGATIVES)
    else:
        base_rate = positive_share(frame[roles.label])
    job = _JOB.format(path=sample.path, output=quoted(output))
    return Drafts(
        preparation, job + rest_of_job(lines, num_rows, base_rate, _SHUFFLE_ROWS, ranked_by)
    )


def _roles(sample: Sample, label: str | None, user: str | None, item: str | None) -> Roles:
    """Return the columns that were named, and guesses of the others."""
    frame = sample.frame
    named = {"--label": label, "--user": user, "--item": item}
    for option, name in named.items():
        if name is not None and name not in frame.columns:
            raise SchemaError(
                f"{sample.path}: there is not such a column, got {option} {name}. Name one of "
                f"{', '.join(frame.columns)}."
            )
    target = label
    guess = ""
    if target is None:
        target, guess = find_label(frame)
    time = find_time(frame, target or "")
    roles = Roles(target, time, user or find_user(frame), item or find_item(frame), guess)
    if roles.label is None and (roles.user is None or roles.item is None):
        raise SchemaError(
            f"{sample.path}: no column looks like a label, and none like a user or an item, got "
            f"{', '.join(frame.columns)}. Name the column to predict with --label; or, if every "
            "row is something that happened, name its columns with --user and --item."
        )
    return roles


def _lines(frame: pl.DataFrame, roles: Roles) -> list[Line]:
    """Return the line of each column; users and items are always ids."""
    lines: list[Line] = []
    if roles.label is None:
        text = f"{{kind: label, name: {_EVENT_LABEL}}}"
        lines.append(Line("label", text, "1 in the rows of the file, 0 in those that are added"))
    keys = [plain_id(name) for name in (roles.user, roles.item) if name is not None]
    for line in lines_of(frame, roles.label, roles.time, roles.guess):
        if line.role == "left out" and line.text in keys:
            line = replace(line, role="id", why="nearly every row has its own")
        lines.append(line)
    return lines


def _guessed(roles: Roles) -> str:
    """Return the columns that decide what follows, for a person to check."""
    if roles.user is None and roles.item is None:
        return ""
    names = f"user {roles.user or '(none)'}, item {roles.item or '(none)'}"
    return f"\n# Guessed from names and types: {names}. --user and --item name others.\n"


# --- derived columns ------------------------------------------------------------------------------


def _derived_lines(roles: Roles) -> list[Line]:
    """Return the lines of the columns that `derive` adds."""
    if roles.time is None or roles.user is None:
        return []
    since = Line(
        "dense",
        f"{{kind: dense, name: seconds_since_last, transforms: [{_FILL}, log, normalize]}}",
        "derived below",
    )
    if roles.item is None:
        return [since]
    item = quoted(roles.item)
    history = Line(
        "id",
        f"{{kind: id, name: earlier_items, table: {item}, pooling: mean}}",
        f"derived below; with the rows of {roles.item}",
    )
    return [since, history]


def _derive(roles: Roles) -> str:
    if roles.time is None or roles.user is None:
        return ""
    keys = f"by: {quoted(roles.user)}, time: {quoted(roles.time)}"
    lines = [
        "# From the user's strictly earlier rows. A request to a server brings these columns.",
        "derive:",
        f"  - {{kind: time_difference, name: seconds_since_last, {keys}}}",
    ]
    if roles.item is not None:
        item = f"column: {quoted(roles.item)}, length: {HISTORY}"
        lines.append(f"  - {{kind: previous, name: earlier_items, {keys}, {item}}}")
    return "\n".join(lines) + "\n"


# --- rows -----------------------------------------------------------------------------------------


def _negatives(frame: pl.DataFrame, roles: Roles) -> str:
    if roles.label is not None or roles.user is None or roles.item is None:
        return ""
    others = [name for name in frame.columns if name not in (roles.user, roles.item, roles.time)]
    names = follow_item(frame, roles.item, others, roles.user, roles.time)
    following = [quoted(name) for name in names]
    columns = ""
    if following:
        columns = f", item_columns: [{', '.join(following)}]"
    return _NEGATIVES.format(
        user=quoted(roles.user), item=quoted(roles.item), number=NEGATIVES, columns=columns
    )


def _split(roles: Roles) -> str:
    if roles.time is not None:
        return "# The latest tenth of the rows validates.\nsplit: {kind: by_time, valid: 0.1}\n"
    lines = [
        "# A tenth of the rows validates, drawn by a hash of their places.",
        "split: {kind: by_fold, valid: 0.1}",
    ]
    if roles.user is not None:
        group = f"{{kind: by_group, column: {quoted(roles.user)}, valid: 0.1}}"
        lines.append(f"# split: {group}    # on users that training does not know")
    return "\n".join(lines) + "\n"


def _down_sample(frame: pl.DataFrame, roles: Roles) -> str:
    if roles.label is None or not frame[roles.label].dtype.is_numeric():
        return ""
    share = frame.select(pl.col(roles.label).cast(pl.Float64).mean()).item() or 0.0
    if not 0 < share < RARE_SHARE or frame[roles.label].n_unique() != 2:
        return ""
    label = quoted(roles.label)
    return (
        "# Positives are rare: train on fewer negatives, and correct that by a weight.\n"
        f"# down_sample: {{label: {label}, keep: 0.1, weight: sample_weight}}\n"
    )


_HEAD = """\
# A first preparation for {path}, drafted from its first {rows} rows. Read it, correct it, then:
#   hotbed prepare prepare.yaml     # writes the folder {output}; open report.html in it
#   hotbed train job.yaml
source: {source}

# Ids may be any integers or texts: tables get rows for new ones. With
# `transforms: [{{kind: map, min_count: 2}}]` ids that are too rare share the id 0.
schema:
  columns:
{columns}
"""

_NEGATIVES = """\
# Every row is something that happened. For each, {number} rows with other items are added, with the
# label 0: items that the user saw earlier if its own item is one, else items that are new to the
# user. Columns of item_columns are those of the item at that time; all others are copied.
negatives: {{user: {user}, item: {item}, per_positive: {number}, draw: uniform{columns}}}
"""

_END = """\
on_error: raise      # or skip: bad rows are counted, and written to dead letters in the output
memory: 4GB          # of all tasks together
output: {output}
"""

_JOB = """\
# A first job for the rows that prepare.yaml makes of {path}. Read it, correct it, then:
#   hotbed train job.yaml
schema: {{prepared: {output}}}
train: {{kind: prepared, path: {output}}}
valid: {{kind: prepared, path: {output}, part: valid}}
"""
