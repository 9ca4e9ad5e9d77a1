# SPDX-License-Identifier: Apache-2.0
"""The formulas of a plan, beside counting; and the command that prints and draws it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli import planning as of_plan
from hotbed.cli.commands import app
from hotbed.embedding.hashing import partition
from hotbed.errors import ConfigError, DataError
from hotbed.job import planning, sampled_tables
from hotbed.job import workload as of_job
from hotbed.job.job import Job
from hotbed.job.planning import Disk, Wishes, plan
from hotbed.memory_limit import CONTAINER, MemoryLimit
from hotbed.parallel import Placement
from hotbed.parallel.forecast.ranks import (
    DiskTimes,
    LinkSpeed,
    SampledBatch,
    SampledIds,
    SaveTimes,
    Workload,
    needed_ranks,
    planned,
    seconds_of,
)
from hotbed.parallel.forecast.tables import ENTRIES, LookupRates, OnDisk, TableFacts, index_bytes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("limit", "wishes", "words"),
    [
        (900, Wishes(), "4 ranks would take more"),
        (1000, Wishes(), "each plan fits"),
        (900, Wishes(latency=1e-4), "each plan fits"),  # a host for each rank
        (300, Wishes(host_ranks=1), "1 rank would take more"),
        (450, Wishes(host_ranks=2), "4 ranks would take more"),
        (200, Wishes(), "1, 4 ranks would take more"),
    ],
)
def test_a_plan_names_the_ranks_that_a_container_ends(
    limit: int, wishes: Wishes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: Any = [
        SimpleNamespace(ranks=1, memory=[400.0]),
        SimpleNamespace(ranks=4, memory=[240.0] * 4),
    ]
    container = [MemoryLimit(limit, 1, CONTAINER), MemoryLimit(1 << 40, 1, "this machine")]
    monkeypatch.setattr(planning, "memory_limits", lambda: container)
    (note,) = planning._container_notes(plans, wishes)
    assert words in note
    monkeypatch.setattr(planning, "memory_limits", lambda: container[1:])
    assert list(planning._container_notes(plans, wishes)) == []


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 60), st.integers(1, 40))
def test_ids_asked_for_are_those_of_sets(
    seed: int, ranks: int, num_samples: int, num_ids: int
) -> None:
    random = np.random.default_rng(seed)
    samples = np.repeat(np.arange(num_samples), random.integers(0, 3, num_samples))
    ids = random.integers(-num_ids, num_ids, len(samples))
    placement = Placement(ranks, 8)
    owners = placement.owners("user")
    ends = [*sorted(random.integers(0, num_samples + 1, 7).tolist()), num_samples]
    values, numbers = np.unique(ids, return_inverse=True)
    batch = SampledBatch(ends, [SampledIds(samples, numbers, partition(values))])
    asked = batch.tables[0].asked(batch.block_ends(placement), owners, ranks)
    block = 0
    for rank in range(ranks):
        for of_rank in placement.blocks[rank]:
            first = 0 if of_rank.first == 0 else ends[of_rank.first - 1]
            last = ends[of_rank.first + of_rank.size - 1]
            distinct = {int(i) for s, i in zip(samples, ids, strict=True) if first <= s < last}
            wanted = [0] * ranks
            for number in distinct:
                wanted[owners[partition([number])[0]]] += 1
            assert asked[block].tolist() == wanted
            block += 1
    assert block == len(asked)


@pytest.mark.parametrize("num_ids", [1, 300, 6_000, 80_000])
def test_memory_of_a_table_is_that_of_the_real_one(num_ids: int) -> None:
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, num_ids)
    table = hb.Table("user", dim=4, rule=hb.Adagrad(lr=0.1))
    for part in np.array_split(ids, -(-num_ids // 500)):
        table.find_or_insert(part)
    rows = np.bincount(partition(ids), minlength=256).astype(np.float64)
    slots = (np.ceil(rows / 16) * 16).sum()
    assert slots * table.native.row_bytes == table.stats["row_bytes"]
    index = index_bytes(rows, ENTRIES).sum()
    free_lists = 256 * 64 * 4
    assert index <= table.stats["index_bytes"] <= index + free_lists


def test_distinct_ids_are_counted_and_of_many_a_share() -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 50_000, 100_000)
    values, counts = np.unique(ids, return_counts=True)
    every = sampled_tables.DistinctIds()
    share = sampled_tables.DistinctIds(most=4_000)
    for part in np.split(ids, 20):
        every.add(part)
        share.add(part)
    assert every.ids.tolist() == values.tolist()
    assert every.counts.tolist() == counts.tolist()
    here = every.by_partition(np.ones(len(values)))
    assert here.tolist() == np.bincount(partition(values), minlength=256).tolist()
    assert share.scale > 1
    assert len(share) == pytest.approx(len(values), rel=0.05)
    assert share.by_partition(np.ones(len(share.ids))).sum() == pytest.approx(len(share))


def test_ids_beyond_those_that_were_read_grow_as_before() -> None:
    growth = {50: {"a": 10, "b": 30}, 100: {"a": 10, "b": 60}}
    assert sampled_tables.expected_ids(growth, 400) == {"a": 10, "b": 240}
    assert sampled_tables.expected_ids(growth, 100) == {"a": 10, "b": 60}


def workload(rows: float = 1e9) -> Workload:
    of_partitions = np.full(256, rows / 256)
    table = TableFacts("user", 16, 128, 1, False, False, of_partitions, np.zeros(256))
    random = np.random.default_rng(0)
    numbers = np.arange(4096)
    ids = SampledIds(numbers, numbers, partition(random.integers(0, 2**62, 4096)))
    ends = [512 * (grain + 1) for grain in range(8)]
    return Workload(
        tables=[table],
        batches=[SampledBatch(ends, [ids])],
        batch_size=4096,
        grains=8,
        modules=1,
        dense=[1, 1000],
        process_bytes=5e8,
        step_seconds={4096: 0.1, 2048: 0.05, 512: 0.02},
        read_seconds=0.01,
        link=LinkSpeed.of(1e-4, 1e9),
        cores=2,
    )


def test_more_ranks_share_rows_and_ids_evenly_and_all_messages_are_counted() -> None:
    work = workload()
    for ranks in (1, 2, 3, 8, 64, 256):
        of_ranks = planned(work, ranks)
        assert of_ranks.rows.sum() == pytest.approx(1e9)
        assert of_ranks.asked.sum() == 4096
        assert of_ranks.balance(of_ranks.rows) <= -(-256 // ranks) * ranks / 256
        assert of_ranks.messages == 4 * (ranks - 1)
    (batch,) = work.batches
    wide = replace(
        work, tables=[*work.tables] * 3, batches=[replace(batch, tables=[*batch.tables] * 3)]
    )
    assert planned(wide, 2).messages == 5, "ids that have no room go in a message of their own"
    assert planned(wide, 3).messages == 4 * 2


def test_ranks_of_a_host_send_one_message_to_each_other_host() -> None:
    """Ids, rows and sums by one rank of a host; sums and totals of dense values once a host."""
    work = replace(workload(), dense=[1, 1_000_000], link=LinkSpeed.of(2e-5, 1e9))
    alone = planned(work.with_hosts(1, 5e-5, 1.25e9), 64)
    on_hosts = planned(work.with_hosts(4, 5e-5, 1.25e9), 64)
    assert alone.messages == 4 * 63
    between = 4 * 15
    assert on_hosts.messages == between + 3 * (2 * 3) + 3 + 3
    assert on_hosts.times["messages"] == pytest.approx(between * 5e-5 + 24 * 2e-5)
    one_host = planned(work.with_hosts(4, 5e-5, 1.25e9), 4)
    assert one_host.messages == 4 * 3
    assert one_host.times["messages"] == pytest.approx(4 * 3 * 2e-5)


def test_the_least_ranks_that_fit_are_named() -> None:
    work = workload()
    needed = needed_ranks(work, 64e9)
    assert needed is not None
    assert planned(work, needed).most_memory <= 64e9 < planned(work, needed - 1).most_memory
    assert needed_ranks(work, 1e6) is None


def test_a_step_of_two_ranks_takes_what_two_ranks_took() -> None:
    work = workload().as_two_ranks(own_seconds=0.06, wait_seconds=0.02)
    assert planned(work, 2).seconds == pytest.approx(0.08)
    assert planned(work, 1).seconds == pytest.approx(0.1)
    between_hosts = planned(work.with_hosts(1, 0.001), 2)
    assert between_hosts.link_seconds > planned(work, 2).link_seconds
    assert seconds_of(work.step_seconds, 256) == pytest.approx(0.02 - 0.03 / 1536 * 256)


def test_times_of_a_step_are_shared_out_by_what_takes_them() -> None:
    work = workload().as_two_ranks(own_seconds=0.08, wait_seconds=0.05)
    work = replace(work, score_seconds=0.04, save=SaveTimes(1e-6, 80))
    one = planned(work, 1)
    assert one.times == {
        "network": 0.1,
        "reading": 0.0,
        "messages": 0,
        "bytes": 0,
        "waiting": 0,
        "disk": 0.0,
    }
    assert one.scored_seconds == one.evaluated_seconds == 0.04
    assert (one.state_bytes, one.save_seconds) == (pytest.approx(80e9), pytest.approx(1000))
    for ranks in (2, 64):
        of_ranks = planned(work, ranks)
        assert of_ranks.seconds == pytest.approx(sum(of_ranks.times.values()))
        assert of_ranks.times["messages"] == pytest.approx(of_ranks.messages * 1e-4)
        assert of_ranks.save_seconds == pytest.approx(1000 / ranks)
    shared = replace(work, feature_seconds=0.008)  # of 0.01 to read a batch
    assert planned(shared, 2).times["reading"] == pytest.approx(0.006)
    many = replace(shared, cores=64)
    assert planned(many, 64).times["reading"] == pytest.approx(0.002 + 0.008 / 64)
    of_two = planned(work, 2)  # four batches of 4,096 wait once for ids and rows, and for scores
    assert of_two.scored_seconds - of_two.evaluated_seconds == pytest.approx(0.75 * 4e-4)
    assert planned(work, 2).limit == "network"
    assert planned(replace(work, cores=256), 256).limit == "messages"


def test_ranks_that_share_cores_take_the_time_of_these() -> None:
    """As if each had waited for its turn, and longer, because cores share what they have."""
    work = replace(workload(), crowding=1.25, score_seconds=0.04)
    alone = replace(work, cores=64, crowding=1.0)
    for ranks, pressure in ((1, 1.0), (2, 1.25), (3, 1.875), (4, 2.5), (8, 5.0)):
        of_ranks, of_many = planned(work, ranks).times, planned(alone, ranks).times
        assert of_ranks["network"] == pytest.approx(pressure * of_many["network"])
    assert planned(work, 4).times["reading"] == pytest.approx(2.5 * 0.01)
    assert planned(work, 4).scored_seconds > 2 * planned(alone, 4).scored_seconds
    on_hosts = work.with_hosts(4, 1e-4, 1e9)
    assert planned(on_hosts, 16).times["network"] == pytest.approx(
        2.5 * planned(alone, 16).times["network"]
    )
    one_each = work.with_hosts(1, 1e-4, 1e9)
    assert planned(one_each, 16).times["network"] == planned(alone, 16).times["network"]


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_a_step_of_two_ranks_on_some_cores_takes_what_they_took(cores: int) -> None:
    own = 0.06 * 1.2
    waits = 0.02 + own * (cores == 1)  # for the processor, too
    work = replace(workload(), cores=cores, crowding=1.2).as_two_ranks(own, waits)
    assert planned(work, 2).seconds == pytest.approx(own + waits)


# --- tables on a disk -----------------------------------------------------------------------------


def misses_of_sieve(ids: NDArray[np.int64], batch_size: int, ram_rows: int) -> float:
    """Return the misses of a batch in the second epoch: the rule of `hb.Ssd`, as it is told."""
    queue: list[int] = []  # the newest first
    used: dict[int, bool] = {}
    hand = -1
    misses = 0
    for epoch in range(2):
        for first in range(0, len(ids), batch_size):
            for number in set(ids[first : first + batch_size].tolist()):
                if number in used:
                    used[number] = True
                    continue
                misses += epoch
                if len(queue) == ram_rows:
                    hand = hand if 0 <= hand < len(queue) else len(queue) - 1
                    while used[queue[hand]]:
                        used[queue[hand]] = False
                        hand = hand - 1 if hand else len(queue) - 1
                    del used[queue.pop(hand)]
                    hand -= 1
                queue.insert(0, number)
                hand += 1
                used[number] = False
    return misses / (len(ids) / batch_size)


@pytest.mark.parametrize("alpha", [0.7, 1.1])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_rows_read_from_a_disk_are_about_those_of_its_cache(alpha: float, share: float) -> None:
    random = np.random.default_rng(0)
    popularity = np.arange(1, 4001) ** -alpha
    ids = random.choice(4000, 24_000, p=popularity / popularity.sum())
    counts = np.bincount(ids)
    ram_rows = int(share * (counts > 0).sum())
    of_ids = LookupRates.of(counts, 1, len(ids) / 200, (counts > 0).sum())
    assert of_ids.misses(ram_rows) == pytest.approx(misses_of_sieve(ids, 200, ram_rows), rel=0.15)
    assert of_ids.misses((counts > 0).sum()) == 0


def test_ids_that_were_not_read_take_the_lookups_of_those_that_were_seen_once() -> None:
    counts = np.array([50, 20, 1, 1, 1, 1])
    few = LookupRates.of(counts, 1, 10, 6)
    many = LookupRates.of(counts, 1, 10, 1_000_000)
    assert (many.lookups * many.ids).sum() == pytest.approx((few.lookups * few.ids).sum())
    assert many.ids.sum() == 1_000_000
    # nearly each of their lookups is a read: 4 in 10 batches
    assert many.misses(1000) == pytest.approx(0.4, rel=0.01)


def on_disk(work: Workload, ram_rows: int) -> Workload:
    """A workload whose table lies on a disk; its row has dim 16 and the state of Adagrad."""
    popularity = LookupRates(1000.0, np.ones(1), np.array([1e9]))
    (table,) = work.tables
    table = replace(table, on_disk=OnDisk(ram_rows, 128, 0, popularity))
    return replace(work, tables=[table], disk=DiskTimes(1e-5, 2e-6, 1e-9))


def test_a_table_on_a_disk_takes_the_memory_and_the_room_of_the_page() -> None:
    of_one = planned(on_disk(workload(500e6), 5_000_000), 1)
    # docs/tiers.md: 29.4 bytes an id, 160 of a row in memory, 512 KiB of each of 256 parts
    expected = 500e6 * 29.4 + 5e6 * (128 + 32) + 256 * (512 << 10)
    assert of_one.table_bytes[0] == pytest.approx(expected, rel=0.25)
    assert of_one.disk[0] == pytest.approx(500e6 * 136 * 1.5)
    assert planned(workload(500e6), 1).table_bytes[0] > 4 * of_one.table_bytes[0]
    table = OnDisk(5_000_000, 128, 12, LookupRates(1.0, np.ones(1), np.ones(1)))
    memory = 500e6 * (8 + 12) + 5e6 * (128 + 32) + 256 * (512 << 10)
    assert table.memory(np.array([500e6])).tolist() == [memory]
    assert table.memory(np.array([1000.0])).tolist() == [1000 * (8 + 12 + 128 + 32) + (512 << 10)]
    of_four = planned(on_disk(workload(500e6), 5_000_000), 4)
    assert of_four.disk.sum() == pytest.approx(of_one.disk[0])


def test_a_disk_works_beside_a_step_and_is_shared_by_the_ranks_of_a_machine() -> None:
    work = on_disk(workload(), 1000)
    reads = 1e9 * -np.expm1(-1 / 1000)
    of_one = planned(work, 1)
    assert of_one.reads == pytest.approx(reads, rel=0.01)
    assert of_one.seconds == pytest.approx(of_one.reads * 1e-5)
    assert of_one.limit == "disk"
    of_two = planned(work, 2)
    assert of_two.seconds == pytest.approx(2 * of_two.reads * 1e-5)
    on_hosts = planned(work.with_hosts(1, 1e-4, 1e9), 2)
    assert on_hosts.seconds == pytest.approx(on_hosts.reads * 1e-5)
    fast = replace(work, disk=DiskTimes(1e-12, 1e-12, 1e-12))
    assert planned(fast, 1).seconds == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("64GB", of_plan.BYTES, 64e9),
        ("1.5 GiB", of_plan.BYTES, 1.5 * 2**30),
        ("10Gbit/s", of_plan.RATES, 1.25e9),
        ("100us", of_plan.TIMES, 1e-4),
        ("100k/s", of_plan.READS, 1e5),
    ],
)
def test_quantities_have_units(text: str, units: dict[str, float], value: float) -> None:
    assert of_plan.quantity("--ram", text, units) == pytest.approx(value)


@pytest.mark.parametrize("text", ["64", "GB", "0GB", "64 parsecs", "-1GB"])
def test_a_quantity_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ram: not a number above 0 with a unit, got"):
        of_plan.quantity("--ram", text, of_plan.BYTES)


# --- the command ----------------------------------------------------------------------------------

JOB = """
schema:
  columns:
    - {kind: label, name: liked, column: rating, threshold: 4}
    - {kind: id, name: user, column: userId}
    - {kind: id, name: movie, column: movieId}
