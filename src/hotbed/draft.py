# SPDX-License-Identifier: Apache-2.0
"""A first job for a data file, drafted by looking at its columns. A person reads and corrects it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa

from hotbed.connectors.base import Source
from hotbed.connectors.delimited import Csv
from hotbed.connectors.files import Parquet
from hotbed.connectors.lines import Jsonl
from hotbed.errors import ConfigError, SchemaError

SAMPLE_ROWS = 100_000
_LABEL = re.compile(
    r"(is_?)?(label|click(ed)?|target|y|liked?|buy|bought|purchased?|conver(sion|ted)|rating|stars|score)"
)
_TIME = re.compile(r"(.*_)?(time(stamp)?|ts|at|date|datetime|created|hour)", re.IGNORECASE)
_EPOCHS = (("s", 1e8, 1e10), ("ms", 1e11, 1e13), ("us", 1e14, 1e16), ("ns", 1e17, 1e19))
_NAMES = re.compile(
    r"(.*_)?(id|code|type|category|user|item|movie|film|product|ad|campaign|site|app|device|shop|store|brand|city|country|"
    r"region|zip|session)(_.*)?|.*(Id|ID)"
)
_LISTS = re.compile(r"^[^|;]+(\|[^|;]+)+$")


@dataclass(frozen=True)
class _Line:
    """One column as the draft has it: `text` in YAML, and why; `role` empty = left out."""

    role: str
    text: str
    why: str


def draft(path: str, label: str | None = None) -> str:
    """A commented job in YAML for a csv, tsv, jsonl or parquet file.

    Roles are guessed from names, types and values of the first 100,000 rows. `label`: the column to predict, where
    its name does not tell. Raises ConfigError for another kind of file, SchemaError when nothing looks like a label.

    Example: `print(draft("ratings.csv", label="rating"))`
    """
    source, spec = source_of(path)
    frame = _sample(source)
    if not len(frame):
        raise SchemaError(f"{path}: no rows — there is nothing to look at — give a file with data")
    name = label or _find_label(frame)
    if name is None or name not in frame.columns:
        raise SchemaError(f"{path}: which column is to be predicted? — received {name!r} — "
                          f"name it with --label: one of {', '.join(frame.columns)}")  # fmt: skip
    time = _find_time(frame, name)
    lines = [_label_line(frame[name]), *([_time_line(frame[time])] if time else [])]
    lines += [_feature_line(frame[column]) for column in frame.columns if column not in (name, time)]
    if not any(line.role in ("id", "dense") for line in lines):
        raise SchemaError(
            f"{path}: no column to predict from — received {', '.join(frame.columns)} — give features too"
        )
    return _page(path, spec, lines, len(frame), _order(frame, time))


def source_of(path: str) -> tuple[Source, str]:
    """What reads a file, by its ending, and that as YAML. Raises ConfigError for an ending that tells nothing."""
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
        f"{path}: unknown kind of file — received {kind or 'no ending'!r} — give csv, tsv, jsonl or parquet"
    )


def _sample(source: Source) -> pl.DataFrame:
    batches: list[pa.RecordBatch] = []
    rows = 0
    for batch, _ in source.read():
        batches.append(batch.slice(0, SAMPLE_ROWS - rows))
        rows += batches[-1].num_rows
        if rows >= SAMPLE_ROWS:
            break
    return pl.DataFrame(pa.Table.from_batches(batches, schema=source.schema()))


def _find_label(frame: pl.DataFrame) -> str | None:
    named = [name for name in frame.columns if _LABEL.fullmatch(name.lower())]
    binary = [name for name in frame.columns if not frame[name].dtype.is_nested() and frame[name].n_unique() == 2]
    both = [name for name in named if name in binary]
    plain = binary if len(binary) == 1 else [name for name in frame.columns[-1:] if name in binary]
    return next(iter([*both, *named, *plain]), None)


def _find_time(frame: pl.DataFrame, label: str) -> str | None:
    for name in frame.columns:
        if name != label and (frame[name].dtype.is_temporal() or (_TIME.fullmatch(name) and _unit(frame[name]))):
            return name
    return None


def _unit(values: pl.Series) -> str | None:
    """The unit that makes these numbers or texts times of our days; None = they are no times."""
    known = values.drop_nulls()
    if values.dtype.is_temporal():
        return "us"
    if values.dtype.is_numeric() and len(known):
        low, high = (float(known.cast(pl.Float64).quantile(share, "nearest") or 0) for share in (0.0, 1.0))
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
        return _Line("label", f"{{kind: label, name: {name}}}", f"1 in {_share(known == 1):.1%} of the rows")
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
    name, known = _quoted(values.name), values.drop_nulls()
    missing = f", {values.null_count() / len(values):.1%} missing" if values.null_count() else ""
    if values.dtype.is_nested():
        return _Line("id", f"{{kind: id, name: {name}, pooling: mean}}", f"lists{missing}")
    distinct = known.n_unique()
    if distinct <= 1:
        return _Line("", name, f"left out: always the same value{missing}")
    if "weight" in values.name.lower() and values.dtype.is_float():
        return _Line(
            "", f"{{kind: weight, name: {name}}}", "left out: looks like the weight of a sample; use it if it is one"
        )
    if values.dtype == pl.String:
        if _share(known.str.contains(_LISTS.pattern)) > 0.1:
            text = f'{{kind: id, name: {name}, pooling: mean, transforms: [{{kind: split, delimiter: "|"}}]}}'
            return _Line("id", text, f"lists joined by |{missing}")
        if distinct > 0.95 * len(known) and len(known) > 100:
            return _Line("", f"{{kind: id, name: {name}}}", f"left out: nearly every row has its own text{missing}")
        return _Line("id", f"{{kind: id, name: {name}}}", f"{distinct:,} different texts{missing}")
    if values.dtype.is_integer() and distinct == len(values) > 100:
        return _Line("", f"{{kind: id, name: {name}}}", "left out: every row has its own number")
    if values.dtype == pl.Boolean or _is_id(values, distinct):
        return _Line("id", f"{{kind: id, name: {name}}}", f"{distinct:,} different values{missing}")
    numbers = known.cast(pl.Float64)
    low, median, high = (float(numbers.quantile(share, "nearest") or 0) for share in (0.0, 0.5, 1.0))
    steps = ["{kind: fill_missing, statistic: median}"] if values.null_count() else []
    steps += ["log"] if low >= 0 and high > 100 * max(median, 1e-9) else []
    text = f"{{kind: dense, name: {name}, transforms: [{', '.join([*steps, 'normalize'])}]}}"
    return _Line("dense", text, f"numbers from {low:g} to {high:g}{missing}")


def _is_id(values: pl.Series, distinct: int) -> bool:
    """Whole numbers that name things: by their name, or because few of them are used."""
    return values.dtype.is_integer() and (_NAMES.fullmatch(values.name) is not None or distinct <= 100)


def _order(frame: pl.DataFrame, time: str | None) -> str | None:
    """The column to sort by, where the rows are not yet in the order of time."""
    return time if time is not None and not frame[time].is_sorted() else None


def _page(path: str, spec: str, lines: Sequence[_Line], rows: int, sort_by: str | None) -> str:
    has_time = any(line.role == "time" for line in lines)
    width = max(len(line.text) for line in lines if line.role) + 2
    columns = "\n".join(
        f"    - {line.text:<{width}}# {line.why}" if line.role else f"    # - {line.text:<{width - 2}}# {line.why}"
        for line in lines
    )
    events = f"{{kind: sort, by: {_quoted(sort_by)}, source: {spec}}}" if sort_by else spec
    order = {
        True: "in the order of time",
        False: "in the order of the file; shuffle it first if that order means something",
    }
    evict = "  # evict: {kind: ttl, days: 90}             # rows not seen for so long go\n" if has_time else ""
    return _TEMPLATE.format(
        path=path, rows=f"{rows:,}", columns=columns, events=events, order=order[has_time], evict=evict
    )


_TEMPLATE = """\
# A first job for {path}, drafted from its first {rows} rows. Read it, correct it, then:
#   hotbed inspect job.yaml
#   hotbed train job.yaml --set fit.epochs=2
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
fit: {{epochs: 1, batch_size: 1024}}
output: runs/job
"""


def _quoted(text: str) -> str:
    """As YAML reads it back: bare where that is safe."""
    safe = re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.lower() not in ("true", "false", "null")
    return text if safe else json.dumps(text, ensure_ascii=False)
