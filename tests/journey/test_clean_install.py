# SPDX-License-Identifier: Apache-2.0
"""The wheel with its extra `serve`, and nothing else, in a new environment: it scores files and
serves an export.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotbed as hb

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(os.environ.get("HOTBED_WHEELS", ROOT / "build/wheel"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the new environment has its programs."""
    wheels = sorted(WHEELS.glob("hotbed-*.whl"))
    assert wheels, f"no wheel in {WHEELS}: make setup builds it"
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    install = [
        home / "bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        f"hotbed[serve] @ {wheels[-1].as_uri()}",
    ]
    subprocess.run([*install, "-c", ROOT / "constraints.txt"], check=True)
    return home / "bin"


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

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
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

    serve = [
        programs / "hotbed",
        "serve",
        "ranker",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--set",
        "drain_seconds=0",
    ]
    with subprocess.Popen(
        serve, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            port = next(
                found
                for line in process.stderr
                if (found := re.search(r"listening on port (\d+)", line))
            )[1]
            with hb.Client(f"http://127.0.0.1:{port}") as client:
                asked = {"user": rows["user"].to_numpy(), "item": rows["item"].to_pylist()}
                assert np.abs(client.predict("ranker", asked) - expected).max() < 1e-6
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0
