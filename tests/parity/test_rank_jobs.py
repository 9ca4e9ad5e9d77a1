# SPDX-License-Identifier: Apache-2.0
"""Jobs on several processes, by the command line: the state is that of one process, the first rank
alone shows it, and errors and signals end all of them with one message.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import pyarrow.csv as pacsv
import torch
from kept_ratings import KEPT_JOB, read_ratings
from started import start_process
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.commands import app
from hotbed.persist.container.store import open_store
from hotbed.persist.publish import Follower, TopicFeed
from hotbed.persist.upkeep.inspect import describe_checkpoint, diff
from hotbed.testing import Broker

ROOT = Path(__file__).parents[2]
RATINGS = ROOT / "data" / "ml_latest_small" / "ratings.csv"
JOB = """
schema:
  columns:
    - {kind: label, name: liked, column: rating, threshold: 4}
    - {kind: time, name: timestamp, unit: s}
    - {kind: id, name: user, column: userId}
    - {kind: id, name: movie, column: movieId}
train: {kind: slice, stop: 20000, source: &events {kind: csv, path: RATINGS}}
valid: {kind: slice, start: 20000, stop: 24000, source: *events}
model: {kind: deepfm, hidden: [8]}
tables: {dim: 4, admit: {kind: min_count, count: 2}, evict: {kind: ttl, days: 900}}
callbacks: [{kind: evict, step_interval: 2}, {kind: best_weights, metric: auc}]
fit: {batch_size: 4096, shuffle: 4096, epochs: 2}
baselines: false
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a job on shipped data."""
    (tmp_path / "job.yaml").write_text(JOB.replace("RATINGS", str(RATINGS)))
    return tmp_path


def start(folder: Path, *arguments: str, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    """`hotbed arguments` in a folder, as modules of Python below a launcher."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return start_process(
        [sys.executable, *launcher, "-m", "hotbed.cli", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def hotbed(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `hotbed arguments` in a folder."""
    process = start(folder, *arguments)
    printed, errors = process.communicate(timeout=300)
    return process.returncode, printed, errors


def table_lines(printed: str) -> list[list[str]]:
    """The cells of each table: rows, capacity, admitted, refused and evicted."""
    lines = [line.split("│")[1:-2] for line in printed.splitlines() if line.startswith("│")]
    assert len(lines) == 4, printed
    return lines


def check_state_is_that_of_one_process(folder: Path, ranks: int) -> None:
    threads = torch.get_num_threads()
    alone = CliRunner().invoke(
        app, ["train", str(folder / "job.yaml"), "--set=grains=8", f"--set=output={folder}/one"]
    )
    torch.set_num_threads(threads)
    assert alone.exit_code == 0, alone.output
    code, printed, errors = hotbed(
        folder, "train", "job.yaml", "--ranks", str(ranks), "--set", "output=several"
    )
    assert code == 0, errors
    assert diff(folder / "several", folder / "one")["same"]
    assert printed.count("model: several") == printed.count("epoch 2/2") == 1
    restored = describe_checkpoint(str(folder / "several"))
    assert restored["counters"]["steps"] == 5  # of the first epoch, by best_weights
    assert table_lines(printed) == table_lines(alone.output)
    assert json.loads((folder / "several" / "job.json").read_text())["grains"] == 8
    page = (folder / "several" / "report.html").read_text()
    assert "Ranks, train" in page
    assert f"<td>ranks</td><td>{ranks}</td>" in page


def test_a_job_on_two_ranks_gives_the_state_of_one_process(folder: Path) -> None:
    check_state_is_that_of_one_process(folder, 2)


@pytest.mark.soak
def test_a_job_on_three_ranks_is_trained_evaluated_and_scored_as_by_one_process(
    folder: Path,
) -> None:
    check_state_is_that_of_one_process(folder, 3)
    printed = []
    scores = []
    for flags in ([], ["--ranks", "3"]):
        output = ["--set", "output=several", *flags]
        _, evaluated, _ = hotbed(folder, "evaluate", "job.yaml", *output)
        _, predicted, _ = hotbed(folder, "predict", "job.yaml", *output)
        printed.append(evaluated + predicted)
        scores.append((folder / "several" / "predictions.parquet").read_bytes())
    assert printed[0] == printed[1]
    assert scores[0] == scores[1]
    assert printed[0].count("\n") == 2


DATA = """
train: {kind: slice, stop: 6000, source: &events {kind: csv, path: ratings.csv}}
valid: {kind: slice, start: 6000, stop: 8000, source: *events}
"""


@pytest.mark.soak
def test_a_launched_job_keeps_histories_on_ranks_as_on_one_process(tmp_path: Path) -> None:
    ratings = read_ratings(ROOT, 8000)
    ratings.write_csv(tmp_path / "ratings.csv")
    (tmp_path / "job.yaml").write_text(KEPT_JOB + DATA)
    user = f"user={ratings['userId'][-1]}"
    printed = []
    scores = []
    for flags, output in (([], "one"), (["--ranks", "3"], "several")):
        shown = []
        for command in ("train", "evaluate", "predict"):
            code, text, errors = hotbed(
                tmp_path, command, "job.yaml", *flags, "--set", f"output={output}"
            )
            assert code == 0, errors
            shown.append(text if command == "evaluate" else "")
        shown.append(hotbed(tmp_path, "rows", output, "--history", user)[1])
        printed.append(shown)
        scores.append((tmp_path / output / "predictions.parquet").read_bytes())
    assert diff(tmp_path / "several", tmp_path / "one")["same"]
    assert printed[0] == printed[1]
    assert "before" in printed[0][-1]
    assert scores[0] == scores[1]


@pytest.mark.soak
def test_an_error_of_all_ranks_is_one_message(folder: Path) -> None:
    change = "schema.columns.user.column=nope"
    code, _, errors = hotbed(folder, "train", "job.yaml", "--ranks", "2", "--set", change)
    assert code == 2
    assert errors.startswith("SchemaError valid: columns ['nope'] are missing")
    assert errors.count("\n") == 1


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
def test_torchrun_starts_killed_ranks_again_and_they_resume(ranks: int, folder: Path) -> None:
    job = folder / "job.yaml"
    callback = "{kind: checkpoint, path: states/OUTPUT, every_steps: 5, wait: true}"
    text = job.read_text().replace("{kind: best_weights, metric: auc}", callback)
    job.write_text(text.replace("batch_size: 4096", "batch_size: 256"))
    flags = ["--set=grains=8", f"--set=callbacks.1.path={folder}/states/one"]
    one = hotbed(folder, "train", "job.yaml", *flags, "--set", "output=one")
    assert one[0] == 0, one[2]
    launcher = ["--standalone", "--max-restarts", "1", "--nproc-per-node", str(ranks)]
    job_flags = ["--set=grains=8", f"--set=callbacks.1.path={folder}/states/several"]
    process = start(
        folder,
        *["train", "job.yaml", *job_flags, "--set", "output=several"],
        launcher=["-m", "torch.distributed.run", *launcher],
    )
    while not (folder / "states" / "several" / "checkpoint-00000005").exists():
        assert process.poll() is None
        time.sleep(0.01)
    kill_a_rank(process)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    for name in ("", "states/"):
        assert diff(folder / f"{name}several", folder / f"{name}one")["same"]


def versions_of(feed: Any, folder: Path) -> tuple[list[int], list[float]]:
    """The versions that are there, and what a server that follows them scores in the end."""
    versions = []
    if isinstance(feed, Path):  # whoever follows a folder late gets the newest alone
        names = open_store(feed).folders()
        versions = [describe_checkpoint(feed / name)["version"] for name in names[:-1]]
    server = hb.ParameterServer(folder)
    for reader in Follower(feed).poll():
        versions.append(reader.manifest.version)
        session = hb.InferenceSession(server.load("m", reader))
    asked = pacsv.read_csv(RATINGS).slice(20000, 500).drop(["rating"])
    return versions, np.asarray(session.predict(asked)).tolist()


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("by", ["folder", "topic"])
def test_ranks_of_torchrun_publish_each_version_once_and_a_server_follows(
    by: str, ranks: int, folder: Path
) -> None:
    """The versions are those of one process, and so are the scores."""
    job = folder / "job.yaml"
    saves = "{kind: checkpoint, path: STATES, every_steps: 2, full_every: 3, wait: true}"
    job.write_text(job.read_text().replace("{kind: best_weights, metric: auc}", saves))
    answers = []
    with Broker() as broker:
        for number in (1, ranks):
            root = folder / str(number)
            publisher = f"{{kind: publish_directory, path: {root}/published, keep: 9}}"
            feed: Any = root / "published"
            if by == "topic":
                broker.create(f"versions-{number}")
                topic = {"servers": broker.servers, "topic": f"versions-{number}"}
                publisher = json.dumps({"kind": "publish_topic", **topic})
                feed = TopicFeed(**topic, cache=root / "cache")
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
            process = start(
                folder,
                *["train", "job.yaml", "--set=grains=8", f"--set=output={root}/model"],
                *[f"--set=callbacks.1.path={root}/states"],
                *[f"--set=callbacks.1.publish={publisher}"],
                launcher=launcher,
            )
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            assert "not published" not in errors
            answers.append(versions_of(feed, root / "rows"))
        assert diff(folder / str(ranks) / "states", folder / "1" / "states")["same"]
        assert len(answers[0][0]) > 3
        assert answers[1][0] == answers[0][0]
        assert answers[1][1] == pytest.approx(answers[0][1], abs=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("grains", [1, 8])
def test_commands_under_torchrun_publish_and_export_once(
    grains: int, ranks: int, folder: Path
) -> None:
    """A state of one process, with grains and without, as one process does."""
    code, _, errors = hotbed(folder, "train", "job.yaml", f"--set=grains={grains}")
    assert code == 0, errors
    (states,) = {current.parent for current in folder.glob("**/CURRENT")} - {folder / "best"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for name, starts in (("one", []), ("several", launcher)):
        for command in (["publish", "--to"], ["export", "--out"]):
            target = folder / f"{command[0]}-{name}"
            arguments = [command[0], str(states), command[1], str(target)]
            process = start(folder, *arguments, launcher=starts)
            printed, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            said = f"{target}: " if command[0] == "publish" else f"exported: {target}"
            assert printed.count(said) == 1, printed
    for command in ("publish", "export"):
        one, several = (folder / f"{command}-{name}" for name in ("one", "several"))
        assert diff(several, one)["same"]
        assert open_store(several).folders() == open_store(one).folders()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The ids of the processes that a process started."""
    listed = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(process.pid)], text=True)
    return [int(pid) for pid in listed.split()]


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()


