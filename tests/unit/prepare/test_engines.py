# SPDX-License-Identifier: Apache-2.0
"""Engines: threads and Ray give the same results in the same order. Ray starts once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from hotbed.errors import ConfigError, DecodeError
from hotbed.prepare import Engine, Local, Preparation, Ray, prepare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")

ENGINES = ["local-1", "local-2", "local-3", "ray-2"]


@pytest.fixture(scope="module")
def _ray_of_two_processors() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="ray absent")
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


@pytest.mark.parametrize("engine", ["local-2", "ray-2"], indirect=True)
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


# --- whole preparations ---------------------------------------------------------------------------


def write_clicks(folder: Path) -> None:
    """Write three files of clicks, two of them CSV and one Parquet with several row groups."""
    draw = np.random.default_rng(5)
    folder.mkdir()
    for number in range(3):
        rows = 900 + number
        words = draw.choice(
            ["red", "green", "blue", "rare é", None], rows, p=[0.4, 0.3, 0.1, 0.1, 0.1]
        )
        prices = np.round(draw.lognormal(1, 1, rows), 2)
        table = pa.table(
            {
                "clicked": draw.integers(0, 2, rows),
                "time": 1_600_000_000 + draw.integers(0, 5000, rows),
                "user": draw.integers(0, 60, rows),
                "item": np.minimum(draw.zipf(1.4, rows), 80),
                "shop": draw.integers(0, 9, rows),
                "color": pa.array(words.tolist()),
                "price": pa.array(prices, mask=draw.random(rows) < 0.1),
            }
        )
        if number == 1:
            pq.write_table(table, folder / "b.parquet", row_group_size=200)
        else:
            pacsv.write_csv(table, folder / f"{number}.csv")


FILL = {"kind": "fill_missing", "value": 0.0}


def clicks_job(folder: Path, output: Path, label: str = "clicked") -> dict[str, Any]:
    rate = {"kind": "target_encode", "label": label}
    by_user = {"by": "user", "time": "time"}
    return {
        "source": {
            "kind": "concat",
            "sources": [
                {"kind": "csv", "path": str(folder / "*.csv")},
                {"kind": "parquet", "path": str(folder / "b.parquet")},
            ],
        },
        "schema": {
            "columns": [
                {"kind": "label", "name": label},
                {"kind": "time", "name": "time", "unit": "s"},
                {"kind": "id", "name": "user", "transforms": [{"kind": "map", "joint": "ids"}]},
                {"kind": "id", "name": "item", "transforms": [{"kind": "map", "joint": "ids"}]},
                {"kind": "id", "name": "color", "transforms": [{"kind": "map", "min_count": 3}]},
                {
                    "kind": "dense",
                    "name": "price",
                    "transforms": [
                        {"kind": "fill_missing", "statistic": "median"},
                        {"kind": "log"},
                        {"kind": "normalize"},
                    ],
                },
                {"kind": "dense", "name": "color_rate", "column": "color", "transforms": [rate]},
                {
                    "kind": "dense",
                    "name": "item_rate",
                    "column": "item",
                    "transforms": [rate | {"ordered_by": "time"}],
                },
                {
                    "kind": "dense",
                    "name": "user_price",
                    "column": "user",
                    "transforms": [{"kind": "join_groupby", "column": "price"}, FILL],
                },
                {"kind": "dense", "name": "since_last", "transforms": [FILL]},
                {"kind": "id", "name": "session"},
                {"kind": "id", "name": "history", "pooling": "mean"},
            ]
        },
        "derive": [
            {"kind": "time_difference", "name": "since_last", **by_user},
            {"kind": "session", "name": "session", "gap_seconds": 300, **by_user},
            {"kind": "previous", "name": "history", "column": "item", "length": 4, **by_user},
        ],
        "split": {"kind": "by_time", "valid": 0.2},
        "down_sample": {"label": "clicked", "keep": 0.5, "weight": "weight"},
        "memory": "1GB",
        "output": str(output),
    }


def negatives_job(folder: Path, output: Path) -> dict[str, Any]:
    spec = clicks_job(folder, output, "bought")
    spec["negatives"] = {
        "user": "user",
        "item": "item",
        "per_positive": 2,
        "draw": "popularity",
        "item_columns": ["shop"],
    }
    spec["schema"]["columns"].append({"kind": "id", "name": "shop"})
    spec["split"] = {"kind": "by_group", "column": "user", "valid": 0.2}
    del spec["down_sample"]
    return spec


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder, where the folder's own name is left out."""
    contents: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            contents[name] = path.read_bytes().replace(str(folder).encode(), b"OUTPUT")
    return contents


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks") / "raw"
    write_clicks(folder)
    return folder


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def files_of_one(job: Any, clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one worker writes for a job."""
    folder = tmp_path_factory.mktemp("one") / "prepared"
    prepare(Preparation.from_json(job(clicks, folder)), Local(1))
    return files_of(folder)


@pytest.mark.parametrize(
    ("engine", "job"),
    [
        ("local-2", clicks_job),
        ("ray-2", clicks_job),
        ("local-2", negatives_job),
        pytest.param("ray-2", negatives_job, marks=pytest.mark.soak),
    ],
    indirect=True,
)
def test_engines_and_workers_write_equal_files(
    engine: Engine, job: Any, files_of_one: dict[str, bytes], clicks: Path, tmp_path: Path
) -> None:
    many = job(clicks, tmp_path / "many")
    # the files do not depend on the number of buckets either
    many["memory"] = "1MB"
    prepare(Preparation.from_json(many), engine)
    found = files_of(tmp_path / "many")
    expected = dict(files_of_one)
    workflows = [json.loads(files.pop("workflow.json")) for files in (found, expected)]
    for workflow in workflows:
        del workflow["digest"]  # output and memory differ
        workflow["prepare"]["memory"] = ""
    assert workflows[0] == workflows[1]
    assert found == expected
