# SPDX-License-Identifier: Apache-2.0
"""Wheels with their extras, and nothing else, in new environments: they train, score files and
serve, without a compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotbed as hb

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(os.environ.get("HOTBED_WHEELS", ROOT / "build/wheel"))


VERSIONS = ("3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


def interpreter(version: str) -> str:
    """A Python of a version on this machine, also behind pyenv's shims; "" if there is none."""
    command = ["bash", "-c", f"source scripts/interpreter.sh; interpreter {version}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def wheel_for(version: str) -> Path | None:
    """The wheel that this Python installs: its own, or that of the stable ABI of 3.12."""
    tags = [f"cp{version.replace('.', '')}-cp"]
    if version != "3.11":
        tags.append("cp312-abi3")
    wheels = sorted(path for tag in tags for path in WHEELS.glob(f"hotbed-*-{tag}*.whl"))
    return wheels[-1] if wheels else None


def new_environment(version: str, extras: str, home: Path) -> Path:
    """Install a wheel with extras, and nothing else; return where the programs are."""
    wheel = wheel_for(version)
    assert wheel, f"no wheel in {WHEELS}: make setup or make wheels builds it"
    subprocess.run([interpreter(version), "-m", "venv", home], check=True)
    pip = [home / "bin/python", "-m", "pip", "install", "-q", "--only-binary", ":all:"]
    wanted = f"hotbed[{extras}] @ {wheel.as_uri()}"
    subprocess.run([*pip, wanted, "-c", ROOT / "constraints.txt"], check=True)
    return home / "bin"


def alone(programs: Path) -> dict[str, str]:
    """An environment whose programs are those of the new environment: there is no compiler."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PATH": str(programs), "CC": "/bin/false", "CXX": "/bin/false"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the new environment has its programs."""
    return new_environment(OWN, "serve", tmp_path_factory.mktemp("clean") / "env")


INSTALLED = [version for version in VERSIONS if wheel_for(version) and interpreter(version)]
JOB = """
train: {kind: csv, path: rows.csv}
valid: {kind: csv, path: rows.csv}
schema: {columns: [{kind: label, name: y}, {kind: id, name: user}, {kind: id, name: item}]}
tables: {dim: 4}
model: {kind: deepfm, hidden: [4]}
baselines: false
output: run
"""
TABLE = """
import numpy as np, hotbed as hb
table = hb.Table("user", dim=4)
slots = table.find_or_insert(np.arange(1000))
assert len(table) == 1000 and len(set(slots.tolist())) == 1000
"""


@pytest.mark.parametrize("version", INSTALLED)
def test_a_wheel_trains_and_serves_without_a_compiler(version: str, tmp_path: Path) -> None:
    """It trains where the tests' own Python has torch; others have tables, and serve its export."""
    extras = "serve,train,export" if version == OWN else "serve"
    programs = new_environment(version, extras, tmp_path / "env")
    draw = np.random.default_rng(0)
    rows = [f"{u % 2},{u},{i}" for u, i in draw.integers(0, 50, (400, 2)).tolist()]
    (tmp_path / "rows.csv").write_text("\n".join(["y,user,item", *rows]))
    (tmp_path / "job.yaml").write_text(JOB)

    def run(folder: Path, *command: str) -> None:
        words = [folder / command[0], *command[1:]]
        done = subprocess.run(
            words, cwd=tmp_path, env=alone(folder), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    run(programs, "python", "-c", TABLE)
    trainer = programs if version == OWN else Path(sys.executable).parent
    run(trainer, "python", "-m", "hotbed.cli", "train", "job.yaml")
    run(trainer, "python", "-m", "hotbed.cli", "export", "job.yaml", "--out", "ranker")
    run(trainer, "python", "-m", "hotbed.cli", "predict", "job.yaml", "--out", "trained.parquet")
    run(programs, "hotbed", "predict", "ranker", "rows.csv")
    scores = pq.read_table(tmp_path / "predictions.parquet")["prediction"].to_numpy()
    trained = pq.read_table(tmp_path / "trained.parquet")["y"].to_numpy()
    assert np.abs(scores - trained).max() < 1e-6
    with served(programs, "ranker", tmp_path) as client:
        user, item = np.array([row.split(",")[1:] for row in rows], np.int64).T
        answer = client.predict("ranker", {"user": user, "item": item})
        assert np.abs(answer - trained).max() < 1e-6


@contextmanager
def served(programs: Path, model: str, folder: Path) -> Iterator[hb.Client]:
    """Serve a model in a process of the new environment, which ends well."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--set", "drain_seconds=0"]
    command = [programs / "hotbed", "serve", model, *ports]
    with subprocess.Popen(
        command, cwd=folder, env=alone(programs), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            lines = (re.search(r"listening on port (\d+)", line) for line in process.stderr)
            port = next(line for line in lines if line)[1]
            with hb.Client(f"http://127.0.0.1:{port}") as client:
                yield client
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


def test_without_torch_files_are_scored_and_requests_answered(
    programs: Path, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    rows = pa.table(
        {
            "user": draw.integers(0, 50, 400),
            "item": [f"i{one}" for one in draw.integers(0, 90, 400)],
            "label": draw.integers(0, 2, 400),
        }
    )
    schema = hb.Schema([hb.Label("label"), hb.Id("user"), hb.Id("item")])
    model = hb.RecModel(
        hb.models.DCNv2(schema, hb.make_tables(schema, dim=4)), "bce", hb.Adam(lr=0.01)
    )
    data = hb.Dataset(hb.sources.Memory(rows), schema, 64)
    model.fit(data, progress=False)
    expected = model.predict(data)
    model.export(tmp_path / "ranker")
    pq.write_table(rows.drop_columns(["label"]), tmp_path / "rows.parquet")

    environment = alone(programs)
    heavy = "import importlib.util as u; print([n for n in ('torch', 'onnx', 'fastapi', 'matplotlib') if u.find_spec(n)])"
    told = subprocess.run(
        [programs / "python", "-c", heavy],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "[]"
    predict = [programs / "hotbed", "predict", "ranker", "rows.parquet"]
    subprocess.run(predict, cwd=tmp_path, env=environment, check=True)
    found = pq.read_table(tmp_path / "predictions.parquet")["prediction"].to_numpy()
    assert np.abs(found - expected).max() < 1e-6

    with served(programs, "ranker", tmp_path) as client:
        asked = {"user": rows["user"].to_numpy(), "item": rows["item"].to_pylist()}
        assert np.abs(client.predict("ranker", asked) - expected).max() < 1e-6
