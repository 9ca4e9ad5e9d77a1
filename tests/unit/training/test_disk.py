# SPDX-License-Identifier: Apache-2.0
"""Models whose rows lie on a disk: the bits of memory through resumes, and what they show of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from on_disk import mounted, room_for
from schedule import in_soak
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli import commands as cli
from hotbed.cli.checkpoints import print_checkpoint
from hotbed.embedding.modules import table_modules
from hotbed.errors import ConfigError, FormatError, StorageFull, TableError, TableFull
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state import checkpoint
from hotbed.persist.state.digest import content_digest
from hotbed.persist.upkeep.inspect import describe_checkpoint
from hotbed.training.callbacks import Checkpoint, Evict
from hotbed.training.run import Run
from hotbed.training.watching.readings import readings

ROWS = 768
SCHEMA = hb.Schema([hb.Label("y"), hb.Time("t"), hb.Id("user"), hb.Id("item")])
RULES = {"deltas": hb.Adagrad(lr=0.1), "fulls": hb.Adam(lr=0.01, scope="catch_up")}


def events() -> dict[str, Any]:
    """Events with more users and items than a table on the disk keeps in memory."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 1500, ROWS)
    item = rng.zipf(1.3, ROWS) % 1000
    return {"y": (user + item) % 2, "t": np.arange(ROWS), "user": user, "item": item}


def dataset() -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(events()), SCHEMA, 64, prefetch=0)


def model_on(tier: hb.Ram | hb.Ssd, **table: Any) -> hb.RecModel:
    torch.manual_seed(3)
    keywords = {"rule": RULES["deltas"], "evict": hb.Ttl(seconds=400)} | table
    tables = hb.make_tables(SCHEMA, 4, tier=tier, **keywords)
    network = hb.models.DNN(SCHEMA, tables, hidden=[4])
    return hb.RecModel(network, "bce", "adam", {"auc"})


def rows_of(model: hb.RecModel) -> list[Any]:
    """All rows and counters of its tables."""
    return [(list(table.export()), table.scalars()) for table in model.tables.values()]


def digest_of(model: hb.RecModel, folder: Path) -> str:
    """The content digest of a model, which is saved for it."""
    model.save(folder)
    return content_digest(open_checkpoint(folder))


