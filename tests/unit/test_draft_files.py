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

import hotbed as hb
from hotbed.errors import ConfigError, DataError, SchemaError
from hotbed.job.drafting.draft import draft
from hotbed.job.job import Job
from hotbed.yaml_files import parse_value

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


START = dt.datetime(2024, 3, 1, 7, 30)
MOMENTS = [START + dt.timedelta(minutes=37 * row, milliseconds=row) for row in range(NUM_ROWS)]
SECONDS = [int(moment.replace(tzinfo=dt.UTC).timestamp()) for moment in MOMENTS]
TEXTS = [f"text {row % 5}" for row in range(NUM_ROWS)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("split_id", [row % 2 for row in range(NUM_ROWS)]),
        ("is_train", [row % 3 > 0 for row in range(NUM_ROWS)]),
        ("isTest", [row % 3 for row in range(NUM_ROWS)]),
        ("cv_fold", [row % 5 for row in range(NUM_ROWS)]),
        ("dataset", ["a" if row < 200 else "b" for row in range(NUM_ROWS)]),
        ("which", ["Train" if row < 200 else "test" for row in range(NUM_ROWS)]),
        ("event_ms", [second * 1000 + row for row, second in enumerate(SECONDS)]),
        ("x", [second * 10**6 for second in SECONDS]),
        ("x", [second * 10**9 for second in SECONDS]),
        ("day", [moment.date() for moment in MOMENTS]),
        ("day", [f"{moment:%Y-%m-%d}" for moment in MOMENTS]),
        ("local", [f"{moment + dt.timedelta(hours=8):%Y-%m-%d %H:%M}" for moment in MOMENTS]),
        ("signupTime", [1_500_000_000 + row % 17 * 86_400 for row in range(NUM_ROWS)]),
        ("signed_up", [dt.date(2020, 1, 1 + row % 17) for row in range(NUM_ROWS)]),
        ("clickTime", [second if row % 3 else None for row, second in enumerate(SECONDS)]),
        ("printed", [f"{moment:%m/%d/%Y %I:%M:%S %p}" for moment in MOMENTS]),
        ("request", [row * 7919 for row in range(NUM_ROWS)]),
        ("request", [None if row == 5 else row * 7919 for row in range(NUM_ROWS)]),
        ("request", [f"{row * 7919:x}" for row in range(NUM_ROWS)]),
        ("shown", [f"N{row}-0 N{row + 1}-1" for row in range(NUM_ROWS)]),
    ],
)
def test_marks_moments_and_keys_are_no_features_and_no_labels(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    """Left out with a reason, whether the file has a label and a time beside them or not."""
    columns = {"user_id": [row % 7 for row in range(NUM_ROWS)], name: values}
    pl.DataFrame(
        {**columns, "at": MOMENTS, "kind": [row * 7 % 10 < 3 for row in range(NUM_ROWS)]}
    ).write_parquet(tmp_path / "a.parquet")
    text = draft(str(tmp_path / "a.parquet"))
    columns_of_job = parse_value(text)["schema"]["columns"]
    assert [column["name"] for column in columns_of_job] == ["kind", "at", "user_id"]
    line = next(line for line in text.splitlines() if line.startswith("    # - ") and name in line)
    assert "# left out: " in line
    assert "a guess" in text  # no name says that `kind` is what to predict
    pl.DataFrame({"text": TEXTS, **columns}).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=r"no column looks like a label|one row of each item"):
        draft(str(tmp_path / "b.parquet"))


@pytest.mark.parametrize("delimiter", ["|", ";", " ", ","])
def test_lists_of_ids_in_a_text_are_split(tmp_path: Path, delimiter: str) -> None:
    lists = [
        delimiter.join(f"N{row + step}" for step in range(row % 4 + 2)) for row in range(NUM_ROWS)
    ]
    titles = [f"How {row} birds, and the fox, met" for row in range(NUM_ROWS)]
    frame(clicked=lists, title=titles).write_parquet(tmp_path / "a.parquet")
    job, text, _ = first_batch(tmp_path / "a.parquet")
    assert job.schema["clicked"].transforms == (hb.transforms.Split(delimiter),)
    assert "- {kind: id, name: title}" in text
    assert "title" not in [column.name for column in job.schema.columns]


def test_the_time_of_events_is_the_most_exact_one_that_no_row_lacks(tmp_path: Path) -> None:
    days = [moment.date() for moment in MOMENTS]
    outcome = [moment if row % 3 else None for row, moment in enumerate(MOMENTS)]
    clicks = [row * 7 % 10 < 3 for row in range(NUM_ROWS)]
    columns = {"converted_at": outcome, "day": days, "at": MOMENTS, "click": clicks, "shop": TEXTS}
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    assert parse_value(draft(str(tmp_path / "a.parquet")))["schema"]["columns"][1]["name"] == "at"
