# SPDX-License-Identifier: Apache-2.0
"""Several processes at the same ports answer as one: also while versions change, and when one is
killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import hotbed as hb
from hotbed.errors import HotbedError, NotServed, ServingError
from hotbed.serving.server.endpoints.grpc import MESSAGES

from .conftest import (
    Trainer,
    Workers,
    again_and_again,
    damage_rows,
    draw,
    stopped_under_load,
    wait_for,
)

pytestmark = pytest.mark.slow


def samples(text: str, name: str) -> dict[str, float]:
    """The values of a metric by worker, summed over its other labels."""
    values = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                values[sample.labels["worker"]] += sample.value
    return dict(values)


@pytest.fixture(scope="module")
def watched(
    exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Workers, Trainer]]:
    """A server that follows what a trainer publishes."""
    trainer = Trainer(tmp_path_factory.mktemp("watched"), exported)
    server = Workers(
        f"m={trainer.folder / 'export'}",
        *("--watch", trainer.folder / "published"),
        *("--set", f"rows={trainer.folder / 'rows'}"),
        *("--set", "check_seconds=0.3"),
    )
    Workers.started.remove(server)  # it outlives its first test
    yield server, trainer
    assert server.stop() == 0


NUM_USERS = 4000


@pytest.fixture(scope="module")
def loaded(
    exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Workers, Path]]:
    """A server of two exports, and their folder: `m`, and `users`, which has many rows."""
    folder = tmp_path_factory.mktemp("loaded")
    shutil.copytree(exported, folder / "m")
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    data = {"user": np.arange(NUM_USERS), "label": rng.integers(0, 2, NUM_USERS)}
    schema = hb.Schema([hb.Label("label"), hb.Id("user")])
    tables = hb.make_tables(schema, dim=64)
    model = hb.RecModel(hb.models.DNN(schema, tables), "bce", hb.Adam(lr=0.01))
    model.fit(hb.Dataset(hb.sources.Memory(data), schema, 4096), progress=False)
    model.export(folder / "users")
    server = Workers(f"m={folder / 'm'}", f"users={folder / 'users'}")
    Workers.started.remove(server)  # it outlives its first test
    yield server, folder
    assert server.stop() == 0


def test_workers_answer_as_one_server_and_versions_mix_in_no_answer(
    watched: tuple[Workers, Trainer],
) -> None:
    """The first test of this server: it counts each request, start and version."""
    server, trainer = watched
    answers, wrong = list[tuple[int, Any]](), list[Exception]()

    def ask() -> None:
        try:
            # a connection each, so that all workers get some
            with hb.Client(f"http://{server.http}") as client:
                found = client.ask("m", trainer.asked)
            answers.append((found.version, found.outputs["prediction"]))
        except HotbedError as error:
            wrong.append(error)

    with again_and_again(*[ask] * 4):
        wait_for(lambda: answers, "the first version is served")
        for seed in range(3):
            version = trainer.publish(seed, full=seed == 2)
            wait_for(
                lambda version=version: [one for one, _ in answers[-40:]].count(version) == 40,
                "all serve it",
            )
    assert not wrong
    assert {version for version, _ in answers} == set(trainer.scores)
    assert all(np.abs(found - trainer.scores[version]).max() < 1e-6 for version, found in answers)

    texts = [server.get("/metrics")[1] for _ in range(6)]
    requests = [samples(text, "hotbed_requests_total") for text in texts]
    assert all(one == requests[0] for one in requests)
    assert sum(requests[0].values()) == len(answers)
    assert set(requests[0]) == {"1", "2"}  # both had work
    assert samples(texts[0], "hotbed_model_version") == {
        "parent": version,
        "1": version,
        "2": version,
    }
    assert samples(texts[0], "hotbed_worker_up") == {"1": 1.0, "2": 1.0}
    said = [json.loads(server.get("/status")[1]) for _ in range(12)]
    assert {one["worker"] for one in said} == {1, 2}  # whoever is asked tells the same
    assert all(
        one["workers"] == [{"number": n, "up": True, "starts": 1} for n in (1, 2)] for one in said
    )
    shown = [one["models"][0] for one in said]
    assert {(one["version"], one["state"], one["swaps"]) for one in shown} == {
        (str(version), "READY", 3)
    }
    scored = sum(samples(texts[0], "hotbed_scored_rows_total").values())
    assert {one["rows"] for one in shown} == {scored} == {len(answers) * 30}
    assert len({one["p99"] for one in shown}) == 1
    from prometheus_client.parser import text_string_to_metric_families

    names = [family.name for family in text_string_to_metric_families(texts[0])]
    assert len(names) == len(set(names)) > 10

    with grpc.insecure_channel(server.grpc) as channel:
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        assert MESSAGES["ServerReadyResponse"].FromString(ready(b"", timeout=60)).ready


def test_a_worker_that_is_killed_is_started_again_and_counted(
    watched: tuple[Workers, Trainer],
) -> None:
    server, trainer = watched
    version = trainer.publish(0)
    wait_for(
        lambda: (
            [samples(server.get("/metrics")[1], "hotbed_model_version").get(one) for one in "12"]
            == [version] * 2
        ),
        "the version in both workers",
    )
    before = server.children
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    answered = 0
    with_both = []
    until = time.monotonic() + 60
    while not with_both and time.monotonic() < until:
        try:
            with hb.Client(f"http://{server.http}") as client:
                found = client.ask("m", trainer.asked)
        except ServingError:  # a connection that the dead one had taken
            continue
        assert found.version == version
        assert np.abs(found.outputs["prediction"] - trainer.scores[version]).max() < 1e-6
        answered += 1
        text = server.get("/metrics")[1]
        if (
            samples(text, "hotbed_worker_up") == {"1": 1.0, "2": 1.0}
            and sum(samples(text, "hotbed_worker_starts_total").values()) == 3
        ):
            with_both.append(text)
        time.sleep(0.05)
    assert with_both
    assert answered > 0
    assert server.told("ended with -9; it is started again")
    assert before[1] in server.children
    assert samples(with_both[0], "hotbed_model_version")["1"] == version


def test_loads_and_unloads_reach_every_worker(
    loaded: tuple[Workers, Path], session: hb.InferenceSession
) -> None:
    server, folder = loaded
    asked = draw(30, 99)
    assert server.get("/v2/repository/models/m/unload", "POST")[0] == 200
    for _ in range(12):
        assert server.get("/v2/models/m/ready")[0] == 404
        assert server.get("/v2/health/ready")[0] == 503
        with hb.Client(f"http://{server.http}") as client, pytest.raises(NotServed):
            client.predict("m", asked)
    os.kill(server.children[0], signal.SIGKILL)  # the next one is told as well
    wait_for(
        lambda: samples(server.get("/metrics")[1], "hotbed_worker_up") == {"1": 1.0, "2": 1.0},
        "it is back",
    )
    for _ in range(12):
        assert server.get("/v2/models/m/ready")[0] == 404
    assert server.get("/v2/repository/models/m/load", "POST")[0] == 200
    expected = session.predict(asked)
    for _ in range(12):
        assert server.get("/v2/health/ready")[0] == 200
        with hb.Client(f"http://{server.http}") as client:
            assert np.abs(client.predict("m", asked) - expected).max() < 1e-6
    assert server.get("/v2/repository/models/x/load", "POST")[0] == 404
    (graph,) = (folder / "m").rglob("graph.onnx")
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-5])
    status, text = server.get("/v2/repository/models/m/load", "POST")
    assert status == 409
    assert "graph.onnx" in text
    wait_for(
        lambda: all(
            "graph.onnx" in server.get("/v2/repository/index", "POST")[1] for _ in range(8)
        ),
        "all tell why",
    )
    graph.write_bytes(whole)
    assert server.get("/v2/repository/models/m/load", "POST")[0] == 200


def test_every_worker_reports_a_version_that_the_parent_could_not_load(
    watched: tuple[Workers, Trainer],
) -> None:
    server, trainer = watched
    first = trainer.publish(1)
    wait_for(
        lambda: f'"version":"{first}"' in server.get("/v2/repository/index", "POST")[1],
        "the version",
    )
    server.process.send_signal(signal.SIGSTOP)  # the parent: torn before it is read
    assert server.get("/v2/health/ready")[0] == 200  # workers answer on
    trainer.publish(2)
    part = trainer.tear()
    server.process.send_signal(signal.SIGCONT)
    wait_for(
        lambda: all(part in server.get("/v2/repository/index", "POST")[1] for _ in range(8)),
        "all tell",
    )
    assert f'"version":"{first}"' in server.get("/v2/repository/index", "POST")[1]
    last = trainer.publish(3, full=True)
    wait_for(
        lambda: all(
            f'"version":"{last}"' in server.get("/v2/repository/index", "POST")[1] for _ in range(8)
        ),
        "it",
    )
    wait_for(
        lambda: all(part not in server.get("/v2/repository/index", "POST")[1] for _ in range(8)),
        "well again",
    )


def test_workers_end_with_their_parent_and_the_next_ones_drain_at_the_same_ports(
    exported: Path, session: hb.InferenceSession, tmp_path: Path
) -> None:
    """The first parent is killed; the second one gets SIGTERM under load."""
    arguments = (f"m={exported}", "--set", f"rows={tmp_path / 'rows'}")
    server = Workers(*arguments)
    children = server.children
    assert len(children) == 2
    server.process.kill()
    wait_for(lambda: not [one for one in children if Path(f"/proc/{one}").exists()], "they end")
    server.stop(signal.SIGKILL)
    port, grpc_port = (address.rpartition(":")[2] for address in (server.http, server.grpc))
    ports = ("--set", f"port={port}", "--set", f"grpc_port={grpc_port}")
    again = Workers(*arguments, *ports, "--set", "drain_seconds=0.5")
    assert again.http == server.http
    children = again.children
    assert len(children) == 2
    asked = draw(30, 99)
    stopped_under_load(again, asked, session.predict(asked))
    assert not [one for one in children if Path(f"/proc/{one}").exists()]


def test_workers_share_the_pages_of_rows(loaded: tuple[Workers, Path]) -> None:
    """Rss counts a page for each process that has it mapped, Pss its share: with both workers at
    it, half, or a third with the parent.
    """

    server, _ = loaded

    def mapped() -> list[dict[str, int]]:
        found = []
        for pid in server.children:
            held, inside = Counter[str](), False
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                    inside = line.endswith(".rows") and "/users/" in line
                elif inside and (part := re.match(r"(\w+): +(\d+) kB", line)):
                    held[part[1]] += int(part[2]) << 10
            found.append(dict(held))
        return found

    def touched() -> bool:
        with hb.Client(f"http://{server.http}") as client:
            for users in np.split(np.arange(NUM_USERS), 4):
                client.predict("users", {"user": users})
        return [one["Rss"] > NUM_USERS * 64 * 4 for one in mapped()] == [True, True]

    wait_for(touched, "both have read all rows")
    for one in mapped():
        assert one["Pss"] < 0.6 * one["Rss"]
        assert one["Private_Clean"] + one["Private_Dirty"] < 0.05 * one["Rss"]


def test_rows_that_rot_are_mended_under_all_workers(watched: tuple[Workers, Trainer]) -> None:
    """The parent finds them; each worker then maps the files that were written anew."""
    server, trainer = watched
    version = trainer.publish(5, full=True)

    def is_right() -> bool:
        with hb.Client(f"http://{server.http}") as client:
            found = client.ask("m", trainer.asked)
        apart = np.abs(found.outputs["prediction"] - trainer.scores[version]).max()
        return bool(found.version == version and apart < 1e-6)

    wait_for(lambda: all(is_right() for _ in range(8)), "all serve it")
    swaps = samples(server.get("/metrics")[1], "hotbed_model_swaps_total")
    damage_rows(trainer.folder / "rows")
    wait_for(lambda: server.told("damaged files"), "the damage is logged")

    def is_mended() -> bool:
        text = server.get("/metrics")[1]
        since = samples(text, "hotbed_model_swaps_total")
        return samples(text, "hotbed_model_damaged")["parent"] == 0 and all(
            since[worker] > count for worker, count in swaps.items()
        )

    wait_for(is_mended, "each worker has the files that were written anew")
    wait_for(lambda: all(is_right() for _ in range(8)), "all serve what was written anew")
    problems = samples(server.get("/metrics")[1], "hotbed_model_problems_total")
    assert problems["parent"] > 0
