# SPDX-License-Identifier: Apache-2.0
"""Readers of HugeCTR: the columns, datasets and errors of all formats."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.clauses import Graph
from hotbed.compat.hugectr.json.graph import write_graph
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.reader import (
    Columns,
    columns_of,
    evaluation_data,
    training_data,
    warn_of_sizes,
)
from hotbed.connectors import Memory, Norm, write_file_list
from hotbed.data import Batch, Dataset, Id, Label, Schema, Shift
from hotbed.errors import ConfigError, DataError, SchemaError

ROWS = 10
INPUT = hugectr.Input(
    1,
    "label",
    2,
    "dense",
    [
        hugectr.DataReaderSparseParam("wide", 2, False, 1),
        hugectr.DataReaderSparseParam("deep", 1, True, 2),
    ],
)


def reader(kind: str, source: Any, **arguments: Any) -> hugectr.DataReaderParams:
    return hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t[kind],
        source=source,
        eval_source=source if isinstance(source, str) else source[0],
        check_type=arguments.pop("check_type", hugectr.Check_t.Sum),
        **arguments,
    )


def solver(**arguments: Any) -> hugectr.Solver:
    return hugectr.CreateSolver(batchsize=4, batchsize_eval=3, **arguments)


def schema_of(columns: Columns) -> Schema:
    ids = [
        Id(name, transforms=[Shift(offset)], table="t")
        for name, offset in zip(columns.slots, columns.offsets, strict=True)
    ]
    return Schema([*(Label(name) for name in columns.labels), *columns.dense, *ids])


def data(reader: hugectr.DataReaderParams, make: Any = training_data, **arguments: Any) -> Dataset:
    made: Dataset = make(reader, INPUT, solver(**arguments), schema_of(columns_of(reader, INPUT)))
    return made


def ids(batches: list[Batch], name: str) -> list[int]:
    return [key for batch in batches for key in batch.ids[name].values.tolist()]


def write_norm(folder: Path, rows: int = ROWS) -> str:
    columns = {
        "label": np.arange(rows) % 2,
        "dense": np.arange(2 * rows, dtype=np.float32).reshape(rows, 2),
        "wide": [[i, i + 1] for i in range(rows)],
        "deep_0": np.arange(rows) + 100,
        "deep_1": np.arange(rows) + 200,
    }
    file = str(folder / "0.data")
    Norm(file, ["label"], ["wide", "deep_0", "deep_1"]).write(Memory(columns))
    write_file_list(folder / "list.txt", [file])
    return str(folder / "list.txt")


def write_raw(folder: Path, rows: int = ROWS) -> str:
    """Whole labels, dense values and keys, as the first releases read them."""
    file = folder / "train.bin"
    file.write_bytes(
        b"".join(struct.pack("<6i", i % 2, i, 0, i, i + 100, i + 200) for i in range(rows))
    )
    return str(file)


def write_parquet(folder: Path, rows: int = ROWS, **changes: Any) -> str:
    """Columns without names, as HugeCTR's generator writes them, in another order than the roles."""
    columns = {
        "_col0": pa.array([[i, i + 1] for i in range(rows)], pa.list_(pa.int64())),
        "_col1": pa.array(np.arange(rows) % 2, pa.float32()),
        "_col2": pa.array(np.arange(rows), pa.float32()),
        "_col3": pa.array(np.arange(rows) + 100),
        "_col4": pa.array(np.arange(rows) + 200),
        "_col5": pa.array(np.zeros(rows), pa.float32()),
    }
    pq.write_table(pa.table(columns), folder / "0.parquet")
    metadata = {
        "file_stats": [{"file_name": "/elsewhere/0.parquet", "num_rows": rows}],
        "labels": [{"col_name": "label", "index": 1}],
        "conts": [{"col_name": "I1", "index": 2}, {"col_name": "I2", "index": 5}],
        "cats": [{"col_name": f"C{i}", "index": i} for i in (0, 3, 4)],
        **changes,
    }
    (folder / "_metadata.json").write_text(json.dumps(metadata))
    write_file_list(folder / "list.txt", [folder / "0.parquet"])
    return str(folder / "list.txt")


