# SPDX-License-Identifier: Apache-2.0
"""Derived columns from files to files, against plain Python over the raw rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import hotbed as hb
from hotbed.errors import ConfigError, SchemaError
from hotbed.prepare import Preparation, Previous, Session, TimeDifference, prepare
from hotbed.prepare.partitions import partitions_of

NUM_ROWS = 300
KEYS: dict[str, str] = {"by": "user", "time": "at"}


def raw_rows() -> pl.DataFrame:
    rng = np.random.default_rng(9)
    return pl.DataFrame(
        {
            "number": np.arange(NUM_ROWS),
            "user": rng.choice(np.array(["ann", "bob", "cai", None], object), NUM_ROWS).tolist(),
            "film": [f"film {number}" for number in rng.integers(0, 30, NUM_ROWS)],
            "at": rng.integers(0, 400, NUM_ROWS) * 10,
        }
    )


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hb.sources.Csv:
    """Two files, in chunks of 13 rows."""
    small = partial(partitions_of, chunk_rows=13)
    monkeypatch.setattr("hotbed.prepare.run.partitions_of", small)
    for number, part in enumerate(raw_rows().iter_slices(200)):
        part.write_csv(tmp_path / f"raw-{number}.csv")
    return hb.sources.Csv(str(tmp_path / "raw-*.csv"))


def prepared(
    source: hb.sources.Csv, folder: Path, columns: list[Any], derivations: list[Any]
) -> pl.DataFrame:
    schema = hb.Schema([hb.Dense("number"), hb.Time("at"), hb.Id("user"), *columns])
    job = Preparation(source, schema, derivations, output=str(folder / "prepared"))
    prepare(job)
    return pl.read_parquet(folder / "prepared" / "train" / "*.parquet")


def test_derived_columns_are_encoded_like_raw_ones(source: hb.sources.Csv, tmp_path: Path) -> None:
    missing = hb.transforms.FillMissing(-1.0)
    word = hb.transforms.Map(joint="film")
    rows = prepared(
        source,
        tmp_path,
        [
            hb.Dense("since", [missing]),
            hb.Id("session"),
            hb.Id("film", transforms=[word]),
            hb.Id("history", transforms=[word], pooling="none"),
        ],
        [
            TimeDifference("since", **KEYS),
            Session("session", **KEYS, gap_seconds=60),
            Previous("history", **KEYS, column="film", length=3),
        ],
    )
    everything = raw_rows().to_dicts()
    ids = dict(zip(raw_rows()["film"], rows["film"], strict=True))
    sessions: dict[Any, Any] = {}
    assert rows["number"].to_list() == list(range(NUM_ROWS))
    for row, value in zip(everything, rows.to_dicts(), strict=True):
        if row["user"] is None:
            assert value["since"] == -1
            assert value["session"] is None
            assert not value["history"]
            continue
        earlier = [
            (other["at"], other["film"])
            for other in everything
            if other["user"] == row["user"] and other["at"] < row["at"]
        ]
        latest = max((time for time, _ in earlier), default=row["at"] + 1)
        assert value["since"] == row["at"] - latest
        assert value["history"] == [ids[film] for _, film in sorted(earlier)[-3:]]
        begin = row["at"]
        for time in sorted({time for time, _ in earlier}, reverse=True):
            if begin - time > 60:
                break
            begin = time
        owner = (row["user"], begin)
        assert sessions.setdefault(value["session"], owner) == owner
    assert len(set(sessions.values())) == len(sessions) > 50


def test_derivation_may_read_an_earlier_one(source: hb.sources.Csv, tmp_path: Path) -> None:
    """The films of the session so far: a key that another derivation made."""
    rows = prepared(
        source,
        tmp_path,
        [hb.Id("history", pooling="none"), hb.Id("session"), hb.Id("film")],
        [
            Session("session", **KEYS, gap_seconds=60),
            Previous("history", by="session", time="at", column="film", length=100),
        ],
    )
    everything = rows.with_columns(time=pl.col("at").to_physical()).to_dicts()
    num_films = 0
    for row in everything:
        earlier = [
            other["film"]
            for other in everything
            if other["session"] == row["session"] is not None and other["time"] < row["time"]
        ]
        assert sorted(row["history"] or []) == sorted(earlier)
        num_films += len(earlier)
    assert num_films > 100


def test_key_that_cannot_be_one_is_rejected_by_name(tmp_path: Path) -> None:
    pl.DataFrame({"number": [1], "user": [0.5], "at": [1]}).write_parquet(tmp_path / "raw.parquet")
    source = hb.sources.Parquet(str(tmp_path / "raw.parquet"))
    job = Preparation(
        source,
        hb.Schema([hb.Dense("number"), hb.Dense("since"), hb.Time("at")]),
        [TimeDifference("since", **KEYS)],
        output=str(tmp_path / "prepared"),
    )
    with pytest.raises(SchemaError, match=r"'user': expected integers or strings"):
        prepare(job)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Previous("x", **KEYS, column="film", length=0), "previous.length: must be at"),
        (lambda: Session("x", **KEYS, gap_seconds=0), "session.gap_seconds: must be above 0"),
        (lambda: Session("x", **KEYS, gives="end"), "session.gives: unknown value, got 'end'"),
    ],
)
def test_derivation_that_makes_no_sense_is_rejected(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
