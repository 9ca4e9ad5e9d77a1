# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment, start again: the bits of a run that was never killed. `make soak` has many
more.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver

from hotbed.persist.container.format import open_checkpoint

pytestmark = pytest.mark.slow

SEED = 20260601


@pytest.fixture(scope="module")
def unbroken(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run ends with that nobody kills."""
    root = tmp_path_factory.mktemp("unbroken")
    driver.write_events(root / "events", SEED)
    answer: dict[str, Any] = lives(root)
    assert answer["steps"] == 94
    assert all(evicted["evicted_expired"] for evicted in answer["evicted"].values())
    return answer


@pytest.fixture(scope="module")
def unbroken_auto(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As `unbroken`, of a plain torch model that `hb.auto` converted."""
    root = tmp_path_factory.mktemp("unbroken_auto")
    driver.write_events(root / "events", SEED)
    answer: dict[str, Any] = lives(root, auto=True)
    assert answer["steps"] == 94
    return answer


# One kill in each phase of a run, each in a life that resumes after the one before.
KILLS = [
    {"at": "reading", "number": 2},
    {"at": "table", "number": 3},  # in the first checkpoint, a full
    {"at": "rename", "number": 1},  # complete, but not visible
    {"at": "mapping", "number": 33, "after": True},
    {"at": "eviction", "number": 3},
    {"at": "replace", "number": 1},  # visible, but not current
    {"at": "dense", "number": 11, "after": True},  # dense parameters have moved, rows have not
    {"at": "update", "number": 15},
    {"at": "committed", "number": 1},  # durable, but the source has not heard of it
]


def test_a_run_that_is_killed_in_each_phase_ends_with_the_bits_of_one_that_was_not(
    unbroken: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED)
    for kill in KILLS:
        assert lives(tmp_path, kill=kill)["killed"] == 9, kill
    answer = lives(tmp_path)
    assert answer["resumed"] > 0
    assert answer["steps"] == unbroken["steps"]
    assert answer["digest"] == unbroken["digest"]
    assert answer["evicted"] == unbroken["evicted"]  # the digest leaves the reasons out
    assert answer["chain"] == unbroken["chain"]  # no life begins with a full of its own
    assert len(answer["chain"]) > 1


def test_a_run_by_grains_that_is_killed_between_two_of_them_ends_with_the_same_bits(
    lives: Any, tmp_path: Path
) -> None:
    """Killed after the second of the four grains of a step, and once a save is safe; then the
    second of two processes and the first of three. A busy machine makes one save of several.
    """
    config = {"grains": 4, "checkpoint": {"every_steps": 6}}
    kills = {
        "whole": [],
        "killed": [("grain", 4 * 8 + 2, 1, 0), ("committed", 1, 1, 0)],
        "several": [("exchange", 12, 2, 1), ("committed", 1, 3, 0)],
    }
    answers = {}
    for name, each in kills.items():
        root = tmp_path / name
        driver.write_events(root / "events", SEED, rows=480)
        for at, number, ranks, rank in each:
            kill = {"at": at, "number": number, "after": True}
            life = lives(root, kill=kill, ranks=ranks, kill_rank=rank, **config)
            assert life["killed"] == 9
        ranks = 2 if name == "several" else 1
        answers[name] = lives(root, ranks=ranks, **config)
    whole = answers["whole"]
    assert answers["killed"]["resumed"] > 0
    assert {**answers["killed"], "resumed": 0} == whole
    several = answers["several"]
    assert several["resumed"] > 0
    assert several["digest"] == whole["digest"]
    assert several["rows"] == whole["rows"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "at, number, after",
    [
        ("reading", 2, False),
        ("mapping", 33, True),
        ("dense", 61, True),
        ("eviction", 9, False),
        ("table", 3, False),
        ("rename", 1, False),
        ("rename", 1, True),  # the first checkpoint is complete, and CURRENT is not there yet
        ("table", 9, False),  # in a delta
        ("rename", 2, False),
        ("replace", 2, False),
        ("committed", 2, False),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    at: str, number: int, after: bool, unbroken: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED)
    assert lives(tmp_path, kill={"at": at, "number": number, "after": after})["killed"] == 9
    answer = lives(tmp_path)
    assert answer["steps"] == unbroken["steps"]
    assert answer["digest"] == unbroken["digest"]
    assert answer["evicted"] == unbroken["evicted"]  # the digest leaves the reasons out
    assert answer["chain"] == unbroken["chain"]  # no life begins with a full of its own
    assert len(answer["chain"]) > 1


def test_a_killed_run_whose_waiting_ids_fill_their_memory_ends_with_the_same_bits(
    lives: Any, tmp_path: Path
) -> None:
    """Killed while a full and a delta are written that hold a sketch."""
    answers = []
    for name, kills in (("whole", ()), ("killed", (("table", 9), ("rename", 2)))):
        root = tmp_path / name
        driver.write_events(root / "events", SEED, 2000, change=driver.crowded)
        config = {"admission_bytes": 1 << 16}
        for at, number in kills:
            assert lives(root, **config, kill={"at": at, "number": number})["killed"] == 9
        answers.append(lives(root, **config))
        links = open_checkpoint(root / "state").links
        assert all(link.entry("item").sketch for link in links)
    whole, killed = answers
    assert killed["resumed"] > 0
    assert killed["digest"] == whole["digest"]


@pytest.mark.parametrize(
    "at, number, after",
    [
        pytest.param("mapping", 61, True, marks=pytest.mark.soak),
        pytest.param("dense", 75, True, marks=pytest.mark.soak),
        ("rename", 3, False),  # complete, but not visible
    ],
)
def test_a_killed_run_of_a_converted_model_ends_with_the_bits_of_one_that_was_not(
    at: str, number: int, after: bool, unbroken_auto: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED)
    kill = {"at": at, "number": number, "after": after}
    assert lives(tmp_path, auto=True, kill=kill)["killed"] == 9
    answer = lives(tmp_path, auto=True)
    assert answer["resumed"] > 0
    assert answer["digest"] == unbroken_auto["digest"]


@pytest.mark.parametrize(
    "config", [{}, pytest.param({"ram_rows": 200}, marks=pytest.mark.soak)], ids=["ram", "ssd"]
)
def test_a_killed_run_keeps_the_histories_of_one_that_was_not(
    config: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    answers = []
    config = {"checkpoint": {"every_steps": 10}, **config}
    kills = [{"at": "table", "number": 13}, {"at": "update", "number": 15}]
    for name in ("whole", "killed"):
        root = tmp_path / name
        driver.write_events(root / "events", SEED, rows=1500)
        for kill in kills if name == "killed" else ():
            life = lives(root, histories=True, kill=kill, **config)
            assert life["killed"] == 9
        answers.append(lives(root, histories=True, **config))
    assert answers[1]["digest"] == answers[0]["digest"]
    assert answers[0]["rows"]["before.older"] > 0
    assert answers[0]["evicted"]["likes.newest"]["evicted_expired"] > 0
    assert len(answers[1]["chain"]) > 1


def test_other_threads_and_a_stop_on_the_way_change_nothing(
    unbroken: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED)
    assert lives(tmp_path, max_steps=37)["steps"] == 37
    assert lives(tmp_path, kill={"at": "mapping", "number": 30}, threads=2)["killed"] == 9
    assert lives(tmp_path, threads=3)["digest"] == unbroken["digest"]


def test_sources_one_after_another_resume_at_their_border(lives: Any, tmp_path: Path) -> None:
    """A csv file of 400 rows, then 800 rows of Parquet; killed in each of them."""
    answers = []
    for name, kills in (("whole", ()), ("killed", (12, 16))):
        events = tmp_path / name / "events"
        driver.write_events(events, SEED, rows=800, files=2)
        driver.append_events(events, SEED + 1, rows=400, bursts=1, pause=0.0)
        config = {"source": "concat", "checkpoint": {"every_steps": 5}}
        for number in kills:
            life = lives(tmp_path / name, **config, kill={"at": "update", "number": number})
            assert life["killed"] == 9
        answers.append(lives(tmp_path / name, **config))
    whole, killed = answers
    assert whole["samples"] == 1200
    assert killed["resumed"] > 12  # after the csv file
    assert killed["digest"] == whole["digest"]


def test_what_is_compared_is_everything_that_was_learned(
    unbroken: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED + 1)
    assert lives(tmp_path)["digest"] != unbroken["digest"]


def test_a_stream_that_is_over_is_over(lives: Any, tmp_path: Path) -> None:
    driver.write_events(tmp_path / "events", SEED, rows=200)
    first = lives(tmp_path)
    again = lives(tmp_path)
    assert again["resumed"] == first["steps"] == again["steps"]
    assert again["digest"] == first["digest"]


def test_a_followed_directory_goes_on_with_what_the_clock_decided(
    lives: Any, tmp_path: Path
) -> None:
    """Files arrive while it trains, idle times end batches, the wall clock evicts, two kills;
    against an unbroken run that finds the same decisions on record.
    """
    root, whole = tmp_path / "killed", tmp_path / "whole"
    config = {"source": "follow", "follow": {"pattern": "*.parquet"}, "rows": 1200, **driver.CLOCK}
    arriving = threading.Thread(
        target=driver.write_events, args=(root / "events", SEED, 1200, 4, 0.4)
    )
    (root / "events").mkdir(parents=True)
    arriving.start()
    for number in (9, 14):
        assert lives(root, kill={"at": "update", "number": number}, **config)["killed"] == 9
    answer = lives(root, **config)
    arriving.join()
    assert answer["samples"] == 1200
    shutil.copytree(root / "events", whole / "events")
    assert driver.decided_alike(lives, root, whole, config)["digest"] == answer["digest"]


def test_a_file_that_grows_goes_on_with_the_lines_that_were_decided(
    lives: Any, tmp_path: Path
) -> None:
    """Which lines are whole is decided once, also by a run that is killed around the decision."""
    root, whole = tmp_path / "killed", tmp_path / "whole"
    follow = {"pattern": "*.csv", "grows": True}
    config = {"source": "follow", "follow": follow, "rows": 1200, **driver.CLOCK}
    (root / "events").mkdir(parents=True)
    arriving = threading.Thread(
        target=driver.append_events, args=(root / "events", SEED, 1200, 40, 0.15)
    )
    arriving.start()
    for kill in (
        {"at": "looking", "number": 3},
        {"at": "journal", "number": 2},
        {"at": "journal", "number": 3, "after": True},
        {"at": "update", "number": 8},
    ):
        assert lives(root, kill=kill, **config)["killed"] == 9
    answer = lives(root, **config)
    arriving.join()
    assert answer["samples"] == 1200
    shutil.copytree(root / "events", whole / "events")
    assert driver.decided_alike(lives, root, whole, config)["digest"] == answer["digest"]


def test_a_file_that_is_replaced_is_read_once_whatever_is_killed(
    lives: Any, tmp_path: Path
) -> None:
    config = {"source": "follow", "follow": {"pattern": "*.parquet", "replaced": "read"}}
    answers = []
    for root, kills in (
        (tmp_path / "whole", ()),
        (tmp_path / "killed", (("journal", 1, True), ("looking", 2, False))),
    ):
        driver.write_events(root / "events", SEED, rows=320, files=1)
        lives(root, rows=320, **config)
        driver.write_events(root / "events", SEED + 1, rows=320, files=1)
        for at, number, after in kills:
            kill = {"at": at, "number": number, "after": after}
            assert lives(root, kill=kill, rows=640, **config)["killed"] == 9, kill
        answers.append(lives(root, rows=640, **config))
    assert [answer["samples"] for answer in answers] == [640, 640]
    assert answers[0]["digest"] == answers[1]["digest"]


@pytest.mark.parametrize(
    "grains", [{}, pytest.param({"grains": 4}, marks=pytest.mark.soak)], ids=["whole", "grains"]
)
def test_a_topic_of_three_skewed_partitions_goes_on_where_it_was(
    grains: dict[str, int], lives: Any, tmp_path: Path
) -> None:
    from hotbed.testing import Broker

    with Broker() as broker:
        broker.create("events", 3)
        source = {"servers": broker.servers, "topic": "events", "block_rows": 150}
        config = {"source": source, "rows": 1200, **driver.CLOCK, **grains}
        arriving = threading.Thread(
            target=driver.produce, args=(broker, "events", driver.events(SEED, 1200).to_pylist(), 7)
        )
        arriving.start()
        assert (
            lives(
                tmp_path / "killed", kill={"at": "mapping", "number": 12, "after": True}, **config
            )["killed"]
            == 9
        )
        assert (
            lives(tmp_path / "killed", kill={"at": "committed", "number": 2}, **config)["killed"]
            == 9
        )
        answer = lives(tmp_path / "killed", **config)
        arriving.join()
        assert answer["samples"] == 1200
        whole = driver.decided_alike(lives, tmp_path / "killed", tmp_path / "whole", config)
        assert whole["digest"] == answer["digest"]


FIT = {"epochs": 4, "dataset": {"shuffle": 500}}


@pytest.fixture(scope="module")
def unbroken_fit(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A fit of four epochs that nobody kills."""
    root = tmp_path_factory.mktemp("unbroken_fit")
    driver.write_events(root / "events", SEED, rows=1000)
    answer: dict[str, Any] = lives(root, **FIT)
    assert answer["steps"] == 4 * 32
    return answer


@pytest.mark.parametrize(
    "kills",
    [
        # inside the third epoch, then in a checkpoint
        [("mapping", 77, True), ("replace", 2, False)],
        pytest.param([("replace", 9, False)], marks=pytest.mark.soak),
        # the last step of the third epoch
        pytest.param([("dense", 96, True)], marks=pytest.mark.soak),
        pytest.param([("committed", 4, False)], marks=pytest.mark.soak),
    ],
)
def test_killed_fit_resumes_inside_an_epoch_to_the_bits_of_one_that_was_not(
    kills: list[Any], unbroken_fit: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    """The order of the shuffle, validations, plateaus, patience, the best weights and the history
    resume as well.
    """
    driver.write_events(tmp_path / "events", SEED, rows=1000)
    for at, number, after in kills:
        kill = {"at": at, "number": number, "after": after}
        assert lives(tmp_path, kill=kill, **FIT)["killed"] == 9
    answer = lives(tmp_path, **FIT)
    assert answer["resumed"] > 0
    assert {**answer, "resumed": 0} == {**unbroken_fit, "resumed": 0}


@pytest.mark.soak  # test_ranks.py kills a fit by grains in each run
def test_killed_fit_by_grains_resumes_inside_an_epoch_to_the_same_bits(
    lives: Any, tmp_path: Path
) -> None:
    """Four ranges of rows with a shuffle buffer each, killed inside a buffer and inside a save."""
    config: dict[str, Any] = {"epochs": 2, "dataset": {"shuffle": 500}, "grains": 4}
    config["checkpoint"] = {"every_steps": 5}
    answers = []
    for name, kills in (("whole", ()), ("killed", (("mapping", 27, True), ("replace", 2, False)))):
        driver.write_events(tmp_path / name / "events", SEED, rows=1000)
        for at, number, after in kills:
            kill = {"at": at, "number": number, "after": after}
            assert lives(tmp_path / name, kill=kill, **config)["killed"] == 9
        answers.append(lives(tmp_path / name, **config))
    whole, killed = answers
    assert whole["steps"] == 2 * 32
    assert 0 < killed["resumed"] < 32
    assert {**killed, "resumed": 0} == {**whole, "resumed": 0}
