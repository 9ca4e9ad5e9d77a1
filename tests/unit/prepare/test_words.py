# SPDX-License-Identifier: Apache-2.0
"""Text of Parquet files is prepared word by word, and gives what text of CSV files gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import hotbed as hb
from hotbed.connectors.read_plan import ReadPlan
from hotbed.data.columns import Columns, transformed
from hotbed.data.transforms import Hash, Map
from hotbed.prepare import Preparation, prepare
from hotbed.prepare.keyed.vocabulary import count_values

WORDS = ["red", "green", "é", None, "x" * 300]


@pytest.mark.parametrize("words", [WORDS, [None, None], [None, "red", None, "red"]])
@pytest.mark.parametrize("transform", [Hash(), Hash(bins=3), Map(["red", "é"])])
def test_dictionary_is_transformed_as_its_text_is(words: list[str | None], transform: Any) -> None:
    text = pa.array(words * 5, pa.string())
    encoded = text.dictionary_encode()
    sliced = pa.concat_arrays([encoded, encoded]).slice(2, len(text))
    for values in (encoded, sliced):
        context = Columns(pa.RecordBatch.from_arrays([values], ["x"]))
        plain = Columns(pa.RecordBatch.from_arrays([values.dictionary_decode()], ["x"]))
        assert transformed("x", [transform], context).equals(transformed("x", [transform], plain))


def test_words_of_a_dictionary_are_counted_as_text_is() -> None:
    text = pa.array(WORDS * 3 + ["red", ""])
    unused = pa.DictionaryArray.from_arrays([0, None, 1], ["red", None, "unused"])
    assert count_values(unused, "x").column("word").to_pylist() == ["red"]
    counts = []
    for values in (text, text.dictionary_encode()):
        batch = count_values(values, "x")
        counts.append(sorted(batch.to_pylist(), key=lambda row: row["word"]))
    assert counts[0] == counts[1]


def test_parquet_gives_dictionaries_only_where_they_are_asked_for(tmp_path: Path) -> None:
    table = pa.table({"a": ["x", "x", None], "b": ["y", "y", "z"], "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "t.parquet")
    source = hb.sources.Parquet(str(tmp_path / "t.parquet"))
    ((rows, _),) = source.read(plan=ReadPlan(words=["a", "n"]))
    kinds = [pa.types.is_dictionary(field.type) for field in rows.schema]
    assert kinds == [True, False, False]
    ((plain, _),) = source.read()
    assert plain.schema.equals(table.schema)
    assert rows.to_pylist() == plain.to_pylist()


def test_parquet_and_csv_files_are_prepared_alike(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    rows = 3000
    table = pa.table(
        {
            "y": draw.integers(0, 2, rows),
            "color": draw.choice(["red", "green", "blue"], rows),
            "shop": pa.array(np.char.mod("shop%d", draw.zipf(1.3, rows) % 500)),
            "price": draw.random(rows),
        }
    )
    # several row groups of more words each
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1000)
    pacsv.write_csv(table, tmp_path / "rows.csv")
    means = [{"kind": "join_groupby", "column": "price"}, {"kind": "fill_missing", "value": 0.0}]
    rate = [{"kind": "target_encode", "label": "y"}]
    columns = [
        {"kind": "label", "name": "y"},
        {"kind": "id", "name": "color", "transforms": [{"kind": "map"}]},
        {"kind": "id", "name": "shop", "transforms": [{"kind": "map", "min_count": 2}]},
        {"kind": "id", "name": "hashed", "column": "shop", "transforms": [{"kind": "hash"}]},
        {"kind": "dense", "name": "mean", "column": "shop", "transforms": means},
        {"kind": "dense", "name": "rate", "column": "shop", "transforms": rate},
    ]
    prepared = []
    for kind in ("csv", "parquet"):
        job = {
            "source": {"kind": kind, "path": str(tmp_path / f"rows.{kind}")},
            "schema": {"columns": columns},
            "output": str(tmp_path / kind),
        }
        prepare(Preparation.from_json(job))
        prepared.append(pq.read_table(tmp_path / kind / "train"))
    assert prepared[0].equals(prepared[1])
