# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's weight files, compared with bytes that are put together by hand."""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import hotbed as hb
from hotbed.compat.hugectr.translate import DenseWeight
from hotbed.compat.hugectr.weights import (
    SparseFile,
    load_collection,
    load_dense,
    load_dense_states,
    load_served,
    load_sparse,
    load_sparse_states,
    save_collection,
    save_dense,
    save_dense_states,
    save_sparse,
    save_sparse_states,
)
from hotbed.errors import ConfigError, FormatError, PersistError
from hotbed.optim.dense import dense_optimizer

VECTORS = {3: (0.5, -1.5), 7: (2.0, 0.25), 4_000_000_000: (1e-3, 8.0)}
KEYS = list(VECTORS)


def rows(table: hb.Table, column: str = "value") -> dict[int, list[float]]:
    """What a table holds by id."""
    parts = [(batch["id"].to_pylist(), batch[column].to_pylist()) for batch in table.export()]
    return {one: row for ids, values in parts for one, row in zip(ids, values, strict=True)}


def table(**keywords: Any) -> hb.Table:
    return hb.Table("t", 2, **keywords)


def filled(vectors: dict[int, tuple[float, float]] = VECTORS, **keywords: Any) -> hb.Table:
    """A table with these rows."""
    made = table(**keywords)
    slots = made.find_or_insert(np.array(list(vectors)))
    made.update(slots, np.ones((len(slots), 2), np.float32))
    parts = []
    for batch in made.export():
        values = [vectors[one] for one in batch["id"].to_pylist()]
        place = batch.schema.get_field_index("value")
        kind = batch.schema.field("value").type
        parts.append(batch.set_column(place, "value", pa.array(values, kind)))
    made.load(parts)
    return made


def record(form: SparseFile, key: int, slot: int) -> bytes:
    """A row of a file up to v3.0.1, by hand."""
    head = struct.pack("<q" if form.i64 else "<I", key)
    middle = struct.pack("<Q", slot) if form.localized else b""
    return head + middle + struct.pack("<2f", *VECTORS[key])


FILES = [
    SparseFile("file", localized, i64, (0, 7, 8))
    for localized in (False, True)
    for i64 in (False, True)
]
SLOTS = {3: 0, 7: 1, 4_000_000_000: 2}


@pytest.mark.parametrize("form", FILES, ids=lambda form: f"{form.localized}-{form.i64}")
def test_a_file_of_v3_0_holds_records(form: SparseFile, tmp_path: Path) -> None:
    path = tmp_path / "0_sparse_10.model"
    path.write_bytes(b"".join(record(form, key, SLOTS[key]) for key in KEYS))
    read = table()
    assert load_sparse(path, read, form) == 3
    assert rows(read) == {key: [np.float32(one) for one in row] for key, row in VECTORS.items()}
    save_sparse(tmp_path / "again", read, form)
    size = len(path.read_bytes()) // 3
    written = (tmp_path / "again").read_bytes()
    records = {written[n * size : n * size + size] for n in range(3)}
    assert records == {record(form, key, SLOTS[key]) for key in KEYS}
    assert len(written) == 3 * size
    path.write_bytes(path.read_bytes() + b"\0" * 5)
    with pytest.raises(FormatError, match="5 of them left over"):
        load_sparse(path, read, form)


@pytest.mark.parametrize("i64", [False, True])
def test_a_file_of_the_other_kind_of_embedding_is_noticed(i64: bool, tmp_path: Path) -> None:
    """Also where the sizes fit, as 12 rows of 16 bytes are 8 of 24."""
    path = tmp_path / "0_sparse_10.model"
    localized = SparseFile("file", localized=True, i64=i64, offsets=(0, 7, 8))
    distributed = SparseFile("file", localized=False, i64=i64)
    path.write_bytes(b"".join(record(localized, key, SLOTS[key]) for key in KEYS * 4))
    with pytest.raises(FormatError, match=r"expected rows of a distributed .*the number of a slot"):
        load_sparse(path, table(), distributed)
    path.write_bytes(b"".join(record(distributed, key, 0) for key in KEYS * 4))
    with pytest.raises(FormatError, match=r"expected rows of a localized|left over"):
        load_sparse(path, table(), localized)
    keys = [one.to_bytes(8 if i64 else 4, "little") for one in range(3)]
    path.write_bytes(b"".join(key + b"\0" * 8 for key in keys))  # zeros may be of either kind
    assert load_sparse(path, table(), distributed) == 3