def kill_a_rank(process: subprocess.Popen[str]) -> None:
    os.kill(workers_of(process)[1], signal.SIGKILL)


def stop_a_rank(process: subprocess.Popen[str]) -> None:
    os.kill(workers_of(process)[1], signal.SIGSTOP)


LOST = r"RankLost ranks: rank 0 in step \d+, [A-Za-z._]+: the connection to rank 1 was lost, got "
KILLED = "rank 1: the process was ended by SIGKILL"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (interrupt, 130, "SIGINT: all 2 ranks were ended\n"),
        (terminate, 143, "SIGTERM: all 2 ranks were ended\n"),
        (kill_a_rank, 137, rf"{KILLED}(\. {LOST}.*)?\n"),  # torch may end the witness first
        (stop_a_rank, 137, rf"{KILLED}\. {LOST}.*(Timed out waiting 5000ms|timeout)"),
    ],
)
def test_a_signal_ends_all_ranks_with_one_message(
    folder: Path,
    end: Callable[[subprocess.Popen[str]], None],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOTBED_RANKS_TIMEOUT", "5")
    process = start(folder, "train", "job.yaml", "--ranks", "2", "--set", "fit.epochs=100000")
    assert process.stdout is not None
    while "epoch 1/" not in process.stdout.readline():
        pass
    workers = workers_of(process)
    end(process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert re.match(message, errors)
    assert errors.count("\n") == 1
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.soak
@pytest.mark.parametrize("end", [interrupt, terminate])
def test_a_signal_ends_a_stream_on_all_ranks_after_a_step_and_saves_it(
    folder: Path, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    (folder / "arriving").mkdir()
    ratings = RATINGS.read_text().splitlines(True)
    (folder / "arriving" / "first.csv").write_text("".join(ratings[:9000]))
    stream = 'stream={kind: follow, directory: arriving, pattern: "*.csv"}'
    process = start(folder, "online", "job.yaml", "--ranks", "2", "--set", stream)
    while not list(folder.rglob("checkpoint/CURRENT")):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(3.0)  # some steps
    end(process)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert printed.count("state: ") == 1
    (state,) = {current.parent for current in folder.rglob("checkpoint/CURRENT")}
    assert describe_checkpoint(str(state))["counters"]["steps"] > 5  # those of `train`


@pytest.mark.soak
def test_ranks_end_with_a_launcher_that_is_killed(folder: Path) -> None:
    process = start(folder, "train", "job.yaml", "--ranks", "2", "--set", "fit.epochs=100000")
    assert process.stdout is not None
    while "epoch 1/" not in process.stdout.readline():
        pass
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=60)  # until nobody holds its pipes
    for worker in workers:
        status = Path(f"/proc/{worker}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.soak
def test_doctor_measures_ranks_and_says_which_interface_is_absent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed, errors = hotbed(folder, "doctor", "--ranks", "2")
    assert code == 0, errors
    assert "2 ranks on 1 host, over gloo" in printed
    assert "4,096 KiB" in printed
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent")
    code, _, errors = hotbed(folder, "doctor", "--ranks", "2")
    assert code == 2
    assert "GLOO_SOCKET_IFNAME=absent: there is no such interface here." in errors


@pytest.mark.soak
def test_doctor_of_a_rank_without_the_others_ends_with_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    code, _, errors = hotbed(folder, "doctor")
    assert code == 2
    assert errors.startswith("rank 0: ConfigError ranks: rank 0 of 2 cannot reach the others")


# --- two hosts, which are network namespaces of this machine --------------------------------------

HOSTS = ("hotbed-test-0", "hotbed-test-1")
ADDRESSES = ("10.231.77.1", "10.231.77.2")
START = 30
"""Seconds for the start of torchrun and of its ranks, on a machine with other work beside it."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces, each with an end of one cable."""
    try:
        ip("netns", "add", HOSTS[0])
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces absent")
    try:
        ip("netns", "add", HOSTS[1])
        ip("link", "add", "hbtest0", "type", "veth", "peer", "name", "hbtest1")
        for number, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
            ip("link", "set", f"hbtest{number}", "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", f"hbtest{number}")
            ip("-n", host, "link", "set", f"hbtest{number}", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def start_host(
    folder: Path, number: int, *flags: str, interface: str | None = "hbtest", ranks: int = 1
) -> subprocess.Popen[str]:
    """Start the ranks of a host by torchrun; `interface`: to use, without the host's number."""
    launcher = ["--nnodes=2", f"--node-rank={number}", f"--nproc-per-node={ranks}"]
    launcher += [f"--master-addr={ADDRESSES[0]}", "--master-port=29555"]
    job = ["-m", "hotbed.cli", "train", "job.yaml", "--set=output=two", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = f"{interface}{number}"
    return start_process(
        [
            *["ip", "netns", "exec", HOSTS[number]],
            *[sys.executable, "-m", "torch.distributed.run", *launcher, *job],
        ],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.soak
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_train_the_state_of_one_process(ranks: int, folder: Path) -> None:
    one = hotbed(folder, "train", "job.yaml", "--set=output=one", "--set=grains=8")
    assert one[0] == 0, one[2]
    started = [start_host(folder, number, ranks=ranks) for number in range(2)]
    for process in started:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
    assert diff(folder / "two", folder / "one")["same"]


@pytest.mark.soak
@pytest.mark.usefixtures("hosts")
def test_hosts_that_are_known_by_the_loopback_end_at_once_and_say_what_to_set(folder: Path) -> None:
    for process in [start_host(folder, number, interface=None) for number in range(2)]:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "ranks: ranks on 2 hosts cannot reach each other, got this: " in printed
        assert "Ranks on other hosts need GLOO_SOCKET_IFNAME, one of " in printed


@pytest.mark.soak
@pytest.mark.parametrize("addresses", [("1.1", "2.2"), ("1.1", "1.2"), ("1.1", "1.1")])
@pytest.mark.usefixtures("hosts")
def test_hosts_with_an_interface_that_reaches_no_other_end_soon_and_say_what_to_set(
    folder: Path, addresses: tuple[str, str]
) -> None:
    """As that of a container engine: in two networks, in what looks like one, or by one address."""
    for number, address in enumerate(addresses):
        names = (f"hblocal{number}", f"hbother{number}")
        ip("-n", HOSTS[number], "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name in names:
            ip("-n", HOSTS[number], "link", "set", name, "up")
        ip("-n", HOSTS[number], "addr", "add", f"10.231.{address}/24", "dev", names[0])
    started = [start_host(folder, number, interface="hblocal") for number in range(2)]
    began = time.monotonic()
    for process in started:
        printed, _ = process.communicate(timeout=100)
        seconds = time.monotonic() - began
        print(f"a host ended after {seconds:.1f} s")
        assert process.returncode != 0
        assert re.search(r"cannot reach rank [01] by its address 10\.231\.[12]\.[12], got", printed)
        assert "Set GLOO_SOCKET_IFNAME to the interface between the hosts" in printed
        assert seconds < 30 + START


@pytest.mark.soak
@pytest.mark.usefixtures("hosts")
def test_a_host_waits_for_another_one_that_comes_late(folder: Path) -> None:
    started = [start_host(folder, 0)]
    time.sleep(15)
    started.append(start_host(folder, 1))
    for process in started:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed


def kill_host(number: int) -> None:
    pids = subprocess.check_output(["ip", "netns", "pids", HOSTS[number]], text=True).split()
    subprocess.run(["kill", "-9", *pids], check=True)


def unplug_host(number: int) -> None:
    ip("-n", HOSTS[number], "link", "set", f"hbtest{number}", "down")


@pytest.mark.soak
@pytest.mark.parametrize("lose", [kill_host, unplug_host])
@pytest.mark.usefixtures("hosts")
def test_a_host_that_is_lost_ends_the_other(folder: Path, lose: Callable[[int], None]) -> None:
    hosts = [start_host(folder, number, "--set=fit.epochs=100000") for number in range(2)]
    assert hosts[0].stdout is not None
    while "epoch 1/" not in (line := hosts[0].stdout.readline()):
        assert line, "the first host trains"
    lose(1)
    began = time.monotonic()
    printed, _ = hosts[0].communicate(timeout=150)
    print(f"the other host ended after {time.monotonic() - began:.1f} s")
    assert hosts[0].returncode != 0
    assert "the connection to rank 1 was lost" in printed
    hosts[1].communicate(timeout=150)
    assert hosts[1].returncode != 0
