# SPDX-License-Identifier: Apache-2.0
"""Draft a first job for a data file by looking at its columns; a person reads and corrects it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl
import polars.selectors as cs
import pyarrow as pa

from hotbed import config
from hotbed.connectors import Csv, Libsvm, Source
from hotbed.connectors.compression import CODECS, ending_of
from hotbed.connectors.endings import FILE_KINDS, source_for
from hotbed.connectors.files import FileSource
from hotbed.errors import ConfigError, SchemaError
from hotbed.job.drafting.line import Line, quoted
from hotbed.job.drafting.moments import find_time, other_time_line, time_line
from hotbed.job.drafting.proposal import Proposal, propose
from hotbed.job.drafting.roles import (
    bucket_line,
    feature_line,
    find_label,
    gives_away,
    has_decimal_commas,
    holds_labels,
    label_line,
    needs_buckets,
    positive_share,
)
from hotbed.job.drafting.sniff import first_row, sniffed

SAMPLE_ROWS = 100_000
_WEIGHTED_IDS = Line(
    "id",
    "{kind: id, name: features, column: indices, weights: values}",
    "the features of each line, weighted by their values",
)


@dataclass(frozen=True)
class Sample:
    """The first rows of a file, and the source that reads it."""

    path: str
    source: FileSource
    frame: pl.DataFrame

    @staticmethod
    def of(path: str, columns: Sequence[str] | None = None) -> Sample:
        """Return the first rows of a csv, tsv, jsonl, libsvm or parquet file.

        Args:
            path: the file.
            columns: names of the columns of a csv or tsv file whose first line is not a header, or
                has names that cannot be used.

        Raises:
            ConfigError: the file is of another kind.
            SchemaError: the file is empty, or the first line of a csv file is data.
        """
        source = source_of(path)
        if isinstance(source, Csv):
            source = _named(sniffed(source), path, columns)
        elif columns is not None:
            raise ConfigError(
                f"{path}: the file names its columns, got --columns {','.join(columns)}. Leave it "
                "out."
            )
        frame = _first_rows(source)
        if not len(frame):
            raise SchemaError(
                f"{path}: no rows to look at, got an empty file. Give a file with data."
            )
        return Sample(path, source, frame)


def draft(path: str, label: str | None = None, columns: Sequence[str] | None = None) -> str:
    """Return a commented job in YAML for a csv, tsv, jsonl or parquet file.

    Roles are guessed from names, types and values of the first 100,000 rows.

    Args:
        path: the file.
        label: the column to predict; None = guessed from the names.
        columns: as in `Sample.of`.

    Raises:
        ConfigError: the file is of another kind.
        SchemaError: no column looks like a label, or the first line of a csv file is data.

    Example: `print(draft("ratings.csv", label="rating"))`
    """
    sample = Sample.of(path, columns)
    frame = sample.frame
    name = label
    guess = ""
    if name is None:
        name, guess = find_label(frame)
    if name is None or name not in frame.columns:
        raise SchemaError(_no_label(path, name, frame))
    time = find_time(frame, name)
    check_label(path, frame[name])
    lines = lines_of(frame, name, time, guess)
    if isinstance(sample.source, Libsvm):
        lines = [label_line(frame[name]), _WEIGHTED_IDS]
    check_features(path, frame, lines)
    ordered: Source = sample.source
    if time is not None and not frame[time].is_sorted():
        ordered = sample.source.sort(time)
    proposal = propose(frame, lines, name, time)
    return _page(path, ordered, lines, frame[name], proposal)


def check_features(path: str, frame: pl.DataFrame, lines: Sequence[Line]) -> None:
    """Raise SchemaError if there is nothing to predict from."""
    if not any(line.role in ("id", "dense") for line in lines):
        raise SchemaError(
            f"{path}: no column to predict from, got {', '.join(frame.columns)}. Add features."
        )


def check_label(path: str, values: pl.Series) -> None:
    """Raise SchemaError if a column holds what cannot be a label."""
    kind = ""
    if values.dtype.is_nested() or values.dtype.is_temporal() or values.dtype == pl.Binary:
        kind = f"values of type {values.dtype}"
    elif not values.drop_nulls().len():
        kind = "no values"
    elif has_decimal_commas(values):
        kind = f"numbers with a decimal comma, such as {values.drop_nulls()[0]!r}"
    if kind:
        raise SchemaError(
            f"{path}: column {values.name!r} cannot be a label, got {kind}. Write it as numbers "
            "with a decimal point, booleans or texts, or name another column with --label."
        )


def _no_label(path: str, name: str | None, frame: pl.DataFrame) -> str:
    choices = ", ".join(frame.columns)
    if name is not None:
        return (
            f"{path}: no column {name!r} to predict, got {choices}. Name one of them with --label."
        )
    for column in frame.columns:
        if holds_labels(frame[column]):
            example = frame[column].drop_nulls()[0]
            return (
                f"{path}: column {column!r} holds items with their labels, got {example!r:.40}. "
                "Make one row of each item, as docs/jobs.md shows, and draft again."
            )
    return (
        f"{path}: no column looks like a label, got {choices}. Name the column to predict with "
        "--label. If every row is something that happened (a click, a play, a purchase), there is "
        "no label yet: --prepare drafts a preparation that adds rows of other items."
    )


def lines_of(
    frame: pl.DataFrame, label: str | None, time: str | None, guess: str = ""
) -> list[Line]:
    """Return the line of each column: the label if there is one, the time, then the features.

    `guess`: why the label is a guess.
    """
    lines: list[Line] = []
    if label is not None:
        line = label_line(frame[label])
        if guess:
            line = replace(line, why=f"{line.why}; {guess}. --label names another one")
        lines.append(line)
    times = None
    if time is not None:
        times = frame[time]
        lines.append(time_line(times))
    for column in frame.columns:
        if column in (label, time):
            continue
        line = other_time_line(frame[column], times) or feature_line(frame[column])
        if label is not None and line.role != "left out" and gives_away(frame, label, column):
            why = f"left out: it decides {label}, as an outcome would"
            line = Line("left out", line.text, why)
        lines.append(line)
        if line.role == "dense" and needs_buckets(frame[column]):
            lines.append(bucket_line(column))
    return lines


# --- the file -------------------------------------------------------------------------------------


def source_of(path: str) -> FileSource:
    """Return the source that reads a file, chosen by the file's ending.

    Raises:
        ConfigError: the ending is unknown.
    """
    source = source_for(path)
    if source is None:
        endings = ", ".join(ending for kind in FILE_KINDS for ending in kind.endings)
        raise ConfigError(
            f"{path}: unknown kind of file, got {ending_of(path) or 'no ending'!r}. Give a file "
            f"that ends in one of {endings}; after it may stand one of {', '.join(CODECS)}."
        )
    return source


def _named(source: Csv, path: str, columns: Sequence[str] | None) -> Csv:
    """Return the source with names of its columns; SchemaError where the first line is data."""
    first = first_row(source)
    if len(first) == 1 and first[0].startswith("sep="):
        raise SchemaError(
            f"{path}: the first line is a note for spreadsheets, got {first[0]!r}. Remove the line."
        )
    is_data = _is_data(first)
    if columns is not None:
        if len(columns) != len(first):
            raise ConfigError(
                f"{path}: the first line has {len(first)} fields, got {len(columns)} names in "
                "--columns. Give one for each."
            )
        return replace(source, header=not is_data, columns=list(columns))
    if is_data:
        names = ",".join(f"c{number}" for number in range(1, len(first) + 1))
        raise SchemaError(
            f"{path}: the first line is data and not a header, got {_shortened(first)}. Name the "
            f"columns: --columns {names} (one of them is the --label)."
        )
    repeated = sorted({name for name in first if first.count(name) > 1})
    if repeated:
        raise SchemaError(
            f"{path}: columns {repeated} appear twice in the header. Name all {len(first)} columns "
            "with --columns."
        )
    return source


def _is_data(fields: Sequence[str]) -> bool:
    """Return whether a first line is data: a column is not called by a number."""
    number = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)
    return any(number.fullmatch(field.strip()) for field in fields)


def _shortened(fields: Sequence[str]) -> str:
    shown = ", ".join(repr(field) for field in fields[:4])
    if len(fields) > 4:
        return f"{shown}, …"
    return shown


def _first_rows(source: Source) -> pl.DataFrame:
    """Return the first rows of a source."""
    batches: list[pa.RecordBatch] = []
    num_rows = 0
    for batch, _ in source.read():
        part = batch.slice(0, SAMPLE_ROWS - num_rows)
        batches.append(part)
        num_rows += part.num_rows
        if num_rows >= SAMPLE_ROWS:
            break
    table = pa.Table.from_batches(batches, schema=source.schema())
    frame = pl.DataFrame(table)
    frame.columns = table.column_names  # Polars renames a column without a name
    return frame.with_columns((cs.categorical() | cs.enum()).cast(pl.String))


# --- the page -------------------------------------------------------------------------------------


def _page(
    path: str, source: Source, lines: Sequence[Line], labels: pl.Series, proposal: Proposal | None
) -> str:
    order = "in the order of the file; shuffle it first if that order means something"
    if any(line.role == "time" for line in lines):
        order = "in the order of time"
    columns = columns_text(lines)
    if proposal is not None:
        columns = f"{columns}\n{proposal.columns_text()}"
    head = _TEMPLATE.format(
        path=path,
        rows=f"{len(labels):,}",
        columns=columns,
        events=flow(config.describe(source)),
        order=order,
    )
    return head + rest_of_job(lines, len(labels), positive_share(labels), proposal=proposal)


def columns_text(lines: Sequence[Line]) -> str:
    """Return the list of a schema's columns in YAML, with the reason next to each."""
    width = 2 + max(len(line.text) for line in lines if line.role != "left out")
    columns: list[str] = []
    for line in lines:
        if line.role == "left out":
            columns.append(f"    # - {line.text:<{width - 2}}# {line.why}")
        else:
            columns.append(f"    - {line.text:<{width}}# {line.why}")
    return "\n".join(columns)