@pytest.fixture
def disk(tmp_path: Path) -> hb.Ssd:
    """Of a table with about 1,000 rows, 250 are in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return hb.Ssd(folder, ram_rows=250)


def test_a_delta_reads_what_changed_from_the_disk_and_says_how_much(
    disk: hb.Ssd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = hb.Table("user", 64, rule=RULES["deltas"], tier=disk)
    state = checkpoint.State(tables={"user": table})

    def learn(ids: range) -> None:
        for lowest in range(ids.start, ids.stop, 100):
            slots = table.find_or_insert(np.arange(lowest, lowest + 100))
            table.update(slots, np.ones((100, 64), np.float32))

    def read() -> float:
        """MiB that the save before says to have read."""
        (mib,) = re.findall(r"read ([0-9.]+) MiB from the disk", caplog.text)
        caplog.clear()
        return float(mib)

    caplog.set_level("INFO", logger="hotbed")
    learn(range(12_000))
    assert checkpoint.track_changes([table])
    first = checkpoint.write(tmp_path / "saved", checkpoint.capture(state))
    full = read()
    assert full > 12_000 * 64 * 4 / 2**20
    learn(range(700))
    for lowest in range(1_000, 3_000, 100):  # they take the frames, and do not change
        table.find_or_insert(np.arange(lowest, lowest + 100))
    while table.tier_stats["waiting_extents"]:  # what is not written yet is read in memory
        time.sleep(0.001)
    checkpoint.write(tmp_path / "saved", checkpoint.capture(state, changes=True), parent=first)
    assert 0 < read() < full / 10


@pytest.mark.parametrize("saves", in_soak(RULES, {"deltas"}))
def test_a_stream_that_changes_its_tier_at_each_resume_ends_at_the_bits_of_memory(
    saves: str, disk: hb.Ssd, tmp_path: Path
) -> None:
    def follow(name: str, tier: hb.Ram | hb.Ssd, max_steps: int) -> None:
        publish = hb.PublishDirectory(tmp_path / f"{name} published", keep=9)
        save = Checkpoint(
            tmp_path / name, every_steps=3, full_every=2, keep=9, wait=True, publish=publish
        )
        torch.manual_seed(1)
        model = model_on(tier, rule=RULES[saves])
        model.online_train(
            dataset(), [Evict(step_interval=4), save], progress=False, max_steps=max_steps
        )
        if isinstance(tier, hb.Ssd):
            assert model.tables["user"].tier_stats["misses"] > 0

    follow("memory", hb.Ram(), ROWS // 64)
    for tier, max_steps in ((hb.Ram(), 2), (disk, 8), (hb.Ram(), ROWS // 64)):
        follow("moved", tier, max_steps)
    follow("all on disk", disk, ROWS // 64)

    def digests(name: str) -> dict[int, set[str]]:
        """Those of the states by step; of a step that has a delta and a full, they are the same."""
        by_step: dict[int, set[str]] = {}
        for folder in sorted((tmp_path / name).glob("checkpoint-*")):
            state = open_checkpoint(folder)
            by_step.setdefault(state.manifest.counters["steps"], set()).add(content_digest(state))
        return by_step

    memory = digests("memory")
    assert list(memory) == [0, 3, 6, 9, 12]
    assert all(len(states) == 1 for states in memory.values())
    assert digests("all on disk") == memory
    assert digests("moved")[12] == memory[12]
    assert digests("all on disk published") == digests("memory published")
    assert len(digests("memory published")) > 2
    assert not list(Path(disk.path).iterdir())


@pytest.mark.parametrize("grains", [1, 4])
def test_frames_for_little_more_than_one_batch_are_enough(disk: hb.Ssd, grains: int) -> None:
    """A step that is done holds no rows while the next batch is mapped."""
    rows = {"y": np.arange(ROWS) % 2, "t": np.arange(ROWS), "user": np.arange(ROWS)}
    data = hb.Dataset(hb.sources.Memory(rows | {"item": np.arange(ROWS)}), SCHEMA, 64, prefetch=0)
    tables = hb.make_tables(SCHEMA, 4, tier=hb.Ssd(disk.path, ram_rows=77))
    network = hb.models.DNN(SCHEMA, tables, hidden=[4])
    hb.RecModel(network, "bce", "adam", grains=grains).fit(data, epochs=2, progress=False)
    assert tables["user"].tier_stats["misses"] > 500


def test_a_model_is_loaded_on_a_machine_without_its_folder_when_it_gets_another_tier(
    disk: hb.Ssd, tmp_path: Path
) -> None:
    model = model_on(disk)
    model.fit(dataset(), progress=False)
    model.save(tmp_path / "saved")
    before = {name: table.tier for name, table in hb.load(tmp_path / "saved").tables.items()}
    assert before == {"user": disk, "item": disk}
    Path(disk.path).rmdir()
    with pytest.raises(FormatError, match=r"tier\.path: does not exist.*pass tier=hb\.Ram\(\)"):
        hb.load(tmp_path / "saved")
    loaded = hb.load(tmp_path / "saved", tier=hb.Ram())
    assert {table.tier for table in loaded.tables.values()} == {hb.Ram()}
    for name, table in loaded.tables.items():
        assert list(table.export()) == list(model.tables[name].export())
    with pytest.raises(ConfigError, match="tier is for a network that is rebuilt"):
        hb.load(tmp_path / "saved", loaded.network, tier=hb.Ram())


def test_a_loaded_model_keeps_what_it_loads_and_reads_in_memory_and_learns_on_as_in_ram(
    disk: hb.Ssd, tmp_path: Path
) -> None:
    """No bit depends on it: scores, rows, counts and evictions are those of memory."""

    first = next(iter(dataset()))
    source = model_on(hb.Ram())
    source.fit(dataset(), progress=False)
    source.save(tmp_path / "saved")
    results = []
    for rows in (None, 5_000, 250):
        tier = hb.Ram() if rows is None else hb.Ssd(disk.path, ram_rows=rows, fetch=0)
        model = hb.load(tmp_path / "saved", tier=tier)
        table = model.tables["user"]
        scores = [model.predict(dataset()).tobytes() for _ in range(2)]
        if rows is not None:
            assert table.tier_stats["resident"] == min(rows, len(table))
        if rows == 5_000:
            assert table.tier_stats["num_reads"] == 0
        for _ in range(4):  # the rows of one batch take the places of others
            before = table.tier_stats.get("num_reads")
            scores.append(model.predict(first).tobytes())
        assert table.tier_stats.get("num_reads") == before
        for _ in range(2):
            model.fit(dataset(), dataset(), callbacks=Evict(step_interval=3), progress=False)
            scores.append(model.predict(dataset()).tobytes())
        results.append((scores, digest_of(model, tmp_path / "after"), rows_of(model)))
    assert results[0] == results[1] == results[2]


def test_single_tables_of_a_loaded_model_are_moved_by_name(disk: hb.Ssd, tmp_path: Path) -> None:
    model_on(disk).save(tmp_path / "saved")
    loaded = hb.load(tmp_path / "saved", tier={"user": hb.Ram()})
    assert {name: table.tier for name, table in loaded.tables.items()} == {
        "user": hb.Ram(),
        "item": disk,
    }
    with pytest.raises(ConfigError, match=r"no table 'usr'.*Did you mean 'user'"):
        hb.load(tmp_path / "saved", tier={"usr": hb.Ram()})
    with pytest.raises(ConfigError, match="tier of table 'user': not a tier, got 'ram'"):
        hb.load(tmp_path / "saved", tier={"user": "ram"})  # type: ignore[dict-item]


def test_commands_move_the_tables_of_a_state_whose_disk_is_not_here(
    disk: hb.Ssd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_on(disk).save(tmp_path / "saved")
    Path(disk.path).rmdir()
    monkeypatch.chdir(tmp_path)
    command = CliRunner().invoke
    for arguments in (["export", "saved", "--out", "x"], ["publish", "saved", "--to", "y"]):
        assert isinstance(command(cli.app, arguments).exception, FormatError)
        for assignment in ("fit.epochs=3", "tables.dim=8", "tables.overrides.user.dim=8"):
            refused = command(cli.app, [*arguments, "--set", assignment]).exception
            assert isinstance(refused, ConfigError)
            assert "unknown key" in str(refused)
        moved = command(cli.app, [*arguments, "--set", "tables.tier=ram"])
        assert moved.exit_code == 0, moved.exception
    moves = [f"tables.overrides.{name}.tier=ram" for name in ("user", "item")]
    sets = [word for move in moves for word in ("--set", move)]
    assert command(cli.app, ["export", "saved", "--out", "z", *sets]).exit_code == 0


def test_summary_inspect_metrics_and_report_say_what_the_disk_takes_and_does(
    disk: hb.Ssd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    class Watch:
        def on_epoch_end(self, run: Run) -> None:
            for reading in readings(run):
                label = next(iter(reading.labels.values()), "")
                assert (reading.name, label) not in seen or "reason" in reading.labels
                seen[reading.name, label] = reading

    model = model_on(disk)
    history = model.fit(dataset(), callbacks=Watch(), progress=False)
    table = model.tables["user"]
    stats = table.tier_stats
    for key in ("hits", "misses", "waited_seconds"):
        reading = seen[f"table_disk_{key}", "user"]
        assert reading.value == stats[key]
        assert reading.total
    assert stats["misses"] > 0
    assert 0 < seen["table_disk_resident", "user"].value <= disk.ram_rows
    written = seen["disk_put_bytes", disk.path]  # one for both tables, which share a file
    assert written.total
    assert written.value == stats["put_bytes"] > 0
    assert history.points[-1].disk["misses"] == sum(
        table.tier_stats["misses"] for table in model.tables.values()
    )

    summary = model.summary()
    sizes = re.search(r"on ssd\(path=.*\): ([\d.,]+) B of memory and ([\d.,]+) B of disk", summary)
    assert sizes is not None
    memory = sum(value for key, value in table.stats.items() if "bytes" in key)
    assert float(sizes[1].replace(",", "")) == pytest.approx(memory / len(table), abs=0.1)
    record = 4 * 4 * 2 + 8  # values, state, head
    assert float(sizes[2].replace(",", "")) >= record

    model.save(tmp_path / "saved")
    capsys.readouterr()
    print_checkpoint(describe_checkpoint(tmp_path / "saved"))
    ids = len(table)
    row = 4 * 4 * 2
    memory = ids * (21.4 + 8 + 8) + 250 * (row + 32)  # of Ttl, too
    line = f"user on its tier: {memory / ids:,.1f} B of memory and {1.5 * record:,.1f} B of disk"
    assert line in capsys.readouterr().out

    page = hb.report.write_report(tmp_path / "report.html", {"train": history}).read_text()
    charts = ("Rows that were not in memory, of each hundred", "Waits for the disk")
    assert all(f"<figcaption>{title}</figcaption>" in page for title in charts)


def test_tables_in_memory_say_nothing_of_disks(tmp_path: Path) -> None:
    model = model_on(hb.Ram())
    history = model.fit(dataset(), progress=False)
    assert {name: table.tier_stats for name, table in model.tables.items()} == {
        "user": {},
        "item": {},
    }
    assert not history.points[-1].disk
    assert "B of disk" not in model.summary()
    page = hb.report.write_report(tmp_path / "report.html", {"train": history}).read_text()
    assert "The disk" not in page


def test_a_table_of_a_job_lies_on_the_disk_that_its_file_names(
    disk: hb.Ssd, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(f"""
