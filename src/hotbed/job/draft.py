# SPDX-License-Identifier: Apache-2.0
"""A first job for a data file, drafted by looking at its columns. A person reads and corrects it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from hotbed.connectors.delimited import Csv
from hotbed.connectors.files import SAMPLE_BYTES
from hotbed.connectors.jsonl import Jsonl
from hotbed.connectors.parquet import Parquet
from hotbed.connectors.source import Source
from hotbed.errors import ConfigError, SchemaError

SAMPLE_ROWS = 100_000
NEIGHBOURS = 200
"""Most frequent values of a column of whole numbers that tell amounts from names."""
FAR = 10
"""Standard deviations from the mean that a dense feature keeps: one value in ten thousand can have
a hundred.
"""
_LABEL = re.compile(
    r"(is_?)?(label|click(ed)?|target|y|liked?|buy|bought|purchased?|conver(sion|ted)|rating|stars|score)"
)
_TIME = re.compile(r"(.*_)?(time(stamp)?|ts|at|date|datetime|created|hour)", re.IGNORECASE)
_EPOCHS = (("s", 1e8, 1e10), ("ms", 1e11, 1e13), ("us", 1e14, 1e16), ("ns", 1e17, 1e19))
_NAMES = re.compile(
    r"(.*_)?(id|code|type|category|user|item|movie|film|product|ad|campaign|site|app|device|shop|store|brand|city|country|"
    r"region|zip|session)(_.*)?|.*(Id|ID)"
)
# Criteo and its relatives call integer categories C1 to C26.
_CATEGORIES = re.compile(r"C\d+|cat(egorical)?_?\d*|.*_(cat|idx|index|key|hash)", re.IGNORECASE)
_AMOUNTS = re.compile(
    r"(.*_)?(num|number|count|cnt|sum|total|avg|mean|age|price|cost|amount|income|salary|wage|gains?|losse?s?|"
    r"dividends?|revenue|balance|duration|seconds|minutes|hours|days|weeks|months|years?|length|len|size|width|height|"
    r"weight|distance|rate|ratio|percent|pct|rank)(_.*)?|I\d+",
    re.IGNORECASE,
)
_LISTS = re.compile(r"^[^|;]+(\|[^|;]+)+$")


@dataclass(frozen=True)
class _Line:
    """One column as the draft has it: `text` in YAML, and why; `role` empty = left out."""

    role: str
    text: str
    why: str


def draft(path: str, label: str | None = None, columns: Sequence[str] | None = None) -> str:
    """A commented job in YAML for a csv, tsv, jsonl or parquet file.

    Roles are guessed from names, types and values of the first 100,000 rows.

    Args:
        path: the file.
        label: the column to predict, where its name does not tell.
        columns: names of the columns of a csv or tsv file whose first line is not a header, or has
            names that cannot be used.

    Raises ConfigError for another kind of file, SchemaError where nothing looks like a label, or
    where the first line of a csv file is data.

    Example: `print(draft("ratings.csv", label="rating"))`
    """
    source, spec = source_of(path)
    if isinstance(source, Csv):
        source, spec = _named(source, spec, columns)
    elif columns is not None:
        raise ConfigError(
            f"{path}: the file names its columns, got --columns {','.join(columns)}. Leave it out."
        )
    frame = _sample(source)
    if not len(frame):
        raise SchemaError(f"{path}: no rows — there is nothing to look at — give a file with data")
    name = label or _find_label(frame)
    if name is None or name not in frame.columns:
        raise SchemaError(_no_label(path, name, frame.columns))
    time = _find_time(frame, name)
    lines = [_label_line(frame[name]), *([_time_line(frame[time])] if time else [])]
    lines += [
        _feature_line(frame[column]) for column in frame.columns if column not in (name, time)
    ]
    if not any(line.role in ("id", "dense") for line in lines):
        raise SchemaError(
            f"{path}: no column to predict from — received {', '.join(frame.columns)} — give "
            "features too"
        )
    return _page(path, spec, lines, len(frame), _order(frame, time))


def _no_label(path: str, name: str | None, columns: Sequence[str]) -> str:
    choices = ", ".join(columns)
    if name is not None:
        return f"{path}: there is no column {name!r} to predict, got {choices}. Name one of them with --label."
    return (
        f"{path}: which column is to be predicted? — received columns {choices} — name it with "
        "--label. If every "
        "row is something that happened (a click, a play, a purchase), there is no such column "
        "yet: add one that is "
        "1 in these rows, and rows with 0 for what was shown and not chosen, or for a few items "
        "drawn at random for "
        "each event"
    )


def _named(source: Csv, spec: str, columns: Sequence[str] | None) -> tuple[Csv, str]:
    """The source with names of columns, and as YAML; SchemaError where the first line is data."""
    first = _first_line(source)
    is_data = _is_data(first)
    if columns is None:
        if is_data:
            names = ",".join(f"c{number}" for number in range(1, len(first) + 1))
            raise SchemaError(
                f"{source.path}: the first line is data and not a header, got "
                f"{_shortened(first)}. Name the columns: "
                f"--columns {names} (one of them is the --label)."
            )
        twice = sorted({name for name in first if first.count(name) > 1})
        if twice:
            raise SchemaError(
                f"{source.path}: columns {twice} appear twice in the header. Name all "
                f"{len(first)} columns with --columns."
            )
        return source, spec
    if len(columns) != len(first):
        raise ConfigError(
            f"{source.path}: the first line has {len(first)} fields, got {len(columns)} names in "
            "--columns. "
            "Give one for each."
        )
    named = replace(source, header=not is_data, columns=list(columns))
    header = "" if named.header else "header: false, "
    names = ", ".join(_quoted(name) for name in columns)
    return named, f"{spec[:-1]}, {header}columns: [{names}]}}"


def _first_line(source: Csv) -> list[str]:
    with pa.input_stream(source.files()[0]) as stream:
        text = stream.read(SAMPLE_BYTES).decode(source.encoding, errors="replace")
    return next(csv.reader(text.splitlines(), delimiter=source.delimiter), [])


def _is_data(fields: Sequence[str]) -> bool:
    """Whether the fields of a first line are values: a number among them, which no column is
    called.
    """
    return any(
        re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", field.strip(), re.IGNORECASE)
        for field in fields
    )


def _shortened(fields: Sequence[str]) -> str:
    shown = ", ".join(repr(field) for field in fields[:4])
    return shown if len(fields) <= 4 else f"{shown}, …"


def source_of(path: str) -> tuple[Source, str]:
    """What reads a file, by its ending, and that as YAML. Raises ConfigError for an ending that
    tells nothing.
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes] or [""]
    kind = next((suffix for suffix in suffixes[::-1] if suffix not in (".gz", ".zst", ".bz2")), "")
    if kind in (".csv", ".txt"):
        return Csv(path), f"{{kind: csv, path: {_quoted(path)}}}"
    if kind == ".tsv":
        return Csv(path, delimiter="\t"), f'{{kind: csv, path: {_quoted(path)}, delimiter: "\\t"}}'
    if kind in (".jsonl", ".json", ".ndjson"):
        return Jsonl(path), f"{{kind: jsonl, path: {_quoted(path)}}}"
    if kind in (".parquet", ".pq"):
        return Parquet(path), f"{{kind: parquet, path: {_quoted(path)}}}"
    raise ConfigError(
        f"{path}: unknown kind of file — received {kind or 'no ending'!r} — give csv, tsv, jsonl "
        "or parquet"
    )