train: {kind: slice, stop: 20000, source: {kind: csv, path: RATINGS}}
model: {kind: deepfm, hidden: [8]}
tables: {dim: 4}
fit: {batch_size: 1024}
output: OUT
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job on shipped data, whose plan measures little, in this process."""
    ratings = ROOT / "data" / "ml_latest_small" / "ratings.csv"
    text = JOB.replace("RATINGS", str(ratings)).replace("OUT", str(tmp_path))
    (tmp_path / "job.yaml").write_text(text)
    monkeypatch.setattr(of_job, "SECONDS", 0.05)
    monkeypatch.setattr(of_job, "peak_bytes", lambda: 500 << 20)  # of tests that ran before
    monkeypatch.setattr(of_job, "_alone", lambda call, *arguments: call(*arguments))
    of_two = [of_job.RankSteps({8: 1e-4, 4 << 20: 5e-3}, 0.02, 0.01, 1.0)] * 2
    monkeypatch.setattr("hotbed.parallel.probe.on_two_ranks", lambda *arguments: of_two)
    monkeypatch.setenv("COLUMNS", "160")
    return str(tmp_path / "job.yaml")


def test_plan_prints_a_line_for_each_number_of_ranks_and_draws_a_page(
    job: str, tmp_path: Path
) -> None:
    printed = CliRunner().invoke(app, ["plan", job, "--ram=32GB", "--rows=user=1e9"])
    assert printed.exit_code == 0, printed.output
    lines = lines_of_grids(printed.output)
    assert [int(line[0]) for line in lines] == [2**power for power in range(9)] * 2
    assert "> ram" in lines[0][1]
    assert "> ram" not in lines[8][1]
    assert "Memory: it takes " in printed.output
    assert "4 ranks and more need grains: 4 or more in the job, which has 2." in printed.output
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<figure>") == 4
    assert "256 ranks" in page


def test_a_disturbed_measurement_is_told(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = of_job._timed

    def half_disturbed(*arguments: Any) -> tuple[float, float]:
        seconds, _ = timed(*arguments)
        return seconds, seconds / 2

    monkeypatch.setattr(of_job, "_timed", half_disturbed)
    printed = CliRunner().invoke(app, ["plan", job, "--ranks=2"])
    assert printed.exit_code == 0, printed.output
    assert "had a processor for 50% of their time" in printed.output


def test_plan_of_hosts_looks_at_whole_hosts(job: str) -> None:
    of_hosts = plan(Job.read(job), Wishes(host_ranks=3, latency=1e-3))
    assert [each.ranks for each in of_hosts.plans] == [1, 3, 6, 12, 24, 48, 96, 192]
    with pytest.raises(ConfigError, match="--host-ranks: all hosts have as many ranks, got 2 for"):
        plan(Job.read(job), Wishes(3, host_ranks=2))


def test_plan_of_a_number_of_ranks_says_what_each_has_and_that_it_does_not_fit(
    job: str, tmp_path: Path
) -> None:
    command = ["plan", job, "--ranks=3", "--ram=1MB", "--latency=1ms", "--bandwidth=1Gbit"]
    printed = CliRunner().invoke(app, [*command, "--host-ranks=3"])
    assert printed.exit_code == 0, printed.output
    # each id has a row of its factors and one of its linear weight
    movies = len({line.split(",")[1] for line in _ratings()})
    users = len({line.split(",")[0] for line in _ratings()})
    of_ranks = lines_of_grids(printed.output)[4:]
    assert sum(int(line[1].replace(",", "")) for line in of_ranks) == 2 * (movies + users)
    assert "No number of ranks fits into 0.0 GB a process." in printed.output
    assert "3 ranks do not fit: the largest process takes" in printed.output
    assert "a message 1,000 us and 125 MB/s" in printed.output
    assert "Each of 3 ranks" in (tmp_path / "plan.html").read_text()


def lines_of_grids(printed: str) -> list[list[str]]:
    return [line.split("│")[1:-1] for line in printed.splitlines() if line[:1] == "│"]


def test_plan_of_tables_on_a_disk_says_room_and_reads(job: str, tmp_path: Path) -> None:
    """The folder of the disk need not exist here, where its speed is said."""
    tier = "{kind: ssd, path: /not/here, ram_rows: 1000}"
    command = ["plan", job, "--ranks=1", "--rows=movie=500e6", "--disk-reads=100k/s"]
    printed = CliRunner().invoke(app, [*command, "--set", f"tables.overrides.movie.tier={tier}"])
    assert printed.exit_code == 0, printed.output
    line, beside = lines_of_grids(printed.output)[:2]
    gigabytes = 500e6 * 29.4 / 1e9
    assert line[1].split()[1] == "GB"
    assert float(line[1].split()[0]) == pytest.approx(gigabytes, rel=0.25)
    # values and state of 4 floats each, and the head of a record; 1.5 times
    assert beside[2].strip() == "30.0 GB"
    assert int(beside[3].replace(",", "")) > 100


def _ratings() -> list[str]:
    path = ROOT / "data" / "ml_latest_small" / "ratings.csv"
    return path.read_text().splitlines()[1:20001]


def test_plan_of_data_without_rows_is_refused(job: str, tmp_path: Path) -> None:
    (tmp_path / "head.csv").write_text("userId,movieId,rating\n")
    train = f"train={{kind: csv, path: {tmp_path}/head.csv}}"
    error = CliRunner().invoke(app, ["plan", job, "--set", train]).exception
    assert isinstance(error, DataError)
    assert str(error).startswith("job.train: a plan needs a batch, got empty data.")


@pytest.mark.parametrize(
    ("engine", "measured", "counts"),
    [
        ("best", {"io_uring": 9e4, "threads": 1e5}, "io_uring"),  # which training will use
        ("threads", {"io_uring": 9e4, "threads": 1e5}, "threads"),
        ("best", {"threads": 1e5}, "threads"),
    ],
)
def test_a_plan_counts_the_reads_of_the_engine_of_the_table(
    job: str, engine: str, measured: dict[str, float], counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = {(name, 32): rate for name, rate in measured.items()}
    speed = SimpleNamespace(reads=reads, write_bytes=1e9)
    monkeypatch.setattr(of_plan, "measure", lambda *arguments, **keywords: speed)
    tier = hb.Ssd("/fast/disk", ram_rows=1000, engine=engine)
    of_tables = replace(Job.read(job), tables=replace(Job.read(job).tables, tier=tier))
    assert of_plan.disks_of(of_tables, None) == [Disk(measured[counts], counts, 1e9)]


def test_a_folder_for_rows_that_is_not_here_is_refused_with_what_to_say(job: str) -> None:
    tier = "tables.tier={kind: ssd, path: /not/here, ram_rows: 1000}"
    error = CliRunner().invoke(app, ["plan", job, "--set", tier]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(
        "the tier of tables, whose disk a plan measures without --disk-reads: does not exist, got "
        "'/not/here'."
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--disk-reads=5",
            "--disk-reads: not a number above 0 with a unit, got '5'. Write such as",
        ),
        ("--rows=nobody=5", "--rows: unknown table, got 'nobody'. Name one of the tables ["),
        ("--rows=user", "--rows: not a table and a number, got 'user'"),
        ("--ranks=257", "--ranks: a table lies on at most 256 ranks, got 257"),
    ],
)
def test_what_a_plan_cannot_do_is_refused(job: str, flag: str, message: str) -> None:
    error = CliRunner().invoke(app, ["plan", job, flag]).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_a_plan_of_one_of_several_ranks_is_refused(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = CliRunner().invoke(app, ["plan", job]).exception
    assert isinstance(error, ConfigError)
    assert "it starts the ranks that it measures, got a process of 2 ranks" in str(error)
