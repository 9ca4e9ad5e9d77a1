# SPDX-License-Identifier: Apache-2.0
"""Raw files, put together by hand: whole and float values, one key or several, sizes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from hotbed.connectors import Memory, Raw, Source
from hotbed.errors import ConfigError, DecodeError, SchemaError

pytestmark = pytest.mark.core


def rows(source: Source) -> list[dict[str, object]]:
    return [row for batch, _ in source.read(batch_rows=2) for row in batch.to_pylist()]


def test_whole_numbers_and_unsigned_keys_of_four_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<3i2I", 1, -1, 9, 2**32 - 1, 4) * 3)
    source = Raw(path, num_dense=2, slots={"a": 1, "b": 1})
    assert rows(source) == [{"label": 1, "dense": [-1, 9], "a": 2**32 - 1, "b": 4}] * 3


def test_many_samples_in_one_batch(tmp_path: Path) -> None:
    path = tmp_path / "a"
    values = np.arange(15_000, dtype="<i4").reshape(5000, 3)
    path.write_bytes(values.tobytes())
    (batch, _), *rest = Raw(path, slots={"a": 1, "b": 1}).read()
    assert not rest
    for number, name in enumerate(["label", "a", "b"]):
        assert batch.column(name).to_pylist() == values[:, number].tolist()


def test_float_values_and_several_keys(tmp_path: Path) -> None:
    """RawAsync of HugeCTR 23.04 and later: whole labels, float values, static multi-hot keys."""
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<i1f4I", 1, 0.5, 7, 8, 9, 2**31))
    source = Raw(path, num_dense=1, slots={"a": 3, "b": 1}, dense_type="float32")
    assert rows(source) == [{"label": 1, "dense": [0.5], "a": [7, 8, 9], "b": 2**31}]


def test_float_labels_and_keys_of_eight_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<2f3q", 1.0, 0.25, -(2**63), 2**40, 5) * 2)
    source = Raw(path, ["a", "b"], slots={"c": 1, "d": 2}, label_type="float32", key_bits=64)
    assert rows(source) == [{"a": 1.0, "b": 0.25, "c": -(2**63), "d": [2**40, 5]}] * 2
    assert source.schema().names == ["a", "b", "c", "d"]


def test_written_files_are_those_put_together_by_hand(tmp_path: Path) -> None:
    columns = {
        "label": [1.0, 0.0],
        "dense": [[0.5], [1.5]],
        "a": [3, 2**32 - 1],
        "b": [[1, 2], [3, 4]],
    }
    source = Raw(tmp_path / "a", num_dense=1, slots={"a": 1, "b": 2}, dense_type="float32")
    assert source.write(Memory(columns)) == 2
    packed = struct.pack("<if3I", 1, 0.5, 3, 1, 2) + struct.pack("<if3I", 0, 1.5, 2**32 - 1, 3, 4)
    assert (tmp_path / "a").read_bytes() == packed
    assert rows(source)[1] == {"label": 0, "dense": [1.5], "a": 2**32 - 1, "b": [3, 4]}


def test_compressed_files_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(struct.pack("<10I", *range(10))))
    source = Raw(path, slots={"a": 1})
    (_, position), *_ = source.read(batch_rows=2)
    rest = [batch.to_pydict()["a"] for batch, _ in source.read(position, batch_rows=2)]
    assert rest == [[5, 7], [9]]
    assert source.num_rows() is None
    assert source.count_rows() == 5


def test_a_size_that_is_not_a_multiple_of_a_sample_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(25))
    source = Raw(path, num_dense=2, slots={"a": 3})
    with pytest.raises(DecodeError, match=r"multiple of 24 bytes \(1 labels, 2 dense.*got 25"):
        rows(source)
    with pytest.raises(DecodeError, match="multiple of 24 bytes"):
        next(source.read(batch_rows=1))  # before the first sample
    with pytest.raises(DecodeError, match="multiple of 24 bytes"):
        source.num_rows()
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(25)))
    with pytest.raises(DecodeError, match="multiple of 24 bytes"):
        rows(Raw(path, num_dense=2, slots={"a": 3}))


def test_impossible_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raw\.slots\.a: must be at least 1"):
        Raw("a", slots={"a": 0})
    with pytest.raises(ConfigError, match="a sample must have a value"):
        Raw("a", labels=())
    with pytest.raises(ConfigError, match=r"two columns have one name, got \['label'\]"):
        Raw("a", slots={"label": 1})
    source = Raw(tmp_path / "b", slots={"a": 2})
    with pytest.raises(SchemaError, match="expected 2 values a row of column 'a', got 1"):
        source.write(Memory({"label": [1, 1], "a": [[1, 2], [3]]}))
    with pytest.raises(SchemaError, match=r"columns \['a'\] are absent"):
        source.write(Memory({"label": [1, 1]}))
    with pytest.raises(SchemaError, match="'label' has nulls"):
        source.write(Memory({"label": [1, None], "a": [[1, 2], [3, 4]]}))
    assert not (tmp_path / "b").exists()
