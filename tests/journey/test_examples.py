# SPDX-License-Identifier: Apache-2.0
"""Every example runs from a clean folder and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.cli.commands import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory that has the shipped data and nothing else."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    # One thread each: the suite may run on several workers, and spinning threads of small networks
    # slow each other down.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in:\n{text}"
    return float(found.group(1))


def test_the_quick_start_and_its_job_give_the_same_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_python = number(r"'auc': ([\d.]+)", run(folder, str(EXAMPLES / "quickstart.py")))
    monkeypatch.chdir(folder)
    app(["train", str(EXAMPLES / "quickstart.yaml")], standalone_mode=False)
    as_job = number(r"validation auc ([\d.]+)", capsys.readouterr().out)
    assert in_python == as_job > 0.65


@pytest.mark.soak
def test_a_plain_torch_loop_learns(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "plain_torch_loop.py"))
    assert number(r"AUC ([\d.]+)", output) > 0.64
    assert "learning rate of the rows 0.0400" in output


@pytest.mark.soak
def test_the_eight_steps_of_rec_sdk_learn_and_forget(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "rec_sdk.py"))
    assert number(r"AUC ([\d.]+)", output) > 0.6
    users = [int(rows) for rows in re.findall(r"'user': (\d+)", output)]
    assert 0 < users[-1] < 500  # of 610 users, those of two years are left


@pytest.mark.soak
def test_criteo_reads_the_log_as_it_comes(folder: Path, shared_data: Path) -> None:
    output = run(
        folder, str(EXAMPLES / "criteo.py"), str(shared_data / "criteo" / "kaggle_head10001.tsv")
    )
    assert number(r"'valid.auc': ([\d.]+)", output) > 0.68


@pytest.mark.soak
def test_multi_hot_genres_tell_what_people_like(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "multi_hot_genres.py"))
    assert "[1, 1, 1, 1, 1, 1, 3]" in output
    assert number(r"([\d.]+)  War\n", output) > number(r"([\d.]+)  Horror\n", output)


@pytest.mark.soak
def test_histories_of_films_are_learned_and_asked_with(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "histories.py"))
    assert number(r"AUC without histories ([\d.]+)", output) > 0.6
    assert number(r"with histories ([\d.]+)\n", output) > 0.6
    assert "scores of the session equal those of training: True" in output
    after_romance, after_horror = re.findall(r"best after \w+: (.*)", output)
    assert after_romance != after_horror


@pytest.mark.soak
def test_multi_task_learns_both_labels(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "multi_task_census.py"))
    assert number(r"'valid.income.auc': ([\d.]+)", output) > 0.92
    assert number(r"'valid.never_married.auc': ([\d.]+)", output) > 0.98


@pytest.mark.soak
def test_admission_and_eviction_are_at_work(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "admission_and_eviction.py"))
    rows, admitted, refused, evicted = (
        int(part.replace(",", "")) for part in re.findall(r"^2018\s+(.*)$", output, re.M)[0].split()
    )
    assert rows == admitted - evicted
    assert min(rows, refused, evicted) > 1000
    assert "it reads its initial row: True" in output


@pytest.mark.soak
def test_two_topics_are_joined_by_both_rules_and_go_on_where_they_were(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "join_topics.py"))
    scores = re.findall(r"^(\w+): auc (0\.\d+)  calibration (\d\.\d+)$", output, re.M)
    assert [rule for rule, _, _ in scores] == ["Wait", "AsTheyCome"]
    for _, auc, calibration in scores:
        assert float(auc) > 0.65
        assert 0.9 < float(calibration) < 1.1


@pytest.mark.soak
def test_a_stream_through_a_broker_is_learned_on_and_goes_on_where_it_was(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "stream_kafka.py"))
    assert "movielens: life 1 ends after 472 steps" in output
    assert "movielens: life 2 ends after 945 steps" in output
    frozen, progressive = re.findall(r"frozen auc (0\.\d+)  progressive auc (0\.\d+)", output)[0]
    assert float(progressive) > float(frozen) + 0.05


@pytest.mark.soak
def test_mindspore_s_online_example_resumes_and_exports_what_changed(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "mindspore_online.py"))
    assert "epoch: 1 step: 300, loss is 0." in output
    assert "epoch: 1 step: 600, loss is 0." in output
    assert number(r"ended at step 600: auc before learning ([\d.]+)", output) > 0.66
    states = folder / "runs/mindspore_online/widedeep_train"
    assert len([path for path in states.iterdir() if path.is_dir()]) == 5
    assert "incremental export: 3 keys, 0 values, statuses [2 2 2]" in output
    assert 0.5 < number(r"film 318 with probability ([\d.]+)", output) < 1


def test_streams_of_clicks_say_what_is_skipped(folder: Path) -> None:
    output = run(folder, str(EXAMPLES / "stream_clicks.py"), str(folder))
    assert "avazu/stream_20141021.csv: not there, so avazu is skipped" in output
    assert "ml1m_u2999/ratings_early.csv: not there, so movielens is skipped" in output


@pytest.mark.soak
def test_streams_of_clicks_are_learned_on(folder: Path, shared_data: Path) -> None:
    (folder / "avazu").symlink_to(shared_data / "avazu")
    output = run(folder, str(EXAMPLES / "stream_clicks.py"), str(folder))
    frozen, progressive = re.findall(
        r"avazu: frozen auc (0\.\d+)  progressive auc (0\.\d+)", output
    )[0]
    assert float(progressive) > float(frozen)


def test_every_example_has_a_test() -> None:
    tested = Path(__file__).read_text() + (Path(__file__).parent / "test_demo.py").read_text()
    assert [
        path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name not in tested
    ] == []