def rest_of_job(
    lines: Sequence[Line],
    num_rows: int,
    base_rate: float,
    shuffle: int = 0,
    ranked_by: str | None = None,
    proposal: Proposal | None = None,
) -> str:
    """Return what follows the sources of a job: model, tables, and how to train.

    Args:
        lines: the columns.
        num_rows: rows that train.
        base_rate: the share of positives among them.
        shuffle: as in the job.
        ranked_by: column of the users whose items are ranked, where labels 0 are drawn; None =
            labels are as they happened, and so are probabilities.
        proposal: of columns that the model may keep itself; None = there is none.
    """
    evict = ""
    if any(line.role == "time" for line in lines):
        evict = "  # evict: {kind: ttl, days: 90}             # rows not seen for so long go\n"
    batch_size = _batch_size(num_rows)
    fit = f"epochs: 10, batch_size: {batch_size}"
    model_proposal = ""
    fit_proposal = ""
    if proposal is not None:
        model_proposal = proposal.model_text()
        fit_proposal = f"#kept fit: {{batch_size: {batch_size}}}\n"
    if shuffle:
        fit = f"{fit}, shuffle: {shuffle}"
    metrics = "auc, log_loss"
    stop = _LOG_LOSS
    if ranked_by is not None:
        metrics = f"auc, {quoted(f'gauc@{ranked_by}')}, log_loss"
        stop = _RANKING
    rate = ""
    if 0 < base_rate < 1:
        rate = f"base_rate: {base_rate:.2g}{_BASE_RATE}"
    return (
        _REST.format(
            model_proposal=model_proposal, base_rate=rate, evict=evict, fit=fit, metrics=metrics
        )
        + fit_proposal
        + stop
        + "output: runs/job\n"
    )


