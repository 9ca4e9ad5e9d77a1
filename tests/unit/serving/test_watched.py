# SPDX-License-Identifier: Apache-2.0
"""What a server tells of itself: late rows, caches, freshness."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton

import hotbed as hb
from hotbed.errors import StoreError
from hotbed.persist.publish import Follower
from hotbed.serving.server.meters import RequestCounts, combine_statuses
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.traffic import ShadowCounts
from hotbed.watch.server import PageSettings, page_server

from .conftest import Running, Trainer, draw, wait_for
from .test_grpc import tensors


def got(running: Running, path: str) -> str:
    with urlopen(f"http://{running.http}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def sample(text: str, name: str) -> float:
    (line,) = [one for one in text.splitlines() if one.startswith(f"hotbed_{name}{{")]
    return float(line.split()[-1])


def cached(exported: Path, **cache: Any) -> tuple[Running, Any]:
    """A server whose rows come from a store through a cache, and the version in that store."""
    store = hb.ParameterServer()
    version = store.load("m", exported)
    models = Models(hb.ParameterServer(), reach=lambda url: store, cache={"preload": 0.0, **cache})
    models.add("m", "grpc://store:1")
    return Running(exported, models=models), version


def late(wanted: Any, seconds: float | None = None) -> Any:
    raise StoreError("the store does not answer")


def test_late_rows_are_counted_in_the_answer_and_only_there(exported: Path) -> None:
    running, version = cached(exported)
    columns = draw(20, 4)
    with (
        hb.Client(f"http://{running.http}") as client,
        triton.InferenceServerClient(f"127.0.0.1:{running.server.grpc_port}") as remote,
    ):
        right = client.ask("m", columns)
        assert right.late == 0
        assert not remote.infer("m", tensors(columns)).get_response().parameters
        find, other = version.find, draw(20, 5)
        object.__setattr__(version, "find", late)
        found = client.ask("m", other)
        assert found.late > 0
        told = (
            remote.infer("m", tensors(draw(20, 6)))
            .get_response()
            .parameters["late_rows"]
            .int64_param
        )
        assert told > 0
        assert client.ask("m", columns).late == 0  # what the cache holds is not late
        object.__setattr__(version, "find", find)
        wait_for(lambda: client.ask("m", other).late == 0, "rows come again")
        assert (
            np.abs(
                client.ask("m", columns).outputs["prediction"] - right.outputs["prediction"]
            ).max()
            < 1e-6
        )
    running.close()


def test_metrics_and_status_have_the_cache(exported: Path) -> None:
    running, version = cached(exported)
    with hb.Client(f"http://{running.http}") as client:
        client.predict("m", draw(20, 4))
        client.predict("m", draw(20, 4))
        object.__setattr__(version, "find", late)
        lost = client.ask("m", draw(20, 5)).late
    text = got(running, "/metrics")
    cache = json.loads(got(running, "/status"))["models"][0]["cache"]
    assert sample(text, "cache_late_total") == cache["late"] == lost > 0
    assert sample(text, "cache_hits_total") == cache["hits"] > 0
    assert sample(text, "cache_misses_total") == cache["misses"] > 0
    assert sample(text, "cache_hit_rate") == pytest.approx(
        cache["hits"] / (cache["hits"] + cache["misses"])
    )
    assert sample(text, "cache_bytes") == cache["bytes"] > 0
    assert sample(text, "cache_rows") == cache["rows"] > 0
    assert sample(text, "cache_fetches_total") == cache["fetches"] == 2
    assert sample(text, "cache_fetch_seconds_total") == cache["fetch_seconds"] > 0
    running.close()


def test_a_server_without_a_cache_has_no_metrics_of_one(running: Running) -> None:
    assert "hotbed_cache_hits_total{" not in got(running, "/metrics")
    assert json.loads(got(running, "/status"))["models"][0]["cache"] is None


def told(**changes: Any) -> dict[str, Any]:
    """By one process, of one model."""
    found = {
        "name": "m",
        "version": "7",
        "state": "READY",
        "reason": "",
        "digest": "d",
        "published": 50.0,
        "learned": 40.0,
        "since": 60.0,
        "cache": None,
        "log": None,
        "routes": {
            "revision": None,
            "problem": "",
            "traffic": [],
            "unsplit": 1,
            "shadow": asdict(ShadowCounts()),
        },
        "swaps": 2,
        "problems": 0,
        "rows": 0,
        "batches": 0,
        "now": 70.0,
        "waiting": 0,
        "seconds": [],
    }
    return {**found, **asdict(RequestCounts()), **changes}


def test_the_statuses_of_several_processes_become_one() -> None:
    cache = {
        "hits": 3,
        "misses": 1,
        "late": 0,
        "rows": 5,
        "bytes": 100,
        "fetches": 1,
        "fetch_seconds": 0.5,
    }
    first = told(
        rows=10, batches=1, waiting=4, answered=4, last_scored=8.0, seconds=[0.1] * 98, cache=cache
    )
    second = told(
        rows=20,
        batches=2,
        since=61.0,
        answered=5,
        last_scored=9.0,
        seconds=[0.3, 0.2],
        swaps=0,
        cache=cache,
        reason="a gap",
    )
    parent = told(problems=3, since=59.0)
    (found,) = combine_statuses([[first], [second], [parent]])
    assert (
        found["rows"],
        found["batches"],
        found["waiting"],
        found["problems"],
        found["swaps"],
    ) == (30, 3, 4, 3, 2)
    assert (found["answered"], found["last_scored"]) == (9, 9.0)
    assert (found["p50"], found["p99"], found["since"], found["reason"]) == (
        0.1,
        0.3,
        61.0,
        "a gap",
    )
    assert found["cache"] == {name: 2 * value for name, value in cache.items()}
    assert found["routes"]["unsplit"] == 3
    assert "seconds" not in found
    newer = told(version="8", digest="e", published=55.0)
    assert combine_statuses([[newer], [first]])[0]["version"] == "7"
    gone = told(version="", digest="", state="UNAVAILABLE", published=None, since=None)
    (found,) = combine_statuses([[newer], [gone]])
    assert (found["state"], found["version"], found["p50"], found["cache"]) == (
        "UNAVAILABLE",
        "",
        None,
        None,
    )
    assert [
        one["name"]
        for one in combine_statuses([[told(), told(name="n")], [told(), told(name="n")]])
    ] == ["m", "n"]


def test_freshness_counts_from_the_newest_event_to_served(trainer: Trainer) -> None:
    running = Running(trainer.folder / "export")
    running.models.follow("m", lambda: Follower(trainer.folder / "published"), poll_seconds=0.05)
    version = trainer.publish(0)
    wait_for(
        lambda: running.models.named("m").current.version.version == version,
        "the version is served",
    )
    current = running.models.named("m").current
    learned = current.since - 90  # the events of the test have no time
    object.__setattr__(current.version, "learned", learned)
    found, text = json.loads(got(running, "/status"))["models"][0], got(running, "/metrics")
    assert (found["version"], found["learned"]) == (str(version), learned)
    assert found["published"] <= found["since"]
    assert sample(text, "model_freshness_seconds") == pytest.approx(90)
    assert 0 <= sample(text, "model_delay_seconds") < 30
    assert 0 <= sample(text, "model_age_seconds") < 60
    object.__setattr__(current.version, "learned", None)
    assert "hotbed_model_freshness_seconds{" not in got(running, "/metrics")
    running.close()


def test_page_of_a_run_shows_what_a_server_answers_and_names_one_that_is_away(
    exported: Path, tmp_path: Path
) -> None:
    running = Running(exported)
    url = f"http://{running.http}"
    with hb.Client(url) as client:
        client.predict("m", draw(20, 1))
    (tmp_path / "job.json").write_text("{}")
    page = page_server(str(tmp_path), [url, "http://127.0.0.1:9"], PageSettings())
    page.start()
    with urlopen(page.address) as answer:
        text = answer.read().decode()
    with urlopen(f"{page.address}status") as answer:
        seen = json.loads(answer.read())["servers"]
    (model,) = seen[url]["value"]["models"]
    memory = seen[url]["value"]["memory"]
    assert 0 < memory["used_bytes"] < memory["limit_bytes"]
    assert f"memory of {memory['of']} at {url}" in text
    status = json.loads(got(running, "/status"))["models"][0]
    assert model["version"] == status["version"]
    assert model["candidates"] == 20
    assert model["roles"][0]["version"] == int(status["version"])
    assert sum(role["requests"] for role in model["roles"]) == 1
    assert f"m at {url}: READY, no rule: the newest version answers" in text
    assert "http://127.0.0.1:9: 127.0.0.1:9: the server does not answer" in text
    running.close()
    wait_for(
        lambda: "does not answer" in page.watched.seen().servers[url].problem,
        "the page says that the server is away",
    )
    look = page.watched.seen().servers[url]
    assert look.value is not None  # what it answered last is shown with the time
    page.close()


@pytest.mark.slow
def test_the_page_plots_latency_age_and_hit_rate(
    exported: Path, browsed: Callable[[str, int], str]
) -> None:
    running, version = cached(exported)
    object.__setattr__(version, "learned", running.models.named("m").current.since - 90)
    stop = threading.Event()

    def ask() -> None:
        with hb.Client(f"http://{running.http}") as client:
            for seed in range(10**9):
                if stop.is_set():
                    return
                client.predict("m", draw(20, seed % 40))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        page = browsed(f"http://{running.http}/", 40_000)
    finally:
        stop.set()
        thread.join()
    figures = {
        re.search(r"<figcaption>(.*?)</figcaption>", one).group(1): one
        for one in page.split("<figure>")[1:]
    }
    assert set(figures) == {
        "latency of the last requests",
        "candidates a second",
        "age of what is served",
        "rows that were in the cache",
    }
    for name, figure in figures.items():
        assert len(re.findall(r"[\d.]+,[\d.]+", figure)) > 1, name  # points of lines
    for text in (
        "from its newest event to served",
        "of rows were in the cache",
        "a fetch of missing rows",
        "90.0 s",
    ):
        assert text in page
    running.close()
