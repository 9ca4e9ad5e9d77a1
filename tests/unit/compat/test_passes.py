# SPDX-License-Identifier: Apache-2.0
"""Training over passes of files: it starts from saved rows, with rates anew, and after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.model import LearningRateScheduler
from hotbed.compat.hugectr.translate.tiers import tiers_of
from hotbed.errors import ConfigError, TableFull

SIZES = [40, 25]
PASSES = 4


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A file list for each pass."""
    lists = []
    for number in range(PASSES):
        folder = tmp_path_factory.mktemp(f"pass{number}")
        params = hugectr.tools.DataGeneratorParams(
            format=hugectr.DataReaderType_t.Parquet,
            label_dim=1,
            dense_dim=2,
            num_slot=2,
            i64_input_key=True,
            source=str(folder / "list.txt"),
            eval_source=str(folder / "eval.txt"),
            slot_size_array=SIZES,
            num_files=1,
            eval_num_files=1,
            num_samples_per_file=128,
        )
        hugectr.tools.DataGenerator(params).generate()
        lists.append(params.source)
    return lists


def compiled(
    source: str,
    kind: str = "MomentumSGD",
    etc: bool | str = False,
    disk: str = "",
    update: str = "Local",
) -> hugectr.Model:
    """A small model without dropout, so that a pass depends on weights, states and rows alone.

    `disk`: the folder of its rows, of which 40 are in memory.
    """
    solver = hugectr.CreateSolver(
        seed=5, batchsize=16, lr=0.1, warmup_steps=20, i64_input_key=True, repeat_dataset=False
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=source,
        eval_source="",
        slot_size_array=SIZES,
    )
    optimizer = hugectr.CreateOptimizer(
        hugectr.Optimizer_t[kind], hugectr.Update_t[update], momentum_factor=0.9
    )
    params = None
    if etc:
        params = hugectr.CreateETC([hugectr.TrainPSType_t.Staged], [str(etc)])
    if disk:
        blocks = [hugectr.CreateHMemCache(1, 0.5, 0)]
        params = hugectr.CreateETC([hugectr.TrainPSType_t.Cached], [str(etc)], [disk], blocks)
    model = hugectr.Model(solver, reader, optimizer, params)
    sparse = hugectr.DataReaderSparseParam("data", 2, False, 2)
    model.add(hugectr.Input(1, "label", 2, "dense", [sparse]))
    placement = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    size = {"max_vocabulary_size_per_gpu": 40} if disk else {"workspace_size_per_gpu_in_mb": 1}
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=placement,
            embedding_vec_size=4,
            combiner="sum",
            sparse_embedding_name="rows",
            bottom_name="data",
            **size,
        )
    )
    dense = hugectr.DenseLayer
    model.add(dense(hugectr.Layer_t.Reshape, ["rows"], ["flat"], leading_dim=8))
    model.add(dense(hugectr.Layer_t.Concat, ["flat", "dense"], ["x"]))
    model.add(dense(hugectr.Layer_t.InnerProduct, ["x"], ["y"], num_output=1))
    model.add(dense(hugectr.Layer_t.BinaryCrossEntropyLoss, ["y", "label"], ["loss"]))
    model.compile()
    return model


def train(model: hugectr.Model, sources: list[str], prefix: str, first: int = 0) -> None:
    """Train pass after pass by a loop of HugeCTR's documentation, and save after each."""
    reader = model.get_data_reader_train()
    rates = model.get_learning_rate_scheduler()
    for number in range(first, len(sources)):
        rates.move_to(8 * number)
        reader.set_source(sources[number])
        model.set_learning_rate(rates.get_next())
        while model.train():
            model.set_learning_rate(rates.get_next())
        model.save_params_to_files(prefix, number)


def contents(prefix: Path, number: int) -> dict[str, object]:
    """The files of a save; rows by their keys."""
    rows = prefix.parent / f"{prefix.name}0_sparse_{number}.model"
    keys = np.fromfile(rows / "key", "<i8").tolist()
    vectors = np.fromfile(rows / "emb_vector", "<f4").reshape(-1, 4).tolist()
    states = prefix.parent / f"{prefix.name}0_opt_sparse_{number}.model"
    momenta = np.fromfile(states, "<f4").reshape(-1, 4).tolist()
    dense = [
        (prefix.parent / f"{prefix.name}_{kind}_{number}.model").read_bytes()
        for kind in ("dense", "opt_dense")
    ]
    pairs = zip(vectors, momenta, strict=True)
    return {"dense": dense, "rows": dict(zip(keys, pairs, strict=True))}