def test_norm_files_are_read_in_their_order_and_the_last_rows_are_left_out(tmp_path: Path) -> None:
    dataset = data(reader("Norm", write_norm(tmp_path), slot_size_array=[10, 10, 10]))
    batches = list(dataset)
    assert [batch.num_samples for batch in batches] == [4, 4]
    assert ids(batches, "deep_0") == list(range(100, 108))  # Norm files have no offsets
    assert batches[0].ids["wide"].offsets.tolist() == [0, 2, 4, 6, 8]
    assert batches[0].dense["dense"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    whole = list(data(reader("Norm", write_norm(tmp_path)), drop_incomplete_batch=False))
    assert [batch.num_samples for batch in whole] == [4, 4, 2]


def test_a_data_set_of_less_than_a_batch_is_not_left_out(tmp_path: Path) -> None:
    assert [batch.num_samples for batch in data(reader("Norm", write_norm(tmp_path, 3)))] == [3]


@pytest.mark.parametrize(("slot", "offset"), [("wide", 0), ("deep_1", 50)])
def test_a_key_that_files_of_32_bits_cannot_hold_is_named_before_training(
    slot: str, offset: int, tmp_path: Path
) -> None:
    """It was an error of the save, after training."""
    source = write_parquet(tmp_path)
    table = pq.read_table(tmp_path / "0.parquet")
    name, number = {"wide": ("_col0", 0), "deep_1": ("_col4", 4)}[slot]
    sizes = [20, 30, 4] if offset else ()
    largest = 2**32 - 1 - offset
    for key, is_wrong in ((largest, False), (largest + 1, True), (-1, True)):
        keys = table[name].to_pylist()
        keys[7] = [keys[7][0], key] if slot == "wide" else key
        changed = table.set_column(number, name, pa.array(keys, table[name].type))
        pq.write_table(changed, tmp_path / "0.parquet", row_group_size=3)
        params = reader("Parquet", source, slot_size_array=sizes)
        columns = columns_of(params, INPUT)
        make = partial(training_data, params, INPUT, solver(), schema_of(columns))
        make()
        if not is_wrong:
            make(short_keys=True)
            continue
        message = rf"0\.parquet: row 7: column '{name}': .* 0 to {largest}, got {key}\. Set i64"
        with pytest.raises(DataError, match=message):
            make(short_keys=True)


def test_bad_samples_of_norm_files_are_skipped_and_counted(tmp_path: Path) -> None:
    source = write_norm(tmp_path)
    content = bytearray((tmp_path / "0.data").read_bytes())
    content[-1] ^= 1
    (tmp_path / "0.data").write_bytes(content)
    dataset = data(reader("Norm", source), drop_incomplete_batch=False)
    assert sum(batch.num_samples for batch in dataset) == ROWS - 1
    assert dataset.skips.counts == {"checksum": 1}


def test_sources_of_a_list_are_read_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first, second = write_norm(tmp_path, 6), write_norm(tmp_path / "a", 6)
    batches = list(data(reader("Norm", [first, second])))
    assert ids(batches, "deep_0") == [*range(100, 106), *range(100, 106)]


def test_raw_files_have_offsets_logs_and_a_shuffled_training_reader(tmp_path: Path) -> None:
    source = write_raw(tmp_path)
    one_hot = reader(
        "Raw", source, slot_size_array=[1000, 50, 7], num_samples=ROWS, adds_slot_offsets=True
    )
    assert columns_of(one_hot, INPUT).offsets == (0, 1000, 1050)
    batches = list(data(one_hot, drop_incomplete_batch=False))
    keys = ids(batches, "deep_0")
    assert sorted(keys) == list(range(1100, 1110))
    assert keys != sorted(keys)
    dense = np.concatenate([batch.dense["dense"] for batch in batches])
    expected = [[np.log(np.float32(key - 1100 + 1)), 0] for key in keys]
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    evaluated = list(data(one_hot, evaluation_data, drop_incomplete_batch=False))
    assert ids(evaluated, "deep_1") == list(range(1250, 1260))


def old_input() -> hugectr.Input:
    """An input of v3.0.1, which holds its reader."""
    return hugectr.Input(
        data_reader_type=hugectr.DataReaderType_t.Raw,
        source="train.bin",
        eval_source="train.bin",
        check_type=hugectr.Check_t.Non,
        label_dim=1,
        label_name="label",
        dense_dim=2,
        dense_name="dense",
        slot_size_array=[1000, 50, 7],
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 3, 1, 3)
        ],
        sparse_names=["data"],
    )


def json_input() -> hugectr.Input:
    """The clause of a JSON file for training, of v2.3 to v3.0.1."""
    sparse = {"top": "d", "type": "DistributedSlot", "max_feature_num_per_sample": 3, "slot_num": 3}
    data = {
        "type": "Data",
        "format": "Raw",
        "source": "train.bin",
        "eval_source": "train.bin",
        "check": "None",
        "num_samples": ROWS,
        "eval_num_samples": ROWS,
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 2},
        "sparse": [sparse],
        "slot_size_array": [1000, 50, 7],
    }
    return read_graph({"layers": [data]}).input