def rows_of_keys(keys: np.ndarray, form: SparseFile, dim: int) -> bytes:
    """Rows of these keys in slot 1, with weights as training gives them."""
    weights = np.random.default_rng(3).normal(0, 0.05, (len(keys), dim))
    records = np.zeros(len(keys), form.record(dim))
    records["key"] = keys
    records["vector"] = weights
    if form.localized:
        records["slot_id"] = 1
    return records.tobytes()


@pytest.mark.parametrize(
    "keys",
    [
        np.arange(1020),  # an id of 0 has the bytes of a weight of 0
        np.arange(1020) + 2**29,  # as numbers they are weights
        np.random.default_rng(2).integers(2**31, 2**32, 1020),
        np.random.default_rng(2).integers(-(2**63), 2**63, 1020),
    ],
    ids=["small", "like weights", "large", "hashes"],
)
@pytest.mark.parametrize("localized", [False, True])
@pytest.mark.parametrize("dim", [2, 16])
def test_a_file_with_keys_of_the_other_width_is_refused(
    dim: int, localized: bool, keys: np.ndarray, tmp_path: Path
) -> None:
    """For each number of rows for which the sizes fit, such as 17 of 72 and 18 of 68 bytes."""
    path = tmp_path / "0_sparse_10.model"
    checked = 0
    for i64 in (True, False):
        form = SparseFile("file", localized, i64)
        other = SparseFile("file", localized, not i64)
        for num_keys in range(3, 60):
            part = keys[:num_keys]
            fits = num_keys * form.record(dim).itemsize % other.record(dim).itemsize == 0
            if not fits or (not i64 and (part < 0).any()):
                continue
            checked += 1
            path.write_bytes(rows_of_keys(part, form, dim))
            wrong = hb.Table("t", dim)
            with pytest.raises(FormatError, match=r"keys of|number of a slot|each key once"):
                load_sparse(path, wrong, other)
            assert len(wrong) == 0
            assert load_sparse(path, hb.Table("t", dim), form) == num_keys
    assert checked >= 3


