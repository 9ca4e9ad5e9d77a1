# SPDX-License-Identifier: Apache-2.0
"""Random data in the formats of HugeCTR, which its readers read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.data_generator import main
from hotbed.compat.hugectr.generation import filled_sizes, generate_missing
from hotbed.compat.hugectr.reader import columns_of, evaluation_data, training_data
from hotbed.connectors import read_file_list
from hotbed.connectors.generated import PowerLaw
from hotbed.data import Batch, Id, Label, Schema, Shift
from hotbed.errors import ConfigError

SIZES = (50, 7, 300)
COUNTS = (1, 3, 1)
FORMATS = ["Norm", "Raw", "Parquet"]


def sparse(counts: tuple[int, ...] = COUNTS) -> list[hugectr.DataReaderSparseParam]:
    return [hugectr.DataReaderSparseParam("data", counts, False, len(counts))]


def read(
    kind: str,
    folder: Path,
    counts: tuple[int, ...] = COUNTS,
    make: Any = training_data,
    **more: Any,
) -> list[Batch]:
    input = hugectr.Input(1, "label", 2, "dense", sparse(counts))
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t[kind],
        str(folder / "train.txt"),
        eval_source=str(folder / "eval.txt"),
        check_type=hugectr.Check_t.Sum,
        slot_size_array=SIZES if kind == "Parquet" else (),
        **more,
    )
    columns = columns_of(reader, input)
    ids = [
        Id(name, transforms=[Shift(offset)])
        for name, offset in zip(columns.slots, columns.offsets, strict=True)
    ]
    labels = [Label(name) for name in columns.labels]
    schema = Schema([*labels, *columns.dense, *ids])
    solver = hugectr.CreateSolver(batchsize=64, batchsize_eval=64, drop_incomplete_batch=False)
    return list(make(reader, input, solver, schema))


def params(kind: str, folder: Path, **more: Any) -> hugectr.tools.DataGeneratorParams:
    return hugectr.tools.DataGeneratorParams(
        format=hugectr.DataReaderType_t[kind],
        label_dim=1,
        dense_dim=2,
        num_slot=3,
        i64_input_key=False,
        source=str(folder / "train.txt"),
        eval_source=str(folder / "eval.txt"),
        slot_size_array=SIZES,
        nnz_array=more.pop("nnz_array", COUNTS),
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=100,
        num_samples=200,
        eval_num_samples=100,
        **more,
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_readers_read_what_the_generator_writes(tmp_path: Path, kind: str) -> None:
    counts = (1, 1, 1) if kind == "Raw" else COUNTS  # Raw readers take one key a slot
    hugectr.tools.DataGenerator(params(kind, tmp_path, nnz_array=counts)).generate()
    batches = read(kind, tmp_path, counts)
    assert sum(batch.num_samples for batch in batches) == 200
    evaluated = read(kind, tmp_path, counts, evaluation_data)
    assert sum(batch.num_samples for batch in evaluated) == 100
    begin = 0
    for number, size in enumerate(SIZES):  # slots have ranges of their own
        keys = np.concatenate([list(batch.ids.values())[number].values for batch in batches])
        assert begin <= keys.min()
        assert keys.max() < begin + size
        begin += size
    assert {float(value) for batch in batches for value in next(iter(batch.labels.values()))} == {
        0.0,
        1.0,
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_what_exists_is_kept(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "train.txt").write_text("mine")
    hugectr.tools.DataGenerator(params(kind, tmp_path)).generate()
    assert (tmp_path / "train.txt").read_text() == "mine"
    assert (tmp_path / "eval.txt").exists()
    assert "train.txt exists and is kept" in caplog.text


def test_parquet_files_have_metadata_with_the_roles_of_columns(tmp_path: Path) -> None:
    hugectr.tools.DataGenerator(params("Parquet", tmp_path)).generate()
    metadata = json.loads((tmp_path / "train" / "_metadata.json").read_text())
    assert [entry["num_rows"] for entry in metadata["file_stats"]] == [100, 100]
    assert metadata["labels"] == [{"col_name": "label0", "index": 0}]
    assert [entry["col_name"] for entry in metadata["conts"]] == ["C1", "C2"]
    assert [entry["index"] for entry in metadata["cats"]] == [3, 4, 5]
    files = read_file_list(tmp_path / "train.txt")
    assert files == [str(tmp_path / "train" / f"gen_{number}.parquet") for number in range(2)]


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one number for each of 3 slots, got 1"):
        params("Norm", tmp_path, nnz_array=(1,))
    with pytest.raises(ConfigError, match=r"power_law\.alpha: must be above 0"):
        hugectr.tools.DataGenerator(params("Norm", tmp_path, alpha=-1.0)).generate()


def test_tails_by_name_are_powers() -> None:
    tail = hugectr.PowerLaw_t
    for name, alpha in ((tail.Long, 0.9), (tail.Medium, 1.1), (tail.Short, 1.3)):
        made = params("Norm", Path(), power_law_type=name).distribution
        assert isinstance(made, PowerLaw)
        assert made.alpha == alpha
    uniform = params("Norm", Path(), dist_type=hugectr.Distribution_t.Uniform)
    assert type(uniform.distribution).__name__ == "UniformKeys"


def test_slots_of_size_zero_share_the_keys_of_the_next() -> None:
    assert filled_sizes([9, 0, 0, 5, 0]) == [9, 5, 5, 5, 1]


def write_config(folder: Path, kind: str) -> Path:
    data = {
        "type": "Data",
        "format": kind,
        "source": str(folder / "train.txt"),
        "eval_source": str(folder / "eval.txt"),
        "check": "Sum",
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 2},
        "sparse": [
            {"top": "d", "type": "DistributedSlot", "max_feature_num_per_sample": 3, "slot_num": 3}
        ],
    }
    if kind == "Raw":
        data |= {"num_samples": 200, "eval_num_samples": 100, "slot_size_array": list(SIZES)}
    file = folder / "config.json"
    file.write_text(json.dumps({"solver": {"input_key_type": "I32"}, "layers": [data]}))
    return file


@pytest.mark.parametrize("kind", ["Norm", "Raw"])
def test_the_old_command_line_generates(tmp_path: Path, kind: str) -> None:
    words = ["--config-file", str(write_config(tmp_path, kind)), "--distribution", "powerlaw"]
    words += ["--alpha", "-1.2"]
    if kind == "Norm":
        words += ["--voc-size-array", "50,7,300", "--files", "2", "--samples", "100"]
        words += ["--data-folder", str(tmp_path / "data")]
    main(words)
    batches = read(kind, tmp_path, (1, 1, 1))
    assert sum(batch.num_samples for batch in batches) == 200
    assert (tmp_path / "data" / "train" / "gen_1.data").exists() == (kind == "Norm")


@pytest.mark.parametrize("kind", [*FORMATS, "RawAsync"])
def test_data_that_a_reader_lacks_are_generated(tmp_path: Path, kind: str) -> None:
    input = hugectr.Input(1, "label", 2, "dense", sparse())
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t[kind],
        str(tmp_path / "a" / "train.txt"),
        eval_source=str(tmp_path / "eval.txt"),
        check_type=hugectr.Check_t.Sum,
        slot_size_array=[0, 9, 300],
        async_param=hugectr.AsyncParam(1, 1, shuffle=False),
    )
    solver = hugectr.CreateSolver(batchsize=64, batchsize_eval=64)
    written = generate_missing(reader, input, solver, (100, 70))
    assert written == [reader.source, reader.eval_source]
    assert generate_missing(reader, input, solver, (100, 70)) == []
    other = replace(reader, source=str(tmp_path / "none.txt"), slot_size_array=[9] * 2)
    with pytest.raises(ConfigError, match="one size for each of 3 slots, got 2 sizes"):
        generate_missing(other, input, solver, (100, 70))
    columns = columns_of(reader, input)
    ids = [Id(name) for name in columns.slots]
    schema = Schema([*(Label(name) for name in columns.labels), *columns.dense, *ids])
    for make, rows in ((training_data, 100), (evaluation_data, 70)):
        dataset = make(reader, input, solver, schema)
        assert rows <= dataset.source.count_rows() < rows + 4
        batch = next(iter(dataset))
        first, second, _ = (batch.ids[name].values for name in columns.slots)
        assert first.max() < 9
        assert len(second) > len(first) or kind == "Raw"