def flow(value: object) -> str:
    """Return plain values as YAML on one line."""
    if isinstance(value, Mapping):
        members = [f"{key}: {flow(member)}" for key, member in value.items()]
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(flow(item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(str(value))


def _batch_size(num_rows: int) -> int:
    """Return a hundredth of the rows as a power of two, from 128 to 1024.

    A small file needs small batches, or training has too few steps.
    """
    size = 128
    while size < 1024 and size * 200 <= num_rows:
        size *= 2
    return size


_TEMPLATE = """\
# A first job for {path}, drafted from its first {rows} rows. Read it, correct it, then:
#   hotbed inspect job.yaml
#   hotbed train job.yaml
schema:
  columns:
{columns}

# The rows, {order}: the first 80 % train, the rest validates.
train: {{kind: slice, stop: 0.8, source: &events {events}}}
valid: {{kind: slice, start: 0.8, source: *events}}
"""

_REST = """
model: {{kind: dcnv2, num_cross_layers: 2, hidden: [128, 64], dropout: 0.1}}{model_proposal}
{base_rate}
tables:
  dim: 16
  rule: {{kind: adagrad, lr: 0.05}}
  # admit: {{kind: min_count, count: 2}}         # an id gets a row when it is seen twice
{evict}  # overrides: {{some_table: {{dim: 4}}}}

optimizer: {{kind: adam, lr: 1e-3}}            # of the dense network
metrics: [{metrics}]
fit: {{{fit}}}    # device: cuda computes the network on a GPU, rows stay in memory
"""

_BASE_RATE = "    # of positives; the model predicts it before it has learned anything\n"

_LOG_LOSS = """\
# Training ends when the validation's log loss rises; the epoch before it is kept.
callbacks:
  - {kind: early_stopping, metric: log_loss, patience: 1}
  - {kind: best_weights, metric: log_loss}
"""

_RANKING = """\
# Rows with the label 0 are drawn, so the order of items counts and not their probability: training
# ends when the validation's AUC does not rise; the epoch before it is kept.
callbacks:
  - {kind: early_stopping, metric: auc, patience: 1}
  - {kind: best_weights, metric: auc}
"""
