# SPDX-License-Identifier: Apache-2.0
"""The plan of a job on several ranks, beside what ranks do: to the byte where it is a sum, within
the promised error where it is a measurement.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import ranks_of
from kept_ratings import KEPT_JOB, read_ratings

import hotbed as hb
from hotbed.job import workload as of_job
from hotbed.job.job import Job
from hotbed.job.planning import Wishes, plan
from hotbed.job.sampled_tables import SampledHistories, table_facts
from hotbed.parallel import RankWork
from hotbed.parallel.forecast.ranks import LinkSpeed, Workload, planned

ROOT = Path(__file__).parents[2]
GRAINS = 8


SOAKED = [(3, 1), (6, 2), (6, 3)]


def model_with_policies() -> hb.RecModel:
    """A model whose questions have times, scores and counts, whose tables have a cap, and which
    keeps a count.
    """
    torch.manual_seed(1)
    columns = [hb.Id("user"), hb.Id("item"), hb.Id("tags", table="word", pooling="mean")]
    columns += [hb.Id("title", table="word")]
    clicks = hb.Count("clicks", by="item", where={"y": 1}, windows=[60], every=5)
    schema = hb.Schema([hb.Label("y"), hb.Time("at"), *columns, clicks])
    policies = {
        "user": {"admit": hb.MinCount(2)},
        "item": {"evict": [hb.Lfu(2048, half_life_seconds=60.0), hb.Ttl(days=1)], "dim": 8},
    }
    tables = hb.make_tables(schema, dim=4, rule=hb.Adagrad(lr=0.1), overrides=policies)
    return hb.RecModel(hb.models.DNN(schema, tables, hidden=[5]), "bce", "adam", grains=GRAINS)


def batches() -> list[hb.Batch]:
    """Two batches, of which one does not divide by grains."""
    random = np.random.default_rng(0)
    made = []
    for num_samples in (64, 45):
        ends = np.concatenate([[0], np.cumsum(random.integers(0, 4, num_samples))])
        ids = {
            "user": hb.Ids(random.integers(0, 30, num_samples)),
            "item": hb.Ids(random.integers(0, 30, num_samples)),
            "tags": hb.Ids(random.integers(0, 20, ends[-1]), ends),
            "title": hb.Ids(random.integers(0, 20, num_samples)),
        }
        labels = random.integers(0, 2, num_samples).astype(np.float32)
        at = np.arange(num_samples) * 1_000_000
        made.append(hb.Batch(ids, {}, {"y": labels}, time=at))
    return made


def trained() -> list[RankWork]:
    return model_with_policies().fit(batches(), progress=False).ranks


def workload() -> Workload:
    """The same model and batches, as a plan sees them."""
    model = model_with_policies()
    sampled = SampledHistories(model.schema, 64, 2)
    for batch in batches():
        list(sampled.fill(batch))
    rows = np.zeros(256)
    dense = [parameter.numel() for parameter in hb.dense_parameters(model.network)]
    return Workload(
        tables=[table_facts(table, rows, rows) for table in model.tables.values()],
        batches=[of_job._sampled_batch(model, batch, sampled) for batch in sampled.last],
        batch_size=64,
        grains=GRAINS,
        modules=1,
        dense=[1, *dense],
        process_bytes=0.0,
        step_seconds={64: 1.0},
        read_seconds=0.0,
        link=LinkSpeed.of(1e-3, 1e6),
        cores=2,
    )


@pytest.mark.parametrize(
    ("ranks", "host_ranks"),
    [(2, 1), (4, 2), *(pytest.param(*hosts, marks=pytest.mark.soak) for hosts in SOAKED)],
)
def test_planned_bytes_and_messages_are_those_that_ranks_send(ranks: int, host_ranks: int) -> None:
    of_ranks = ranks_of(trained, ranks, host_ranks=host_ranks)[0]
    work = workload().with_hosts(host_ranks)
    expected = planned(work, ranks)
    assert [of_rank.sent_bytes for of_rank in of_ranks] == (2 * expected.sent_bytes).tolist()
    assert max(of_rank.messages for of_rank in of_ranks) == 2 * expected.messages


JOB = """
schema:
  columns:
    - {kind: label, name: label}
    - {kind: id, name: a}
    - {kind: id, name: b}
    - {kind: id, name: c}
train:
  kind: generated
  rows: 1500000
  slots: {a: {size: 5000000}, b: {size: 5000000}, c: {size: 300}}
  distribution: {kind: power_law, alpha: 0.7}
model: {kind: dcnv2, num_cross_layers: 2, hidden: [64, 32]}
tables: {dim: 32, rule: {kind: adam, lr: 0.001}}
fit: {batch_size: 8192}
"""


def peaks_and_bytes(folder: Path, ranks: int) -> tuple[float, float]:
    """Train on ranks: the most memory of a process, and the most bytes that one sent a step."""
    command = [sys.executable, "-m", "hotbed.cli", "train", "job.yaml", f"--ranks={ranks}"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    peaks: Mapping[str, int] = {}
    while process.poll() is None:
        workers = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
        )
        for worker in workers.stdout.split():
            status = Path(f"/proc/{worker}/status")
            peak = re.search(r"VmHWM:\s+(\d+)", status.read_text() if status.exists() else "")
            if peak is not None:
                peaks = {**peaks, worker: int(peak[1]) * 1024}
        time.sleep(0.2)
    assert process.returncode == 0
    page = (folder / "runs" / "job" / "report.html").read_text()
    lines = page[page.index("Ranks, train") :].partition("</table>")[0].split("<tr>")[2:]
    cells = [[html.unescape(re.sub("<.*?>", "", c)) for c in line.split("</td>")] for line in lines]
    return max(peaks.values()), max(_number(line[3]) for line in cells)


def _number(text: str) -> float:
    value = float(text.removesuffix(" M").replace(",", ""))
    return value * 1e6 if text.endswith(" M") else value


@pytest.mark.soak
def test_memory_and_bytes_of_a_job_are_as_planned(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job = replace(Job.read(tmp_path / "job.yaml"), output=str(tmp_path / "runs" / "job"))
    for ranks in (2, 4):
        of_ranks = plan(job, Wishes(ranks)).plans[-1]
        memory, sent = peaks_and_bytes(tmp_path, ranks)
        assert of_ranks.most_memory == pytest.approx(memory, rel=0.10)
        assert of_ranks.sent_bytes.max() == pytest.approx(sent, rel=0.05)


@pytest.mark.soak
def test_bytes_of_a_job_that_keeps_histories_are_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read_ratings(ROOT, 200_000).write_csv("ratings.csv")
    Path("job.yaml").write_text(KEPT_JOB + "train: {kind: csv, path: ratings.csv}\n")
    of_ranks = plan(Job.read("job.yaml"), Wishes(ranks=2)).plans[-1]
    _, sent = peaks_and_bytes(tmp_path, 2)
    assert of_ranks.sent_bytes.max() == pytest.approx(sent, rel=0.05)