def _sample(source: Source) -> pl.DataFrame:
    batches: list[pa.RecordBatch] = []
    rows = 0
    for batch, _ in source.read():
        batches.append(batch.slice(0, SAMPLE_ROWS - rows))
        rows += batches[-1].num_rows
        if rows >= SAMPLE_ROWS:
            break
    table = pa.Table.from_batches(batches, schema=source.schema())
    frame = pl.DataFrame(table)
    frame.columns = table.column_names  # Polars renames a column without a name
    return frame


def _find_label(frame: pl.DataFrame) -> str | None:
    named = [name for name in frame.columns if _LABEL.fullmatch(name.lower())]
    binary = [
        name
        for name in frame.columns
        if not frame[name].dtype.is_nested() and frame[name].n_unique() == 2
    ]
    both = [name for name in named if name in binary]
    plain = binary if len(binary) == 1 else [name for name in frame.columns[-1:] if name in binary]
    return next(iter([*both, *named, *plain]), None)


def _find_time(frame: pl.DataFrame, label: str) -> str | None:
    for name in frame.columns:
        if name != label and (
            frame[name].dtype.is_temporal() or (_TIME.fullmatch(name) and _unit(frame[name]))
        ):
            return name
    return None


def _unit(values: pl.Series) -> str | None:
    """The unit that makes these numbers or texts times of our days; None = they are no times."""
    known = values.drop_nulls()
    if values.dtype.is_temporal():
        return "us"
    if values.dtype.is_numeric() and len(known):
        low, high = (
            float(known.cast(pl.Float64).quantile(share, "nearest") or 0) for share in (0.0, 1.0)
        )
        return next((unit for unit, least, most in _EPOCHS if least <= low and high < most), None)
    if values.dtype == pl.String and len(known):
        iso = known.head(100).str.contains(r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$")
        return "iso" if iso.all() else None
    return None


def _label_line(values: pl.Series) -> _Line:
    known = values.drop_nulls()
    name = _quoted(values.name)
    if values.dtype == pl.String:
        rarest = str(known.value_counts().sort("count", values.name)[values.name][0])
        share = _share(known == rarest)
        return _Line(
            "label",
            f"{{kind: label, name: {name}, positive: {_quoted(rarest)}}}",
            f"1 where it is this text: {share:.1%}",
        )
    if known.n_unique() <= 2 and set(known.cast(pl.Float64).unique()) <= {0.0, 1.0}:
        return _Line(
            "label", f"{{kind: label, name: {name}}}", f"1 in {_share(known == 1):.1%} of the rows"
        )
    numbers = known.cast(pl.Float64)
    values_up = numbers.unique().sort()
    threshold: float = next((v for v in values_up if _share(numbers >= v) <= 0.5), values_up[-1])
    share = _share(numbers >= threshold)
    text = f"{{kind: label, name: {name}, threshold: {threshold:g}}}"
    return _Line("label", text, f"1 where it is at least this: {share:.1%} of the rows")


def _share(true: pl.Series) -> float:
    return float(true.sum()) / max(len(true), 1)


def _time_line(values: pl.Series) -> _Line:
    unit = _unit(values)
    shown = "" if unit in ("us",) and values.dtype.is_temporal() else f", unit: {unit}"
    known = values.drop_nulls()
    if values.dtype.is_numeric():
        factor = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1e-3}[unit or "s"]
        known = (known * factor).cast(pl.Int64).cast(pl.Datetime("us"))
    first, *_, last = known.sort().to_list() * 2
    span = f"{first} to {last}"
    return _Line("time", f"{{kind: time, name: {_quoted(values.name)}{shown}}}", span)