ONE_HOT = hugectr.AsyncParam(
    1, 1, 1, 1, 512, False, hugectr.Alignment_t.Non, multi_hot_reader=False
)
OFFSETS = (0, 1000, 1050)


@pytest.mark.parametrize(
    ("kind", "arguments", "offsets"),
    [
        ("Norm", {"adds_slot_offsets": True}, (0, 0, 0)),
        ("Raw", {}, (0, 0, 0)),
        ("Raw", {"adds_slot_offsets": True}, OFFSETS),
        ("RawAsync", {"async_param": ONE_HOT}, (0, 0, 0)),
        ("RawAsync", {"async_param": ONE_HOT, "adds_slot_offsets": True}, OFFSETS),
        ("RawAsync", {"async_param": hugectr.AsyncParam(1, 4, shuffle=False)}, (0, 0, 0)),
    ],
)
def test_offsets_are_added_as_the_release_of_the_reader_does(
    kind: str, arguments: dict[str, Any], offsets: tuple[int, ...]
) -> None:
    """Parquet readers have a test of their own below: they add offsets in all releases."""
    sized = reader(kind, "train.bin", slot_size_array=[1000, 50, 7], **arguments)
    assert columns_of(sized, INPUT).offsets == offsets


def test_readers_of_old_inputs_and_json_files_add_offsets() -> None:
    for held in (old_input(), json_input()):
        assert held.reader is not None
        assert columns_of(held.reader, held).offsets == OFFSETS
        written = dataclasses.replace(
            held, reader=None, slot_size_array=(1000, 50, 7), adds_slot_offsets=True
        )
        graph = write_graph(Graph(written, (), (), ""), hugectr.CreateOptimizer())
        assert read_graph(graph).input.adds_slot_offsets  # so that `predict` over Raw adds them


def test_raw_float_values_are_used_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    file.write_bytes(struct.pack("<3f3i", 0.25, -3.0, 8.0, 1, 2, 3) * 4)
    batch = next(iter(data(reader("Raw", str(file), float_label_dense=True))))
    assert batch.labels["label"].tolist() == [0.25] * 4
    assert batch.dense["dense"].tolist() == [[-3.0, 8.0]] * 4


def test_the_asynchronous_reader_takes_several_keys_a_slot(tmp_path: Path) -> None:
    """As of v23.04: whole labels, float values, two keys in `wide`; nothing is added to keys."""
    file = tmp_path / "train.bin"
    file.write_bytes(struct.pack("<i2f4q", 1, -3.0, 8.0, 5, 2**40, 6, 7) * 4)
    several = reader(
        "RawAsync",
        str(file),
        slot_size_array=[9, 9, 9],
        async_param=hugectr.AsyncParam(1, 4, shuffle=False),
    )
    batch = next(iter(data(several, i64_input_key=True)))
    assert batch.labels["label"].tolist() == [1] * 4
    assert batch.dense["dense"].tolist() == [[-3.0, 8.0]] * 4
    assert batch.ids["wide"].values.tolist() == [5, 2**40] * 4
    assert batch.ids["deep_1"].values.tolist() == [7] * 4


def test_parquet_files_are_read_by_the_numbers_of_their_columns(tmp_path: Path) -> None:
    source = reader("Parquet", write_parquet(tmp_path), slot_size_array=[20, 300, 300])
    columns = columns_of(source, INPUT)
    assert columns.labels == ("_col1",)
    assert [column.name for column in columns.dense] == ["_col2", "_col5"]
    assert (columns.slots, columns.offsets) == (("_col0", "_col3", "_col4"), (0, 20, 320))
    batches = list(data(source))
    assert ids(batches, "_col3") == list(range(120, 128))
    assert batches[0].dense["_col2"].tolist() == [0, 1, 2, 3]


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    """Files without names hold other values under the same numbers."""
    (tmp_path / "eval").mkdir()
    cats = [{"col_name": f"C{i}", "index": i} for i in (0, 4, 3)]
    training = write_parquet(tmp_path)
    source = reader("Parquet", training)
    other = write_parquet(tmp_path / "eval", cats=cats)
    with pytest.raises(ConfigError, match="all sources need the same columns"):
        data(dataclasses.replace(source, eval_source=other), evaluation_data)
    with pytest.raises(ConfigError, match="all sources need the same columns"):
        data(dataclasses.replace(source, source=[training, other]))