@pytest.mark.parametrize("form", [SparseFile("file"), SparseFile("folder")])
def test_keys_that_come_twice_are_refused_and_those_outside_of_their_slots_warned_of(
    form: SparseFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training takes a key outside as an ordinary one, so that its own files may hold it."""
    path = tmp_path / "model"
    save_sparse(path, filled(), form)
    keys = path / "key" if form.form == "folder" else path
    data = bytearray(keys.read_bytes())
    step = form.record(2).itemsize if form.form == "file" else 8
    read = table()
    known = replace(form, keys=range(4_000_000_001))
    assert load_sparse(path, table(), known) == 3
    assert not caplog.text
    assert load_sparse(path, table(), replace(form, keys=range(1000))) == 3
    assert re.search(
        r"row \d: expected a key from 0 to 999, .*, got 4000\d*, and 1 such keys of 3", caplog.text
    )
    data[2 * step : 2 * step + 8] = data[:8]
    keys.write_bytes(data)
    with pytest.raises(FormatError, match=r"model.*row 2: expected each key once, got .*row 0"):
        load_sparse(path, read, form)
    assert len(read) == 0


@pytest.mark.parametrize("form", [SparseFile("file"), SparseFile("folder")])
def test_a_table_without_rows_is_not_served(form: SparseFile, tmp_path: Path, caplog: Any) -> None:
    save_sparse(tmp_path / "model", table(), form)
    with pytest.raises(FormatError, match="model: expected the rows of a table, got none"):
        load_served(tmp_path / "model", table(), form)
    load_sparse(tmp_path / "model", table(), form)
    assert "model: no rows, so that the ids of table 't' have none" in caplog.text


def folder(path: Path, *, localized: bool) -> Path:
    """A table from v3.1 on, by hand."""
    path.mkdir()
    (path / "key").write_bytes(struct.pack("<3q", *KEYS))
    numbers = [one for key in KEYS for one in VECTORS[key]]
    (path / "emb_vector").write_bytes(struct.pack("<6f", *numbers))
    if localized:
        (path / "slot_id").write_bytes(struct.pack("<3Q", *(SLOTS[key] for key in KEYS)))
    return path


@pytest.mark.parametrize("localized", [False, True])
def test_a_folder_of_v3_1_holds_keys_slots_and_vectors(localized: bool, tmp_path: Path) -> None:
    form = SparseFile("folder", localized, i64=False, offsets=(0, 7, 8))
    path = folder(tmp_path / "0_sparse_10.model", localized=localized)
    read = table()
    assert load_sparse(path, read, form) == 3
    assert rows(read) == {key: [np.float32(one) for one in row] for key, row in VECTORS.items()}
    save_sparse(tmp_path / "again", read, form)
    again = tmp_path / "again"
    names = {file.name for file in again.iterdir()}
    assert names == {"key", "emb_vector"} | ({"slot_id"} if localized else set())
    keys = struct.unpack("<3q", (again / "key").read_bytes())
    numbers = struct.unpack("<6f", (again / "emb_vector").read_bytes())
    found = {key: numbers[2 * n : 2 * n + 2] for n, key in enumerate(keys)}
    assert found == {key: tuple(np.float32(VECTORS[key])) for key in KEYS}
    if localized:
        slots = struct.unpack("<3Q", (again / "slot_id").read_bytes())
        assert dict(zip(keys, slots, strict=True)) == SLOTS


NAN = struct.pack("<f", math.nan)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("key", lambda data: data[:-1], "left over"),
        ("key", lambda data: data[:-8], "expected 16 bytes for 2 vectors of 2, got 24, 8 too many"),
        ("emb_vector", lambda data: data + b"\0" * 8, "got 32, 8 too many"),
        ("emb_vector", lambda data: data[:-4], "got 20, 4 missing"),
        ("emb_vector", lambda data: data[:-8] + NAN + data[-4:], "emb_vector: row 2: .*got nan"),
        ("slot_id", lambda data: data + b"\0", "for 3 slots, got 25, 1 too many"),
    ],
)
def test_a_folder_with_files_of_another_size_is_refused(
    file: str, change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "model", localized=True)
    (path / file).write_bytes(change((path / file).read_bytes()))
    read = table()
    with pytest.raises(FormatError, match=message):
        load_sparse(path, read, SparseFile("folder", localized=True))
    assert len(read) == 0
    (path / file).unlink()
    with pytest.raises(PersistError, match=f"{file}: expected a file, got nothing"):
        load_sparse(path, read, SparseFile("folder", localized=True))


def test_a_key_of_64_bits_does_not_fit_a_file_of_32(tmp_path: Path) -> None:
    for key in (2**32, -1):
        with pytest.raises(FormatError, match=f"cannot hold this id, got {key}.*i64_input_key"):
            save_sparse(tmp_path / "f", filled({key: (0.0, 0.0)}), SparseFile("file", i64=False))
        assert not (tmp_path / "f").exists()
    save_sparse(tmp_path / "f", filled({2**32 - 1: (0.0, 0.0)}), SparseFile("file", i64=False))


def test_an_empty_table_is_written_and_read(tmp_path: Path) -> None:
    for form in (SparseFile("file"), SparseFile("folder", localized=True)):
        path = tmp_path / form.form
        save_sparse(path, table(), form)
        assert load_sparse(path, table(), form) == 0


@pytest.mark.parametrize(
    ("rule", "num_states"), [(hb.Sgd(), 0), (hb.Adagrad(), 1), (hb.Adam(), 2), (hb.Ftrl(), 2)]
)
def test_states_of_rows_are_blocks_in_the_order_of_the_keys(
    rule: Any, num_states: int, tmp_path: Path
) -> None:
    form = SparseFile()
    before = filled(rule=rule)
    save_sparse(tmp_path / "rows", before, form)
    save_sparse_states(tmp_path / "states", before, SparseFile())
    keys = struct.unpack("<3q", (tmp_path / "rows" / "key").read_bytes())
    data = (tmp_path / "states").read_bytes()
    assert len(data) == num_states * 3 * 2 * 4
    if num_states:
        states = rows(before, "state")
        first = [one for key in keys for one in states[key][:2]]
        assert list(struct.unpack_from("<6f", data)) == first
        last = [one for key in keys for one in states[key][-2:]]
        assert list(struct.unpack_from("<6f", data, len(data) - 24)) == last
    after = table(rule=rule)
    load_sparse_states(tmp_path / "states", tmp_path / "rows", after, form)
    if num_states:
        assert rows(after, "state") == rows(before, "state")
        assert rows(after) == rows(before)
    (tmp_path / "states").write_bytes(data + b"\0" * 4)
    with pytest.raises(FormatError, match=r"4 too many|expected .* bytes of state"):
        load_sparse_states(tmp_path / "states", tmp_path / "rows", after, form)


@pytest.mark.parametrize(("rule", "block"), [(hb.Adagrad(), 0), (hb.Adam(), 1), (hb.Ftrl(), 0)])
def test_a_state_that_no_sum_of_squares_has_is_refused(
    rule: Any, block: int, tmp_path: Path
) -> None:
    """Such as m of Adam, where Ftrl has n."""
    path = tmp_path / "states"
    save_sparse(tmp_path / "rows", filled(rule=rule), SparseFile())
    save_sparse_states(path, filled(rule=rule), SparseFile())
    states = np.fromfile(path, np.float32)
    states[6 * block + 4] = -0.5
    states.tofile(path)
    with pytest.raises(FormatError, match=r"states: .*squares, got -0\.5 at number 4 of them"):
        load_sparse_states(path, tmp_path / "rows", table(rule=rule), SparseFile())
    states[6 * block + 4] = np.inf
    states.tofile(path)
    with pytest.raises(FormatError, match=r"states: row 2: expected finite numbers, got inf"):
        load_sparse_states(path, tmp_path / "rows", table(rule=rule), SparseFile())
    network = Net()
    optimizer = dense_optimizer(rule, network.parameters())
    save_dense_states(path, optimizer, network, TRANSLATION)
    states = np.fromfile(path, np.float32)
    for value, message in ((-0.5, "expected sums of squares, got -0.5"), (np.nan, "layer 'fc1'")):
        states[14 * block] = value
        states.tofile(path)
        with pytest.raises(FormatError, match=message):
            load_dense_states(path, optimizer, network, TRANSLATION)


@pytest.mark.parametrize("rule", [hb.Momentum(lr_inside=True), hb.Nesterov(lr_inside=True)])
def test_sums_of_squares_that_are_taken_as_momentum_are_warned_of(
    rule: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have its size, and files of states do not say whose they are."""
    path = tmp_path / "states"
    save_sparse(tmp_path / "rows", filled(rule=rule), SparseFile())
    save_sparse_states(path, filled(rule=rule), SparseFile())
    states = np.fromfile(path, np.float32)
    for factor, is_warned in ((-1, False), (1, True)):
        (factor * (np.abs(states) + 1)).astype(np.float32).tofile(path)
        load_sparse_states(path, tmp_path / "rows", table(rule=rule), SparseFile())
        assert ("as the sums of AdaGrad" in caplog.text) is is_warned


def test_lazy_global_keeps_its_times(tmp_path: Path) -> None:
    form = SparseFile(keeps_times=True)
    before = filled(rule=hb.Adam(scope="catch_up"))
    for _ in range(4):
        before.update(before.find(np.array([7])), np.ones((1, 2), np.float32))
    save_sparse(tmp_path / "rows", before, form)
    save_sparse_states(tmp_path / "states", before, form)
    data = (tmp_path / "states").read_bytes()
    assert len(data) == 3 * 2 * (4 + 4 + 8)
    assert struct.unpack_from("<6Q", data, 48) == (5,) * 6
    after = table(rule=hb.Adam(scope="catch_up"))
    load_sparse_states(tmp_path / "states", tmp_path / "rows", after, form)
    assert after.step == before.step == 5
    for one in (before, after):
        one.update(one.find(np.array([3])), np.ones((1, 2), np.float32))
    assert rows(after) == rows(before)
    (tmp_path / "states").write_bytes(data[:48])  # as HugeCTR writes it
    load_sparse_states(tmp_path / "states", tmp_path / "rows", after, form)
    # HugeCTR's memory of six places has the same size: the last half is v, not times
    numbers = [*range(1, 13), *range(101, 113)]
    (tmp_path / "states").write_bytes(struct.pack("<24f", *numbers))
    other = table(rule=hb.Adam(scope="catch_up"))
    load_sparse_states(tmp_path / "states", tmp_path / "rows", other, form)
    keys = struct.unpack("<3q", (tmp_path / "rows" / "key").read_bytes())
    assert rows(other, "state")[keys[1]] == [3, 4, 103, 104]
    assert other.step == 0


def test_places_behind_the_last_key_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path / "rows", localized=False)
    blocks = [*range(1, 11), *range(11, 21)]  # 5 places of 2 numbers, twice
    (tmp_path / "states").write_bytes(struct.pack("<20f", *blocks))
    read = table(rule=hb.Adam())
    with caplog.at_level(logging.WARNING, "hotbed.compat.hugectr"):
        load_sparse_states(tmp_path / "states", path, read, SparseFile())
    states = rows(read, "state")
    assert [states[key] for key in KEYS] == [[1, 2, 11, 12], [3, 4, 13, 14], [5, 6, 15, 16]]
    assert "5 places for 3 keys" in caplog.text