CHILD = """
import os, signal, sys
import test_passes
from hotbed.compat.hugectr.model import files, model

where, prefix, *sources = sys.argv[1:]
kill = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
built = test_passes.compiled(sources[0])
steps = []

def step(batch):
    steps.append(batch)
    if len(steps) == 19:  # of 8 in a pass
        kill()
    return learn(batch)

learn = built.learner.step
if where == "step":
    built.learner.step = step
else:
    save = files.save_dense_states
    files.save_dense_states = lambda path, *rest: kill() if "_2." in path else save(path, *rest)
test_passes.train(built, sources, prefix)
"""


@pytest.mark.parametrize("where", [pytest.param("step", marks=pytest.mark.soak), "save"])
def test_after_a_kill_the_last_whole_save_leads_to_the_same_bits(
    where: str, sources: list[str], tmp_path: Path
) -> None:
    unbroken = compiled(sources[0])
    train(unbroken, sources, str(tmp_path / "whole"))
    prefix = tmp_path / "m"
    child = subprocess.run(
        [sys.executable, "-c", CHILD, where, str(prefix), *sources],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    # the states of the dense parameters are written last, so that they say that a save is whole
    whole = [
        number for number in range(PASSES) if Path(f"{prefix}_opt_dense_{number}.model").exists()
    ]
    assert whole == [0, 1]
    assert Path(f"{prefix}_dense_2.model").exists() == (where == "save")
    resumed = compiled(sources[0])
    resumed.load_dense_weights(f"{prefix}_dense_1.model")
    resumed.load_dense_optimizer_states(f"{prefix}_opt_dense_1.model")
    resumed.load_sparse_weights([f"{prefix}0_sparse_1.model"])
    resumed.load_sparse_optimizer_states([f"{prefix}0_opt_sparse_1.model"])
    train(resumed, sources, str(prefix), first=2)
    for number in range(PASSES):
        assert contents(prefix, number) == contents(tmp_path / "whole", number), number


def test_an_embedding_training_cache_starts_from_its_sparse_models(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "rows"
    first = compiled(sources[0], etc=str(saved))
    assert f"Empty embedding, trained table will be stored in {saved}" in capsys.readouterr().out
    assert len(first.learner.tables["rows"]) == 0
    first.set_source([sources[0]], ["keyset is not read"], "")
    first.fit(num_epochs=1, display=0, eval_interval=0, snapshot=0)
    first.save_params_to_files(str(tmp_path / "m"), 1)
    second = compiled(sources[1], etc=str(saved))
    assert f"Use existing embedding: {saved}" in capsys.readouterr().out
    keys = np.fromfile(saved / "key", "<i8")
    assert len(keys) == len(second.learner.tables["rows"]) > 0
    rows = [model.learner.tables["rows"].lookup(keys) for model in (first, second)]
    np.testing.assert_array_equal(*rows)
    assert not (tmp_path / "m0_sparse_1.model").exists()


CACHED = hugectr.TrainPSType_t.Cached
STAGED = hugectr.TrainPSType_t.Staged


def test_rows_of_a_cached_embedding_lie_in_the_folder_of_their_process(tmp_path: Path) -> None:
    """One `CreateHMemCache` is that of all Cached embeddings; else each of these has its own."""
    placement = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    tables = [
        hugectr.SparseEmbedding(placement, megabytes, 8, "sum", name, "data")
        for name, megabytes in {"staged": 1, "wide": 2, "deep": 3}.items()
    ]
    files = ["a", "b", "c"]
    paths = [str(tmp_path), "/of/another/process"]
    blocks = [hugectr.CreateHMemCache(num_blocks, 0.5, 0) for num_blocks in (3, 5)]
    workspace = 2**20 // (4 * 8)
    both = hugectr.CreateETC([STAGED, CACHED, CACHED], files, paths, blocks)
    assert tiers_of(both, tables, 0) == {
        "wide": hb.Ssd(tmp_path, 3 * 2 * workspace),
        "deep": hb.Ssd(tmp_path, 5 * 3 * workspace),
    }
    assert tiers_of(both, tables, 1)["wide"] == hb.Ssd("/of/another/process", 3 * 2 * workspace)
    one = hugectr.CreateETC([STAGED, CACHED, CACHED], files, paths, blocks[:1])
    assert tiers_of(one, tables, 0)["deep"] == hb.Ssd(tmp_path, 3 * 3 * workspace)
    last = hugectr.CreateETC([STAGED, STAGED, CACHED], files, paths, blocks[1:])
    assert tiers_of(last, tables, 0) == {"deep": hb.Ssd(tmp_path, 5 * 3 * workspace)}
    assert tiers_of(hugectr.CreateETC([STAGED] * 3, files), tables, 0) == {}
    tiny = hugectr.SparseEmbedding(
        placement, 0, 8, "sum", "tiny", "data", max_vocabulary_size_per_gpu=2
    )
    cache = hugectr.CreateETC([CACHED], ["a"], paths, blocks[:1])
    rows = hb.Table("tiny", 8, tier=tiers_of(cache, [tiny], 0)["tiny"])
    with pytest.raises(TableFull, match="use 9 rows, num_blocks of CreateHMemCache times the rows"):
        rows.find_or_insert(np.arange(9))
    tables.append(hugectr.SparseEmbedding(placement, 0, 8, "sum", "none", "data"))
    missing = {
        "local_paths": ([CACHED] * 4, [], blocks),
        "hmem_cache_configs": ([CACHED] * 4, paths, blocks),
        "hmem_cache_configs: ": ([STAGED, CACHED] * 2, paths, []),
        "workspace_size": ([STAGED] * 3 + [CACHED], paths, blocks[:1]),
        "ps_types: expected one for each of 4 embeddings, got 3": ([STAGED] * 3, paths, []),
    }
    for message, (types, local_paths, configs) in missing.items():
        params = hugectr.CreateETC(types, [*files, "d"][: len(types)], local_paths, configs)
        with pytest.raises(ConfigError, match=message):
            tiers_of(params, tables, 0)


@pytest.mark.parametrize(
    ("loop", "kind", "update"),
    [
        ("fit", "MomentumSGD", "Local"),
        ("train", "MomentumSGD", "Local"),
        ("train", "Adam", "Global"),  # CreateOptimizer()
        ("fit", "Nesterov", "Global"),
        ("fit", "RMSProp", "Global"),
        ("train", "Ftrl", "Global"),
    ],
)
def test_rows_of_a_cached_embedding_are_read_ahead_and_learn_as_those_of_a_staged_one(
    loop: str, kind: str, update: str, sources: list[str], tmp_path: Path
) -> None:
    """Global moves the rows on the disk, too: each catches up when it is read or written."""
    saved = []
    rounds = 2 if update == "Local" else 1
    for name in ("staged", "cached"):
        folder = tmp_path / name
        folder.mkdir()
        disk = str(folder) if name == "cached" else ""
        model = compiled(sources[0], kind, str(folder / "rows"), disk, update)
        if loop == "train":
            train(model, sources * rounds, str(folder / "m"))
        else:
            for number, source in enumerate(sources * rounds):
                model.set_source([source], ["keyset is not read"], "")
                model.fit(num_epochs=1, display=0, eval_interval=0, snapshot=0)
                model.save_params_to_files(str(folder / "m"), number)
        table = model.learner.tables["rows"]
        files = [(folder / "rows" / name).read_bytes() for name in ("key", "emb_vector")]
        states = sorted(folder.glob("m0_opt_sparse_*.model"))
        assert len(states) == len(sources * rounds)
        saved.append((files, [path.read_bytes() for path in states], table.scalars()))
    assert table.tier == hb.Ssd(folder, 40)
    assert table.tier_stats["misses"] >= table.tier_stats["fetched"] > 0
    assert saved[0] == saved[1]
    if update == "Global":
        again = compiled(sources[0], kind, str(folder / "rows"), disk, update)
        again.load_sparse_optimizer_states([str(states[-1])])
        for first, second in zip(
            table.export(), again.learner.tables["rows"].export(), strict=True
        ):
            assert first.select([0, 1, 2]) == second.select([0, 1, 2])


def test_a_scheduler_that_is_reset_begins_a_new_schedule(sources: list[str]) -> None:
    model = compiled(sources[0])
    rates: list[float] = []
    set_rate = model.set_learning_rate

    def recorded(rate: float) -> None:
        rates.append(rate)
        set_rate(rate)

    model.set_learning_rate = recorded  # type: ignore[method-assign]
    model.fit(num_epochs=1, display=0, eval_interval=0, snapshot=0)
    assert model.get_learning_rate_scheduler().get_step() == 8
    assert rates[:8] == pytest.approx([0.1 * step / 20 for step in range(1, 9)])
    model.reset_learning_rate_scheduler(0.4, warmup_steps=2, decay_start=3, decay_steps=4)
    assert model.get_learning_rate_scheduler().get_step() == 0
    rates.clear()
    model.fit(num_epochs=1, display=0, eval_interval=0, snapshot=0)
    fresh = LearningRateScheduler(0.4, 2, 3, 4)
    assert rates[:8] == [fresh.get_next() for _ in range(8)]
    assert model.learner.dense_learning_rate == model.learner.table_learning_rates["rows"]