def test_dense_lists_of_parquet_files_have_their_width(tmp_path: Path) -> None:
    source = write_parquet(tmp_path, conts=[{"col_name": "v", "index": 0}])
    assert columns_of(reader("Parquet", source), INPUT).dense[0].width == 2


def test_evaluation_batches_are_cached(tmp_path: Path) -> None:
    """Two batches of three rows are kept; the file is not read again."""
    source = write_norm(tmp_path)
    dataset = data(reader("Norm", source, cache_eval_data=2), evaluation_data)
    first = ids(list(dataset), "deep_0")
    (tmp_path / "0.data").unlink()
    assert ids(list(dataset), "deep_0") == first == list(range(100, 106))


def test_a_dataset_resumes_at_any_batch(tmp_path: Path) -> None:
    one_hot = reader("Raw", write_raw(tmp_path, 40))
    batches = list(data(one_hot))
    for number, batch in enumerate(batches):
        rest = list(data(one_hot).resume(batch.position))
        assert ids(rest, "wide") == ids(batches[number + 1 :], "wide")


def test_sizes_behind_the_last_slot_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """As in NVIDIA's wdl_etc.py, whose graph has 27 slots and whose reader 28 sizes."""
    many = reader("Raw", "train.bin", slot_size_array=[1, 2, 3, 4], adds_slot_offsets=True)
    columns = columns_of(many, INPUT)
    assert (columns.offsets, columns.sizes) == ((0, 1, 3), (1, 2, 3))
    warn_of_sizes(many, columns.slots)
    assert "slot_size_array has 4 sizes for 3 slots; the last 1 are not used" in caplog.text


def test_data_that_does_not_fit_the_input_is_refused(tmp_path: Path) -> None:
    norm, raw = write_norm(tmp_path), write_raw(tmp_path)
    with pytest.raises(SchemaError, match="expected checksum=False, got a file with checksum=True"):
        data(reader("Norm", norm, check_type=hugectr.Check_t.Non))
    with pytest.raises(ConfigError, match=r"num_samples: .* has 10 samples of 24 bytes, got 11"):
        data(reader("Raw", raw, num_samples=11))
    assert len(data(reader("Raw", raw, num_samples=8))) == 2
    with pytest.raises(ConfigError, match="one size for each of 3 slots, got 2 sizes"):
        columns_of(reader("Raw", raw, slot_size_array=[1, 2], adds_slot_offsets=True), INPUT)
    three = hugectr.Input(1, "label", 3, "dense", INPUT.data_reader_sparse_param_array)
    for kind, source in (("Norm", norm), ("Raw", raw)):
        wrong = reader(kind, source, check_type=hugectr.Check_t.Sum)
        with pytest.raises((ConfigError, DataError), match=r"got 3|multiple of 28 bytes"):
            training_data(wrong, three, solver(), schema_of(columns_of(wrong, three)))
    with pytest.raises(ConfigError, match="nothing to read, got no source"):
        data(reader("Norm", ""))


def test_wrong_metadata_is_refused(tmp_path: Path) -> None:
    def columns(**changes: Any) -> Columns:
        return columns_of(reader("Parquet", write_parquet(tmp_path, **changes)), INPUT)

    with pytest.raises(DataError, match="index 9, got 6 columns"):
        columns(labels=[{"col_name": "label", "index": 9}])
    with pytest.raises(DataError, match="'_col3' with index 1, got '_col1' there"):
        columns(labels=[{"col_name": "_col3", "index": 1}])
    with pytest.raises(ConfigError, match=r"conts of _metadata\.json have 1 values, got 2"):
        columns(conts=[{"col_name": "I1", "index": 2}])
    with pytest.raises(ConfigError, match="expected 3 columns, got 1 cats"):
        columns(cats=[{"col_name": "C", "index": 3}])
    source = write_parquet(tmp_path, file_stats=[{"file_name": "0.parquet", "num_rows": 9}])
    with pytest.raises(DataError, match="says 9 rows, got 10"):
        data(reader("Parquet", source))
    (tmp_path / "_metadata.json").write_text("{}")
    with pytest.raises(DataError, match=r"_metadata\.json"):
        data(reader("Parquet", source))
    (tmp_path / "_metadata.json").unlink()
    with pytest.raises(DataError, match="metadata of Parquet files cannot be read"):
        data(reader("Parquet", source))