@pytest.mark.parametrize("rule", [hb.Momentum(lr=0.5), hb.Nesterov(lr=0.5)])
def test_momentum_of_rows_contains_the_learning_rate(rule: Any, tmp_path: Path) -> None:
    before = filled(rule=rule)  # one step with gradients of 1: HugeCTR's m is -lr * 1
    save_sparse(tmp_path / "rows", before, SparseFile())
    for lr, value in ((None, -0.5), (0.25, -0.25)):
        save_sparse_states(tmp_path / "states", before, SparseFile(), lr)
        assert struct.unpack("<6f", (tmp_path / "states").read_bytes()) == (value,) * 6
        after = table(rule=rule)
        load_sparse_states(tmp_path / "states", tmp_path / "rows", after, SparseFile(), lr)
        assert rows(after, "state") == rows(before, "state")
    with pytest.raises(ConfigError, match="learning rate of 0"):
        load_sparse_states(tmp_path / "states", tmp_path / "rows", after, SparseFile(), 0.0)


@pytest.mark.parametrize("kind", [hb.Momentum, hb.Nesterov])
def test_momentum_with_the_rate_inside_is_written_as_it_is(kind: Any, tmp_path: Path) -> None:
    """So that a file is right whatever the rates were: here 0.5, and now 0."""
    rule = kind(lr=0.5, lr_inside=True)
    before = filled(rule=rule)
    save_sparse(tmp_path / "rows", before, SparseFile())
    save_sparse_states(tmp_path / "states", before, SparseFile(), 0.0)
    assert struct.unpack("<6f", (tmp_path / "states").read_bytes()) == (-0.5,) * 6
    after = table(rule=rule)
    load_sparse_states(tmp_path / "states", tmp_path / "rows", after, SparseFile(), 0.0)
    assert rows(after, "state") == rows(before, "state")