def _feature_line(values: pl.Series) -> _Line:
    name = _quoted(values.name)
    known = values.drop_nulls()
    missing = f", {values.null_count() / len(values):.1%} missing" if values.null_count() else ""
    if values.dtype.is_nested():
        return _Line("id", f"{{kind: id, name: {name}, pooling: mean}}", f"lists{missing}")
    distinct = known.n_unique()
    if distinct <= 1:
        return _Line("", name, f"left out: always the same value{missing}")
    if "weight" in values.name.lower() and values.dtype.is_float():
        return _Line(
            "",
            f"{{kind: weight, name: {name}}}",
            "left out: looks like the weight of a sample; use it if it is one",
        )
    if values.dtype == pl.String:
        if _share(known.str.contains(_LISTS.pattern)) > 0.1:
            text = f'{{kind: id, name: {name}, pooling: mean, transforms: [{{kind: split, delimiter: "|"}}]}}'
            return _Line("id", text, f"lists joined by |{missing}")
        if distinct > 0.95 * len(known) and len(known) > 100:
            return _Line(
                "",
                f"{{kind: id, name: {name}}}",
                f"left out: nearly every row has its own text{missing}",
            )
        return _Line("id", f"{{kind: id, name: {name}}}", f"{distinct:,} different texts{missing}")
    if values.dtype.is_integer() and distinct == len(values) > 100:
        return _Line("", f"{{kind: id, name: {name}}}", "left out: every row has its own number")
    if values.dtype == pl.Boolean:
        return _Line("id", f"{{kind: id, name: {name}}}", f"{distinct:,} different values{missing}")
    why = _why_id(values, distinct) if values.dtype.is_integer() else ""
    if why:
        return _Line("id", f"{{kind: id, name: {name}}}", f"{why}{missing}")
    return _dense_line(values)


def _why_id(values: pl.Series, distinct: int) -> str:
    """Why whole numbers name things, in words; "" where they are amounts."""
    if _NAMES.fullmatch(values.name) or _CATEGORIES.fullmatch(values.name) or distinct <= 100:
        return f"{distinct:,} different values"
    if _AMOUNTS.fullmatch(values.name) or _looks_like_amount(values.drop_nulls()):
        return ""
    return f"{distinct:,} different values, frequent ones anywhere among them; {{kind: dense}} if they are amounts"


