# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of networks, tables and optimizers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.errors import PersistError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.checkpoint import State, save
from hotbed.persist.state.network import flatten, unflatten
from hotbed.persist.state.restoring import restore

torch.set_num_threads(1)  # the networks here are tiny: threads would only wait for each other
EXTREMES = np.array([0, -1, -2, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 12345])


def trained_table(rule: Any, **keywords: Any) -> hb.Table:
    table = hb.Table("t", 3, rule=rule, **keywords)
    for step in range(3):
        slots = table.find_or_insert(EXTREMES, time=np.arange(6) * 10 + step)
        table.update(slots, np.full((6, 3), 0.1 * (step + 1), np.float32))
    return table


def tables_equal(a: hb.Table, b: hb.Table) -> bool:
    return (
        len(a) == len(b)
        and a.scalars() == b.scalars()
        and list(a.export()) == list(b.export())
        and list(a.candidates()) == list(b.candidates())
    )


@pytest.mark.parametrize(
    "rule",
    [
        hb.Sgd(),
        hb.Adagrad(),
        hb.RowwiseAdagrad(),
        hb.Adam(),
        hb.Ftrl(),
        hb.Adam(scope="catch_up"),
        hb.Momentum(lr=0.1),
    ],
)
def test_a_table_comes_back_bit_for_bit_and_goes_on_alike(tmp_path: Path, rule: Any) -> None:
    table = trained_table(rule, evict=hb.Ttl(seconds=100))
    table.remove(EXTREMES[:1])
    save(tmp_path, State(tables={"t": table}))
    other = hb.Table("t", 3, rule=rule, evict=hb.Ttl(seconds=100))
    # rows that the checkpoint does not have go
    other.find_or_insert(np.array([7, 8, 9]), time=np.zeros(3, np.int64))
    restore(open_checkpoint(tmp_path), State(tables={"t": other}))
    assert tables_equal(table, other)
    for one in (table, other):
        slots = one.find_or_insert(EXTREMES[::-1].copy(), time=np.full(6, 99))
        one.update(slots, np.full((6, 3), 0.3, np.float32))
        one.evict(99_000_000)
    assert tables_equal(table, other)
    assert other.stats["evicted_removed"] == 1


@pytest.mark.parametrize(
    "admit", [hb.MinCount(4), hb.MinCount(4, sketch_bytes=1 << 16), hb.Probability(0.2)]
)
def test_ids_that_wait_for_admission_keep_their_counts(tmp_path: Path, admit: Any) -> None:
    make = lambda: hb.Table("t", 2, admit=admit)  # noqa: E731
    table = make()
    for _ in range(3):
        table.find_or_insert(np.arange(100))
    save(tmp_path, State(tables={"t": table}))
    other = make()
    restore(open_checkpoint(tmp_path), State(tables={"t": other}))
    np.testing.assert_array_equal(
        table.find_or_insert(np.arange(100)) >= 0, other.find_or_insert(np.arange(100)) >= 0
    )
    assert tables_equal(table, other)


def test_an_empty_table_and_a_bare_network_can_be_saved(tmp_path: Path) -> None:
    save(tmp_path, State(network=nn.ReLU(), tables={"t": hb.Table("t", 3)}))
    restore(open_checkpoint(tmp_path), State(network=nn.ReLU(), tables={"t": hb.Table("t", 3)}))


def test_tables_are_files_that_polars_reads_without_hotbed(tmp_path: Path) -> None:
    folder = save(tmp_path, State(tables={"t": trained_table(hb.Adagrad())})).folder
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    rows = pl.concat(
        [pl.read_ipc(folder / part["file"]) for part in manifest["tables"][0]["parts"]]
    )
    assert set(rows["id"]) == set(EXTREMES.tolist())
    assert rows["value"].dtype == pl.Array(pl.Float32, 3)
    assert rows["partition"].is_sorted()