# --- dense ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.cross = nn.Parameter(torch.arange(6.0).reshape(3, 2))
        self.bn = nn.BatchNorm1d(2)


TRANSLATION: Any = SimpleNamespace(
    dense_weights=(
        DenseWeight("fc1", "fc.weight", True, (3, 2)),
        DenseWeight("fc1", "fc.bias", False, (1, 2)),
        DenseWeight("cross", "cross", False, (3, 2)),
    ),
    statistics=(
        DenseWeight("bn1", "bn.running_mean", False, (2,)),
        DenseWeight("bn1", "bn.running_var", False, (2,)),
    ),
)


def test_the_dense_file_holds_the_layers_in_order(tmp_path: Path) -> None:
    network = Net()
    numbers = [float(n) for n in range(14)]
    path = tmp_path / "_dense_10.model"
    path.write_bytes(struct.pack("<14f", *numbers))
    statistics = {"layers": [{"type": "BatchNorm", "mean": [1.5, 2.5], "var": [3.0, 4.0]}]}
    Path(f"{path}.ntp.json").write_text(json.dumps(statistics))
    load_dense(path, network, TRANSLATION)
    assert network.fc.weight.tolist() == [[0, 2, 4], [1, 3, 5]]  # W of HugeCTR is [in, out]
    assert network.fc.bias.tolist() == [6, 7]
    assert network.cross.tolist() == [[8, 9], [10, 11], [12, 13]]
    assert network.bn.running_mean.tolist() == [1.5, 2.5]
    assert network.bn.running_var.tolist() == [3, 4]
    save_dense(tmp_path / "again", network, TRANSLATION)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "again.ntp.json").read_text()) == statistics