schema: {{columns: [{{kind: label, name: y}}, {{kind: id, name: user}}, {{kind: id, name: item}}]}}
train: {{kind: parquet, path: {tmp_path}/rows.parquet}}
model: {{kind: dnn, hidden: [4]}}
tables:
  dim: 4
  overrides:
    user: {{tier: {{kind: ssd, path: {disk.path}, ram_rows: 250, fetch: 2, engine: threads}}}}
fit: {{batch_size: 64}}
output: {tmp_path}/out
""")
    job = hb.Job.read(tmp_path / "job.yaml")
    tables = job.tables.make(SCHEMA, seed=0)
    tier = hb.Ssd(disk.path, 250, fetch=2, engine="threads")
    assert {name: table.tier for name, table in tables.items()} == {"user": tier, "item": hb.Ram()}
    assert tables["user"].tier_stats["engine"] == "threads"
    assert hb.Job.from_json(job.to_json()).tables == job.tables
    (tmp_path / "job.yaml").write_text(
        (tmp_path / "job.yaml").read_text().replace("engine", "engines")
    )
    with pytest.raises(ConfigError, match=r"tables\.overrides\.user\.tier\.engines.*'engine'"):
        hb.Job.read(tmp_path / "job.yaml")


def test_an_ordinary_model_learns_the_same_with_its_rows_on_a_disk(disk: hb.Ssd) -> None:
    columns = events()
    rows = {}
    for tier in (hb.Ram(), disk):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(1500, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        options = {"0": {"tier": tier}}
        model, optimizer, _ = hb.auto(model, optimizer, tables=options)
        for first in range(0, ROWS, 64):
            ids = torch.from_numpy(columns["user"][first : first + 64])
            labels = torch.from_numpy(columns["y"][first : first + 64]).float()
            optimizer.zero_grad()
            logits = model(ids).squeeze(-1)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
            optimizer.step()
        (table,) = model[0].tables
        assert table.tier == tier
        rows[tier] = list(table.export())
    assert rows[hb.Ram()] == rows[disk]


@pytest.mark.parametrize("frozen", ["rows", "all"])
def test_a_frozen_table_on_a_disk_keeps_its_bits_and_reads_as_in_memory(
    frozen: Any, disk: hb.Ssd
) -> None:
    contents = []
    for tier in (hb.Ram(), disk):
        model = model_on(tier)
        model.fit(dataset(), progress=False)
        table = model.tables["user"]
        before = list(table.export())
        table.frozen = frozen
        model.fit(dataset(), progress=False)
        kept = ("id", "value", "state")
        after = list(table.export())
        assert [batch.select(kept) for batch in after] == [batch.select(kept) for batch in before]
        contents.append((after, table.lookup(np.arange(-5, 1500)).tobytes()))
    assert contents[0] == contents[1]


def test_a_batch_larger_than_ram_rows_is_refused_and_changes_nothing(disk: hb.Ssd) -> None:
    table = hb.Table("user", 4, tier=hb.Ssd(disk.path, 10))
    table.find_or_insert(np.arange(10))
    before = list(table.export()), table.stats["rows"]
    with pytest.raises(
        TableFull,
        match=r"table 'user': .*use 11 rows, ram_rows is 10. Raise ram_rows to at least 11",
    ):
        table.find_or_insert(np.arange(11))
    assert (list(table.export()), table.stats["rows"]) == before


def test_the_rows_that_a_refusal_names_suffice_for_all_batches(disk: hb.Ssd) -> None:
    batches = np.random.default_rng(1).zipf(1.3, (200, 64)) % 5_000
    ram_rows = [10]
    while True:
        table = hb.Table("user", 4, tier=hb.Ssd(disk.path, ram_rows[-1]))
        try:
            for ids in batches:
                table.update(table.find_or_insert(ids), np.ones((64, 4), np.float32))
        except TableFull as full:
            ram_rows.append(int(re.findall(r"at least (\d+)", str(full))[0]))
        else:
            break
    assert ram_rows == [10, 64]


def test_a_killed_process_leaves_nothing_on_the_disk(disk: hb.Ssd) -> None:
    code = (
        "import os, signal, sys\n"
        "import numpy as np\n"
        "import hotbed as hb\n"
        "table = hb.Table('user', 64, tier=hb.Ssd(sys.argv[1], 1000))\n"
        "for first in range(0, 20_000, 500):\n"
        "    table.find_or_insert(np.arange(first, first + 500))\n"
        "assert table.tier_stats['file_bytes'] > 1 << 20\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", code, str(disk.path)], env=environment, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert not list(Path(disk.path).iterdir())


def test_an_evaluation_between_forward_and_update_keeps_no_rows_in_memory(disk: hb.Ssd) -> None:
    model = model_on(disk)
    model.fit(dataset(), progress=False)
    first, second, *_ = (batch.map_arrays(torch.from_numpy) for batch in dataset())
    scores = model.network.train()(first)  # its rows stay in memory while it lives
    model.evaluate(dataset())
    model.step(second)
    scores.sum().backward()


def test_states_on_two_folders_have_other_manifests_and_the_same_contents(
    disk: hb.Ssd, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    parents = set()
    digests = set()
    for tier in (disk, replace(disk, path=tmp_path / "other"), hb.Ram()):
        model = model_on(tier)
        model.fit(dataset(), max_steps=2, progress=False)
        digests.add(digest_of(model, tmp_path / "state"))
        parents.add(model.parent)
    assert (len(parents), len(digests)) == (3, 1)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", RULES)
def test_a_copy_of_a_model_has_rows_of_its_own_on_the_disk_and_learns_as_in_memory(
    saves: str, disk: hb.Ssd, tmp_path: Path
) -> None:
    digests = []
    for tier in (hb.Ram(), disk):
        model = model_on(tier, rule=RULES[saves])
        model.fit(dataset(), progress=False)
        first = digest_of(model, tmp_path / "first")
        copied = copy.deepcopy(model)
        assert {table.tier for table in copied.tables.values()} == {tier}
        assert digest_of(copied, tmp_path / "copied") == first
        copied.fit(dataset(), progress=False)
        assert digest_of(model, tmp_path / "first") == first
        model.fit(dataset(), progress=False)
        second = digest_of(model, tmp_path / "first")
        assert digest_of(copied, tmp_path / "copied") == second != first
        digests.append((first, second))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_holds_a_table_says_how_to_save_it_instead_of_a_pickle(
    in_memory: bool, disk: hb.Ssd
) -> None:
    model = model_on(hb.Ram() if in_memory else disk)
    (module,) = table_modules(model.network)
    for held in (model, model.network, module, module.rows[0], model.tables["user"]):
        with pytest.raises(
            ConfigError, match=r"'user'.*cannot be pickled.*RecModel\.save.*deepcopy"
        ):
            pickle.dumps(held)
    with pytest.raises(ConfigError, match=r"'user'.*copy\.copy.*deepcopy"):
        copy.copy(model.tables["user"])
    assert copy.copy(model).network is model.network


# --- loops of torch -------------------------------------------------------------------------------


def accumulate(tier: hb.Ram | hb.Ssd, refused: set[int] | None = None) -> tuple[Any, set[int]]:
    """Sum the gradients of two batches a step; a batch that does not fit begins the next step.

    `refused`: the batches of which that is so; None: those that the table refuses, which are
    returned beside its rows.
    """
    model = model_on(tier, evict=None)
    network = model.network.train()
    dense = torch.optim.Adam(hb.dense_parameters(network))
    optimizers = (dense, hb.SparseOptimizer(network))
    found: set[int] = set()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for number, batch in enumerate(dataset()):
        batch = batch.map_arrays(torch.from_numpy)
        if refused is not None and number in refused:
            step()
        try:
            logits = network(batch)
        except TableFull:
            found.add(number)
            step()
            logits = network(batch)
        labels = batch.labels["y"].float()
        torch.nn.functional.binary_cross_entropy_with_logits(logits.view(-1), labels).backward()
        del logits
        if number % 2:
            step()
    return rows_of(model), found


def test_gradients_of_two_batches_are_summed_in_frames_for_both_or_the_second_is_refused(
    disk: hb.Ssd,
) -> None:
    learned, refused = accumulate(hb.Ssd(disk.path, ram_rows=155))  # 1.2 of two batches
    assert not refused
    assert accumulate(hb.Ram())[0] == learned
    learned, refused = accumulate(hb.Ssd(disk.path, ram_rows=77))  # 1.2 of one
    assert len(refused) > 3
    assert accumulate(hb.Ram(), refused)[0] == learned


KEPT = ("loss", "total", "output", "second forward", "eval forward", "no_grad", "graph", "nothing")


def keep(kept: str, tier: hb.Ram | hb.Ssd, *, automatic: bool) -> tuple[str, list[Any]]:
    """Train in a plain loop that keeps more of each step than it needs."""
    network: Any
    if automatic:
        torch.manual_seed(3)
        plain = torch.nn.Sequential(torch.nn.Embedding(1500, 4), torch.nn.Linear(4, 1))
        adagrad = torch.optim.Adagrad(plain.parameters(), lr=0.1)
        network, optimizer, _ = hb.auto(plain, adagrad, tables={"0": {"tier": tier}})
        optimizers = [optimizer]
    else:
        network = model_on(tier, evict=None).network
        dense = torch.optim.Adam(hb.dense_parameters(network))
        optimizers = [dense, hb.SparseOptimizer(network)]
    left: list[Any] = []
    total: Any = 0.0

    def forward(batch: hb.Batch) -> Any:
        return network(torch.as_tensor(batch.ids["user"].values) if automatic else batch).view(-1)

    for batch in dataset():
        batch = batch.map_arrays(torch.as_tensor)
        if kept == "second forward":
            left.append(forward(batch))
        if kept == "eval forward":
            left.append(forward(batch) if network.eval() else None)
            network.train()
        if kept == "no_grad":
            with torch.no_grad():
                left.append(forward(batch))
        output = forward(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            output, batch.labels["y"].float()
        )
        loss.backward(retain_graph=kept == "graph")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = total + loss
        left += {"loss": [loss], "total": [total], "output": [output], "graph": [loss]}.get(
            kept, []
        )
    tables = {table.name: table for module in table_modules(network) for table in module.tables}
    return content_digest(tables), left


@pytest.mark.parametrize("automatic", [False, True], ids=["plain", "auto"])
def test_what_a_loop_keeps_of_a_step_keeps_no_rows_in_memory(disk: hb.Ssd, automatic: bool) -> None:
    in_memory = {
        twice: keep(twice, hb.Ram(), automatic=automatic)[0] for twice in ("no_grad", "nothing")
    }
    in_memory["second forward"] = in_memory["no_grad"]  # both count the ids twice
    for kept in KEPT:
        learned, left = keep(kept, disk, automatic=automatic)
        assert len(left) == (0 if kept == "nothing" else ROWS // 64)
        assert learned == in_memory.get(kept, in_memory["nothing"]), kept


@pytest.mark.parametrize("pooling", ["sum", "max"])
def test_a_graph_that_outlives_its_step_finds_its_rows_anew_or_says_why_not(
    disk: hb.Ssd, pooling: Any
) -> None:
    read = []
    for tier in (hb.Ram(), hb.Ssd(disk.path, ram_rows=24)):
        table = hb.Table("t", 2, rule=RULES["deltas"], tier=tier)
        bag = hb.EmbeddingBag(table, pooling)
        sparse = hb.SparseOptimizer(bag)
        kept = [bag(torch.arange(first, first + 8), torch.arange(0, 9, 2)) for first in (0, 4)]
        kept[0].sum().backward(retain_graph=True)
        kept[0].sum().backward(retain_graph=True)  # before the step: both count
        sparse.step()
        for first in range(100, 200, 8):  # the kept rows leave memory, and one goes for good
            bag(torch.arange(first, first + 8), torch.arange(0, 9, 2)).sum().backward()
            sparse.step()
        table.remove(np.array([5]))
        for output in kept:
            if pooling == "max":
                with pytest.raises(RuntimeError, match="an update has changed since"):
                    output.sum().backward()
            else:
                output.sum().backward()
                sparse.step()
        read.append(table.lookup(np.arange(-2, 210)).tobytes())
    assert read[0] == read[1]


class Events(torch.utils.data.Dataset[hb.Batch]):
    """The batches of `dataset`, made where they are read; with a table, which is read for each."""

    def __init__(self, table: hb.Table | None = None) -> None:
        self.batches = list(dataset())
        self.table = table

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> hb.Batch:
        if not number:
            gc.collect()  # it ends tables that the process before the fork has left
        if self.table is not None:
            self.table.lookup(np.arange(10))
        return self.batches[number]


def loaded(data: Events) -> Any:
    """Batches that a forked child makes."""
    loader = torch.utils.data.DataLoader
    return loader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")


def test_a_loader_in_a_forked_child_leaves_the_tables_alone(disk: hb.Ssd) -> None:
    models = []
    for tier in (hb.Ram(), disk):
        model = model_on(tier)
        model.fit(dataset(), progress=False)
        gc.disable()
        try:
            left: list[Any] = [hb.Table("left", 4, tier=tier)]
            left[0].find_or_insert(np.arange(100))
            left.append(left)
            del left
            for batch in hb.Ahead(loaded(Events()), model.network):
                model.step(batch)
        finally:
            gc.enable()
        models.append(model)
    assert models[1].tables["user"].tier_stats["misses"] > 0
    assert rows_of(models[0]) == rows_of(models[1])
    with pytest.raises(TableError, match=r"table 'user'.*a child that was forked.*'spawn'"):
        list(loaded(Events(models[1].tables["user"])))
    models[1].step(next(iter(dataset())))


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for a third of the rows."""
    with mounted(tmp_path / "small", kib=1024) as folder:
        yield folder


