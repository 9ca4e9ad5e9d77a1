# SPDX-License-Identifier: Apache-2.0
"""Engines: threads and Ray give the same results in the same order. Ray starts once."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotbed.errors import ConfigError, DecodeError
from hotbed.prepare import Engine, Local, Ray

ray = pytest.importorskip("ray", reason="ray absent")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")

ENGINES = ["local-1", "local-2", "local-3", "ray-1", "ray-2", "ray-3"]


@pytest.fixture(scope="module")
def _ray_of_two_processors() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="r")  # the paths of Ray's sockets must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be written into the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            _temp_dir=folder,
            log_to_driver=False,
        )
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    kind, workers = request.param.split("-")
    if kind == "local":
        return Local(int(workers))
    request.getfixturevalue("_ray_of_two_processors")
    return Ray(int(workers))


class Square:
    """A task with state, which fails for the numbers in `bad`."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def __call__(self, number: int) -> dict[str, Any]:
        if number in self.bad:
            raise DecodeError(f"number {number}", file="a.csv", row=number, column="x")
        return {"square": number * number}


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_engine_gives_results_in_order_and_counts_them(engine: Engine) -> None:
    done: list[int] = []
    squares = list(engine.map(Square(), range(20), done.append))
    assert squares == [{"square": number * number} for number in range(20)]
    assert done == list(range(1, 21))
    assert list(engine.map(Square(), [])) == []


@pytest.mark.parametrize("engine", ["local-2", "ray-2"], indirect=True)
def test_tasks_see_relative_paths_of_the_process_that_prepares(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert list(engine.map(os.path.abspath, ["a.csv"])) == [str(tmp_path / name / "a.csv")]


@pytest.mark.parametrize("engine", ["ray-2"], indirect=True)
def test_folder_that_a_machine_does_not_see_is_an_error(engine: Engine, tmp_path: Path) -> None:
    engine.check_folder(tmp_path)
    with pytest.raises(ConfigError, match="does not see the folder"):
        engine.check_folder(tmp_path / "absent")


class DiesOnce:
    """A task whose process is killed when it runs for the first time."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __call__(self, number: int) -> int:
        if number == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number


@pytest.mark.parametrize("engine", ["ray-2"], indirect=True)
def test_task_whose_process_is_lost_runs_again(engine: Engine, tmp_path: Path) -> None:
    assert list(engine.map(DiesOnce(tmp_path / "died"), range(3))) == [0, 1, 2]
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("engine", ENGINES[1::3], indirect=True)
def test_engine_raises_the_first_error_as_the_task_raised_it(engine: Engine) -> None:
    results = engine.map(Square(3, 5), range(7))
    assert [next(results)["square"] for _ in range(3)] == [0, 1, 4]
    with pytest.raises(DecodeError, match="number 3") as raised:
        list(results)
    assert (raised.value.file, raised.value.row, raised.value.column) == ("a.csv", 3, "x")


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_engine_says_how_many_tasks_run_at_a_time(engine: Engine, request: Any) -> None:
    assert engine.num_workers == int(request.node.callspec.params["engine"][-1])
    with pytest.raises(ConfigError, match="workers"):
        type(engine)(0)