def test_statistics_may_lie_elsewhere(tmp_path: Path) -> None:
    network = Net()
    (tmp_path / "f").write_bytes(b"\0" * 56)
    with pytest.raises(PersistError, match=r"other\.json: expected the means and variances"):
        load_dense(tmp_path / "f", network, TRANSLATION, tmp_path / "other.json")
    statistics = {"layers": [{"type": "BatchNorm", "mean": [1.5, 2.5], "var": [3.0, 4.0]}]}
    (tmp_path / "other.json").write_text(json.dumps(statistics))
    load_dense(tmp_path / "f", network, TRANSLATION, tmp_path / "other.json")
    assert network.bn.running_mean.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("num_floats", [13, 15])
def test_a_dense_file_of_another_size_is_refused(num_floats: int, tmp_path: Path) -> None:
    network = Net()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    (tmp_path / "f").write_bytes(b"\0" * 4 * num_floats)
    with pytest.raises(FormatError, match=f"expected 56 bytes .*, got {num_floats * 4}, 4 "):
        load_dense(tmp_path / "f", network, TRANSLATION)
    (tmp_path / "f").write_bytes(b"\0" * 56)
    for text in ('{"layers": []}', "[]", '{"layers": [{"type": "BatchNorm", "mean": [1]}]}'):
        (tmp_path / "f.ntp.json").write_text(text)
        with pytest.raises(FormatError, match=r"ntp\.json: expected"):
            load_dense(tmp_path / "f", network, TRANSLATION)
    assert all((network.state_dict()[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize(
    "rule",
    [
        hb.Adam(),
        hb.Adagrad(),
        hb.Ftrl(),
        hb.RmsProp(),
        hb.Sgd(),
        hb.Momentum(lr=0.5),
        hb.Nesterov(lr=0.5),
        hb.Momentum(lr=0.5, lr_inside=True),
        hb.Nesterov(lr=0.5, lr_inside=True),
    ],
    ids=repr,
)
def test_dense_states_are_blocks_of_all_layers(rule: Any, tmp_path: Path) -> None:
    network = Net()
    optimizer = dense_optimizer(rule, network.parameters())
    assert optimizer is not None
    for _ in range(3):
        network.zero_grad()
        (network.fc(torch.ones(1, 3)).sum() + network.cross.square().sum()).backward()
        optimizer.step()
    path = tmp_path / "states"
    save_dense_states(path, optimizer, network, TRANSLATION)
    data = path.read_bytes()
    names = {
        "Adam": ["exp_avg", "exp_avg_sq"],
        "Adagrad": ["sum"],
        "Ftrl": ["n", "z"],
        "RmsProp": ["square_avg"],
        "Momentum": ["momentum_buffer"],
        "Nesterov": ["momentum_buffer"],
    }
    kept = names.get(type(rule).__name__, [])
    factor = 1.0
    if "momentum_buffer" in kept:  # HugeCTR: m = mu * m - lr * g
        factor = -1.0 if rule.lr_inside else -rule.lr
    assert len(data) == 56 * len(kept)
    for block, name in enumerate(kept):
        states = {
            path: optimizer.state[one][name]
            for path, one in network.named_parameters()
            if name in optimizer.state[one]
        }
        expected = [*states["fc.weight"].T.flatten().tolist(), *states["fc.bias"].tolist()]
        expected += states["cross"].flatten().tolist()
        written = struct.unpack_from("<14f", data, 56 * block)
        assert list(written) == [one * factor for one in expected]
    twin = Net()
    twin.load_state_dict(network.state_dict())
    fresh = dense_optimizer(rule, twin.parameters())
    assert fresh is not None
    load_dense_states(path, fresh, twin, TRANSLATION, step=3)
    for one, own in ((network, optimizer), (twin, fresh)):
        one.zero_grad()
        (one.fc(torch.ones(1, 3)).sum() + one.cross.square().sum()).backward()
        own.step()
    assert torch.equal(network.fc.weight, twin.fc.weight)
    assert torch.equal(network.cross, twin.cross)


# --- embedding collections ------------------------------------------------------------------------


@pytest.mark.parametrize("i64", [False, True])
def test_a_collection_holds_its_tables(i64: bool, tmp_path: Path) -> None:
    home = tmp_path / "embedding_collection_0"
    home.mkdir()
    key = "q" if i64 else "I"
    tables = {0: {3: (0.5, 1.0)}, 2: {7: (2.0, 3.0), 9: (4.0, 5.0)}}
    meta = struct.pack("<5i", 2, int(i64), 0, 0, 0) + struct.pack("<2i2q2i", 0, 2, 1, 2, 2, 2)
    (home / "meta_data").write_bytes(meta)
    for place, (number, content) in enumerate(tables.items()):
        head = struct.pack("<2i", 1, number) + b"\0" * 120
        ids = struct.pack(f"<{len(content)}{key}", *content)
        (home / f"key{place}").write_bytes(head + ids)
        numbers = [one for row in content.values() for one in row]
        head = struct.pack("<2i", 2, number) + b"\0" * 120
        values = struct.pack(f"<{len(numbers)}f", *numbers)
        (home / f"weight{place}").write_bytes(head + values)
    read = {number: table() for number in tables}
    assert load_collection(tmp_path, read) == 3
    for number, content in tables.items():
        assert rows(read[number]) == {one: list(row) for one, row in content.items()}
    whole = (home / "weight1").read_bytes()
    (home / "weight1").write_bytes(whole[:-4] + NAN)
    with pytest.raises(FormatError, match=r"weight1: row 1: expected finite numbers, got nan"):
        load_collection(tmp_path, read)
    (home / "weight1").write_bytes(whole)
    save_collection(tmp_path / "again", read, i64=i64)
    written = tmp_path / "again" / "embedding_collection_0"
    assert (written / "meta_data").read_bytes() == meta
    assert (written / "key0").read_bytes() == (home / "key0").read_bytes()
    assert (written / "weight0").read_bytes() == (home / "weight0").read_bytes()
    assert len((written / "weight1").read_bytes()) == len((home / "weight1").read_bytes())
    again = {number: table() for number in tables}
    load_collection(tmp_path / "again", again)
    assert rows(again[2]) == rows(read[2])
    with pytest.raises(FormatError, match=r"does not hold table 1 .*got tables \[0, 2\]"):
        load_collection(tmp_path, {1: table()})
    with pytest.raises(FormatError, match=r"vectors of 3 for table 0 .*, got 2"):
        load_collection(tmp_path, {0: hb.Table("t", 3)})
    for name in ("meta_data", "key1", "weight1"):
        path = written / name
        data = path.read_bytes()
        path.write_bytes(data + b"\0")
        with pytest.raises(FormatError, match=f"{name}: expected"):
            load_collection(tmp_path / "again", again)
        path.write_bytes(data)