def stepped(make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2).bfloat16().float())
    optimizer = make(network.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    return network, optimizer


OPTIMIZERS = [
    torch.optim.SGD,
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    torch.optim.Adam,
    lambda p: torch.optim.AdamW(p, amsgrad=True),
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    lambda p: torch.optim.Adam(list(p), lr=torch.tensor(0.01)),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_dense_optimizers_resume_bit_for_bit(tmp_path: Path, make: Any) -> None:
    network, optimizer = stepped(make)
    save(tmp_path, State(network=network, optimizers={"dense": optimizer, "none": None}))
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    resumed = make(other.parameters())
    restore(open_checkpoint(tmp_path), State(network=other, optimizers={"dense": resumed}))
    for net, opt in ((network, optimizer), (other, resumed)):
        torch.manual_seed(5)
        opt.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        opt.step()
    for a, b in zip(network.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    first, second = (opt.state_dict() for opt in (optimizer, resumed))
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for number, entries in first["state"].items():
        for key, value in entries.items():
            assert value is None or torch.equal(
                torch.as_tensor(value), torch.as_tensor(second["state"][number][key])
            )


def test_shared_and_bfloat16_parameters_keep_shape_dtype_and_bits(tmp_path: Path) -> None:
    network = nn.ModuleDict({"a": nn.Linear(3, 3).bfloat16(), "b": nn.Linear(3, 3)})
    network["c"] = nn.Linear(3, 3)
    network["c"].weight = network["b"].weight
    save(tmp_path, State(network=network))
    other = nn.ModuleDict(
        {"a": nn.Linear(3, 3).bfloat16(), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)}
    )
    restore(open_checkpoint(tmp_path), State(network=other))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
        assert tensor.dtype == other.state_dict()[name].dtype


def test_optimizer_state_that_is_no_tensor_and_no_json_is_refused_by_name(tmp_path: Path) -> None:
    network, optimizer = stepped(torch.optim.Adam)
    optimizer.state[next(network.parameters())]["hook"] = print
    with pytest.raises(PersistError, match="state 'hook' cannot be saved"):
        save(tmp_path, State(network=network, optimizers={"dense": optimizer}))
    assert not list(tmp_path.iterdir())


def test_a_network_or_optimizer_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    network, optimizer = stepped(torch.optim.Adam)
    save(tmp_path, State(network=network, optimizers={"dense": optimizer}))
    reader = open_checkpoint(tmp_path)
    with pytest.raises(PersistError, match=r"parameter '0\.bias' is"):
        restore(reader, State(network=nn.Sequential(nn.Linear(4, 9))))
    with pytest.raises(PersistError, match="state of Adam, got SGD"):
        unflatten(
            torch.optim.SGD(network.parameters()),
            "dense",
            {},
            reader.manifest.dense.optimizers["dense"],
        )
    with pytest.raises(PersistError, match="does not fit"):
        unflatten(
            torch.optim.Adam([nn.Parameter(torch.zeros(1))]), "dense", *flatten(optimizer, "dense")
        )
    with pytest.raises(PersistError, match=r"it has tables \[\]"):
        restore(reader, State(tables={"t": hb.Table("t", 2)}))


def test_nothing_changes_when_a_file_is_bad(tmp_path: Path) -> None:
    network, optimizer = stepped(torch.optim.Adam)
    table = trained_table(hb.Adagrad())
    folder = save(
        tmp_path, State(network=network, tables={"t": table}, optimizers={"dense": optimizer})
    ).folder
    part = next((folder / "tables").rglob("*.arrow"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    other, resumed = stepped(torch.optim.Adam)
    with torch.no_grad():
        other[0].weight.zero_()
    fresh = hb.Table("t", 3, rule=hb.Adagrad())
    with pytest.raises(PersistError, match=r"rows-000-255\.arrow"):
        restore(
            open_checkpoint(tmp_path),
            State(network=other, tables={"t": fresh}, optimizers={"dense": resumed}),
        )
    assert not other[0].weight.any()
    assert len(fresh) == 0


def test_every_name_of_checkpoints_resolves_and_without_torch_says_what_to_install() -> None:
    for name in hb.checkpoints.__all__:
        assert (getattr(hb.checkpoints, name).__doc__ or "").strip(), name
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import hotbed as hb\n"
        "hb.checkpoints.verify\n"
        "try:\n    hb.checkpoints.Saver\n"
        "except hb.errors.MissingExtra as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "hotbed[train]" in done.stdout, done.stderr