def test_names_of_the_metadata_are_in_the_files_all_or_none(tmp_path: Path) -> None:
    cats = [{"col_name": name, "index": i} for name, i in (("_col0", 0), ("C3", 3), ("_col4", 4))]
    roles = {
        "labels": [{"col_name": "_col1", "index": 1}],
        "conts": [{"col_name": "_col2", "index": 2}, {"col_name": "_col5", "index": 5}],
        "cats": cats,
    }
    with pytest.raises(DataError, match=r"cats has column 'C3' with index 3, got '_col3' there"):
        columns_of(reader("Parquet", write_parquet(tmp_path, **roles)), INPUT)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (pa.array([str(i) for i in range(ROWS)]), "column '_col3': expected whole numbers or list"),
        (pa.array([["a"]] * ROWS), r"expected whole numbers or lists of them as keys, got list"),
        (pa.array([0.0] * ROWS), "expected whole numbers or lists of them as keys, got double"),
        (pa.array([*range(7), None, 8, 9]), "row 7: column '_col3': expected a key, got null"),
        (pa.array([*[[1], []] * 4, None, [2, None]]), "row 9: column '_col3': expected a key"),
    ],
)
def test_keys_that_are_not_numbers_are_refused(
    keys: pa.Array, message: str, tmp_path: Path
) -> None:
    source = write_parquet(tmp_path)
    table = pq.read_table(tmp_path / "0.parquet").set_column(3, "_col3", keys)
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=4)
    with pytest.raises(DataError, match=message):
        data(reader("Parquet", source))


def test_empty_lists_of_keys_are_read(tmp_path: Path) -> None:
    source = write_parquet(tmp_path)
    keys = pa.array([[1], []] * (ROWS // 2), pa.list_(pa.int64()))
    table = pq.read_table(tmp_path / "0.parquet").set_column(0, "_col0", keys)
    pq.write_table(table, tmp_path / "0.parquet")
    batches = list(data(reader("Parquet", source)))
    assert batches[0].ids["_col0"].offsets.tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("kind", "write"), [("Norm", write_norm), ("Raw", write_raw), ("Parquet", write_parquet)]
)
def test_remote_sources_are_read_as_local_ones(
    kind: str, write: Callable[[Path], str], tmp_path: Path
) -> None:
    store = pytest.importorskip("fsspec", reason="fsspec absent").filesystem("memory")
    source = write(tmp_path)
    expected = list(data(reader(kind, source)))
    for path in tmp_path.iterdir():
        text = path.read_bytes().replace(f"{tmp_path}/".encode(), b"memory://hugectr/")
        store.pipe(f"/hugectr/{path.name}", text)
    try:
        there = list(data(reader(kind, f"memory://hugectr/{Path(source).name}")))
    finally:
        store.rm("/hugectr", recursive=True)
    assert len(there) == len(expected) > 0
    for batch, other in zip(expected, there, strict=True):
        for name, column in batch.ids.items():
            assert column.values.tolist() == other.ids[name].values.tolist()


def test_keys_beyond_their_slot_and_long_samples_are_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """HugeCTR reads the rows of other slots there, and writes beyond its buffers."""
    source = write_parquet(tmp_path)
    narrow = hugectr.DataReaderSparseParam("wide", 1, False, 1)
    made = hugectr.Model(
        solver(repeat_dataset=False),
        reader("Parquet", source, slot_size_array=[100, 105, 300]),
        hugectr.CreateOptimizer(),
    )
    deep = INPUT.data_reader_sparse_param_array[1]
    made.add(hugectr.Input(1, "label", 2, "dense", [narrow, deep]))
    for name, bottom in (("emb", "deep"), ("rows", "wide")):
        kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
        made.add(hugectr.SparseEmbedding(kind, 1, 4, "sum", name, bottom))
    for name, width in (("emb", 8), ("rows", 4)):
        made.add(
            hugectr.DenseLayer(hugectr.Layer_t.Reshape, [name], [f"{name}_"], leading_dim=width)
        )
    made.add(hugectr.DenseLayer(hugectr.Layer_t.Concat, ["emb_", "rows_"], ["x"]))
    made.add(hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, ["x"], ["y"], num_output=1))
    kind = hugectr.Layer_t.BinaryCrossEntropyLoss
    made.add(hugectr.DenseLayer(kind, ["y", "label"], ["loss"]))
    made.compile()
    train = made.get_data_reader_train()
    made.fit(num_epochs=2, display=0, eval_interval=0, snapshot=0)
    # of keys 100 to 107, the last three are beyond 105, in each of two epochs
    assert train.limits.outside == {"deep_0": 6}
    assert train.limits.too_long == {"wide": 16}
    lines = [line for line in caplog.messages if "which w" in line]
    assert len(lines) == 1
    assert "'wide': 4 samples of a batch have more ids than 1" in lines[0]
    assert made.get_data_reader_eval().limits.outside == {}