def _looks_like_amount(values: pl.Series) -> bool:
    """Whether neighbouring numbers are about equally frequent, as in counts and measures, or most
    are 0.

    Numbers that name things are frequent or rare whatever their neighbours are.
    """
    counts = values.rename("value").value_counts()
    if counts["count"].max() > 0.5 * len(values):  # type: ignore[operator]
        return True
    often = counts.sort("count", "value", descending=[True, False]).head(NEIGHBOURS).sort("value")
    ranks = often["count"].rank().to_numpy()
    if not np.ptp(ranks):
        return True
    return float(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) > 0.5


def _dense_line(values: pl.Series) -> _Line:
    known = values.drop_nulls()
    missing = f", {values.null_count() / len(values):.1%} missing" if values.null_count() else ""
    numbers = known.cast(pl.Float64).to_numpy()
    low, median, high = (
        float(np.quantile(numbers, share, method="nearest")) for share in (0.0, 0.5, 1.0)
    )
    steps = ["{kind: fill_missing, statistic: median}"] if values.null_count() else []
    why = f"numbers from {low:g} to {high:g}"
    if low >= 0 and high > 100 * max(median, 1e-9):
        steps.append("log")
        numbers = np.log1p(numbers)
    spread = float(numbers.std()) or 1.0
    farthest = float(np.abs(numbers - numbers.mean()).max()) / spread
    if farthest <= FAR:
        steps.append("normalize")
    elif high <= FAR and low >= -FAR:
        steps = [step for step in steps if step != "log"]
        why += "; nearly always the same, so they stay as they are"
    else:
        steps += ["normalize", f"{{kind: clip, low: -{FAR}, high: {FAR}}}"]
    text = f"{{kind: dense, name: {_quoted(values.name)}, transforms: [{', '.join(steps)}]}}"
    return _Line(
        "dense", text if steps else text.replace(", transforms: []", ""), f"{why}{missing}"
    )


def _order(frame: pl.DataFrame, time: str | None) -> str | None:
    """The column to sort by, where the rows are not yet in the order of time."""
    return time if time is not None and not frame[time].is_sorted() else None


def _page(path: str, spec: str, lines: Sequence[_Line], rows: int, sort_by: str | None) -> str:
    has_time = any(line.role == "time" for line in lines)
    width = max(len(line.text) for line in lines if line.role) + 2
    columns = "\n".join(
        f"    - {line.text:<{width}}# {line.why}"
        if line.role
        else f"    # - {line.text:<{width - 2}}# {line.why}"
        for line in lines
    )
    events = f"{{kind: sort, by: {_quoted(sort_by)}, source: {spec}}}" if sort_by else spec
    order = {
        True: "in the order of time",
        False: "in the order of the file; shuffle it first if that order means something",
    }
    evict = (
        "  # evict: {kind: ttl, days: 90}             # rows not seen for so long go\n"
        if has_time
        else ""
    )
    return _TEMPLATE.format(
        batch_size=_batch_size(rows),
        path=path,
        rows=f"{rows:,}",
        columns=columns,
        events=events,
        order=order[has_time],
        evict=evict,
    )


def _batch_size(rows: int) -> int:
    """A hundredth of the rows, as a power of two from 128 to 1024: a few rows need many steps."""
    size = 128
    while size < 1024 and size * 200 <= rows:
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

model: {{kind: dcnv2, num_cross_layers: 2, hidden: [128, 64], dropout: 0.1}}

tables:
  dim: 16
  rule: {{kind: adagrad, lr: 0.05}}
  # admit: {{kind: min_count, count: 2}}         # an id gets a row when it is seen for the second time
{evict}  # overrides: {{some_table: {{dim: 4}}}}

optimizer: {{kind: adam, lr: 1e-3}}            # of the dense network
metrics: [auc, log_loss]
fit: {{epochs: 10, batch_size: {batch_size}}}
# Training ends when the validation's log loss rises; the epoch before it is kept.
callbacks: [{{kind: early_stopping, metric: log_loss, patience: 1}}, {{kind: best_weights, metric: log_loss}}]
output: runs/job
"""


def _quoted(text: str) -> str:
    """As YAML reads it back: bare where that is safe."""
    safe = re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.lower() not in (
        "true",
        "false",
        "null",
    )
    return text if safe else json.dumps(text, ensure_ascii=False)