@pytest.mark.parametrize("room", ["there", "on another disk"])
def test_a_full_disk_refuses_a_whole_batch_and_the_last_checkpoint_resumes_where_there_is_room(
    room: str, small: Path, disk: hb.Ssd, tmp_path: Path
) -> None:
    def wide(tier: hb.Ram | hb.Ssd) -> hb.RecModel:
        torch.manual_seed(3)
        tables = hb.make_tables(SCHEMA, 256, rule=RULES["deltas"], tier=tier)
        return hb.RecModel(hb.models.DNN(SCHEMA, tables, hidden=[4]), "bce", "adam")

    def follow(model: hb.RecModel, name: str) -> str:
        save = Checkpoint(tmp_path / name, every_steps=2, full_every=2, wait=True)
        model.online_train(dataset(), save, progress=False)
        return content_digest(open_checkpoint(tmp_path / name))

    model = wide(hb.Ssd(small, ram_rows=150))
    with pytest.raises(StorageFull, match=rf"'{small}/.* Free some space, or choose a folder on"):
        follow(model, "saved")
    steps = model.counters["steps"]
    assert 2 <= steps < ROWS // 64 - 1
    memory = wide(hb.Ram())
    memory.online_train(dataset(), max_steps=steps, progress=False)
    assert rows_of(model) == rows_of(memory)
    assert open_checkpoint(tmp_path / "saved").manifest.counters["steps"] == steps // 2 * 2

    del model
    folder = disk.path
    if room == "there":
        room_for(small, kib=65_536)
        folder = small
    digest = follow(wide(hb.Ssd(folder, ram_rows=150)), "saved")
    assert digest == follow(wide(hb.Ram()), "memory")
