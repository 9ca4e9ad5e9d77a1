# SPDX-License-Identifier: Apache-2.0
"""Drafts for files as data frames, spreadsheets and databases write them: they run, or say why."""

from __future__ import annotations

import datetime as dt
import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch absent")

from hotbed.errors import ConfigError, DataError
from hotbed.job.draft import draft
from hotbed.job.file import parse_value
from hotbed.job.job import Job

NUM_ROWS = 300


def frame(**columns: Any) -> pl.DataFrame:
    """Return rows of users, items, prices, times and clicks; `columns` in place of some of these."""
    rows = range(NUM_ROWS)
    start = dt.datetime(2024, 1, 1)
    own = {
        "user_id": [row % 7 for row in rows],
        "item": [f"item {row % 9}" for row in rows],
        "price": [row % 40 * 1.5 for row in rows],
        "at": [start + dt.timedelta(hours=row) for row in rows],
        "click": [row * 7 % 10 < 3 for row in rows],
    }
    return pl.DataFrame({**own, **columns})


def first_batch(path: Path) -> tuple[Job, str, Any]:
    """Return the drafted job, its text, and the first batch of its training rows."""
    text = draft(str(path))
    job = Job.from_json(parse_value(text))
    return job, text, next(iter(job.dataset(job.train, job.fitted())))


def as_csv(rows: pl.DataFrame, **options: Any) -> bytes:
    return rows.write_csv(datetime_format="%Y-%m-%d %H:%M:%S", **options).encode()


def with_index(rows: pl.DataFrame) -> bytes:
    lines = as_csv(rows).decode().splitlines()
    numbered = [f",{lines[0]}", *(f"{row},{line}" for row, line in enumerate(lines[1:]))]
    return "\n".join(numbered).encode()


MISSING = frame(price=[None if row % 5 == 0 else row * 1.5 for row in range(NUM_ROWS)])


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("index.csv", with_index(frame()), {}),
        ("tab.csv", as_csv(frame(), separator="\t"), {"delimiter": "\t"}),
        ("semicolon.txt", as_csv(frame(), separator=";"), {"delimiter": ";"}),
        ("pipe.tsv", as_csv(frame(), separator="|"), {"delimiter": "|"}),
        ("hive.csv", as_csv(frame(), separator="\x01"), {"delimiter": "\x01"}),
        ("bom.csv", b"\xef\xbb\xbf" + as_csv(frame(), quote_style="always"), {}),
        ("crlf.csv", as_csv(frame(), line_terminator="\r\n"), {}),
        ("mysql.csv", as_csv(MISSING, null_value=r"\N"), {"null_values": ("", r"\N")}),
        ("sql.csv", as_csv(MISSING, null_value="NULL"), {"null_values": ("", "NULL")}),
        ("pandas.csv", as_csv(MISSING, null_value="NaN"), {"null_values": ("", "NaN")}),
        ("empty.csv", as_csv(MISSING, null_value=""), {}),
        ("PACKED.CSV.GZ", gzip.compress(as_csv(frame())), {}),
        ("packed.csv", gzip.compress(as_csv(frame())), {}),
        ("postgres.csv", as_csv(frame()).replace(b"true", b"t").replace(b"false", b"f"), {}),
    ],
)
def test_a_draft_of_delimited_text_runs(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any]
) -> None:
    (tmp_path / name).write_bytes(content)
    job, text, batch = first_batch(tmp_path / name)
    source = job.train.source
    if hasattr(source, "source"):
        source = source.source
    for option, value in {"delimiter": ",", "null_values": ("",), **options}.items():
        assert getattr(source, option) == value
    assert list(batch.ids) == ["user_id", "item"]
    assert list(batch.dense) == ["price"]
    expected = [float(click) for click in frame()["click"]][: batch.num_samples]
    assert batch.labels["click"].tolist() == expected
    if name == "index.csv":
        assert "left out: no name, or that of the index of a data frame" in text


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("true", "false"),
    [(True, False), ("Yes", "No"), ("true", "false"), (Decimal(1), Decimal(0)), (1.0, 0.0)],
)
def test_a_label_of_two_values_is_drafted_in_every_format(
    tmp_path: Path, ending: str, true: Any, false: Any
) -> None:
    clicks = [row * 7 % 10 < 6 for row in range(NUM_ROWS)]  # most are positive
    values = [true if click else false for click in clicks]
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        table = pa.table({"user": [row % 7 for row in range(NUM_ROWS)], "click": values})
        pq.write_table(table, path)
    elif ending == "csv":
        rows = [f"{row % 7},{value}" for row, value in enumerate(values)]
        path.write_text("\n".join(["user,click", *rows]))
    else:
        plain = [float(value) if isinstance(value, Decimal) else value for value in values]
        rows = [json.dumps({"user": row % 7, "click": value}) for row, value in enumerate(plain)]
        path.write_text("\n".join(rows))
    _, _, batch = first_batch(path)
    expected = [float(click) for click in clicks][: batch.num_samples]
    assert batch.labels["click"].tolist() == expected


def test_ids_with_a_point_and_decimal_commas_are_left_out_by_name(tmp_path: Path) -> None:
    users = [None if row % 5 == 0 else float(row % 7) for row in range(NUM_ROWS)]
    prices = [f"{row % 40},5" for row in range(NUM_ROWS)]
    (tmp_path / "a.csv").write_bytes(as_csv(frame(user_id=users, price=prices), separator=";"))
    _, text, batch = first_batch(tmp_path / "a.csv")
    assert list(batch.ids) == ["item"]
    assert "ids as numbers with a point, such as 1.0; write integers" in text
    assert "numbers with a decimal comma, such as 0,5; write a point" in text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("utf16.csv", as_csv(frame()).decode().encode("utf-16"), "it is UTF-16 text"),
        ("excel.csv", b"PK\x03\x04", "a zip archive or an Excel file"),
        ("latin.csv", "user,label\nä,1\nü,0\n".encode("latin-1"), "encoding='latin-1'"),
        ("sep.csv", b"sep=;\n" + as_csv(frame(), separator=";"), "a note for spreadsheets"),
        ("a.csv.zip", b"PK\x03\x04", r"unknown kind of file, got '\.zip'"),
        ("label.jsonl", b'{"label":[1],"user":1}\n{"label":[0],"user":2}\n', "cannot be a label"),
        ("label.csv", b'label;user\n"1,5";1\n"2,5";2\n', "cannot be a label, got numbers with a d"),
    ],
)
def test_a_file_that_cannot_be_drafted_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, ConfigError), match=said):
        draft(str(tmp_path / name))
