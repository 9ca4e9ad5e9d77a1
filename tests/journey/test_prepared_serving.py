# SPDX-License-Identifier: Apache-2.0
"""From raw files to a server: what a server computes of raw rows is what was prepared of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tritonclient.http as triton
import yaml

import hotbed as hb
from hotbed.job.run import export, train
from hotbed.serving.request import RequestEncoder

# the stock client's sockets
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
ROWS = 3000
PREPARE = """
source: {{kind: csv, path: {folder}/raw.csv}}
schema:
  columns:
    - {{kind: label, name: bought}}
    - {{kind: time, name: at}}
    - {{kind: id, name: user, transforms: [{{kind: map, joint: people, min_count: 2}}]}}
    - {{kind: id, name: friend, table: user, transforms: [{{kind: map, joint: people, min_count: 2}}]}}
    - {{kind: id, name: shop, transforms: [{{kind: map, max_size: 30}}]}}
    - {{kind: dense, name: shop_rate, column: shop, transforms: [{{kind: target_encode, label: bought}}]}}
    - kind: dense
      name: pair_rate
      column: shop
      transforms: [{{kind: cross, with: [user]}}, {{kind: target_encode, label: bought, ordered_by: at, smooth: 3}}, {{kind: normalize}}]
    - kind: dense
      name: shop_price
      column: shop
      transforms: [{{kind: join_groupby, column: price, statistic: std}}, {{kind: fill_missing, value: 0}}, {{kind: log}}]
    - {{kind: dense, name: visits, column: user, transforms: [{{kind: join_groupby, column: price, statistic: count}}]}}
    - {{kind: dense, name: total, transforms: [{{kind: expression, sql: price * count}}, {{kind: normalize}}]}}
    - {{kind: dense, name: gap, transforms: [{{kind: fill_missing, value: 0}}, {{kind: log}}]}}
derive:
  - {{kind: time_difference, name: gap, by: user, time: at}}
split: {{kind: by_time, valid: 0.2}}
output: {folder}/prepared
"""
TRAIN = """
schema: {{prepared: {folder}/prepared}}
train: {{kind: prepared, path: {folder}/prepared}}
valid: {{kind: prepared, path: {folder}/prepared, part: valid}}
model: dnn
tables: {{dim: 4}}
metrics: [auc]
fit: {{batch_size: 256}}
output: {folder}/run
"""


def raw_rows() -> pl.DataFrame:
    """Rows in the order of time; later ones have users and shops that earlier ones do not have."""
    draw = np.random.default_rng(0)
    newest = np.arange(ROWS) // 15
    return pl.DataFrame(
        {
            "user": draw.integers(0, 100 + newest),
            "friend": draw.integers(0, 250, ROWS),
            "shop": [f"shop {number}" for number in draw.integers(0, 40 + newest // 2)],
            "price": draw.random(ROWS).round(3) * 50,
            "count": draw.integers(1, 5, ROWS),
            "at": 1_600_000_000 + np.arange(ROWS) * 60,
            "bought": draw.integers(0, 2, ROWS),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of raw rows, of what was prepared of them, and of a trained and exported model."""
    folder = tmp_path_factory.mktemp("prepared")
    rows = raw_rows()
    rows.with_columns(pl.col("shop").replace("shop 3", None)).write_csv(folder / "raw.csv")
    preparation = hb.prepare.Preparation.from_json(yaml.safe_load(PREPARE.format(folder=folder)))
    hb.prepare.prepare(preparation)
    (folder / "train.yaml").write_text(TRAIN.format(folder=folder))
    job = hb.Job.read(folder / "train.yaml")
    train(job)
    export(job)
    return folder


@pytest.fixture(scope="module")
def valid(folder: Path) -> tuple[dict[str, Any], Any]:
    """Raw columns of the rows held back, as a client has them, and their prepared batch."""
    rows = pl.read_csv(folder / "raw.csv").sort("at")
    gaps = pl.col("at").diff().over("user").cast(pl.Float64)
    rows = rows.with_columns(gap=gaps)
    prepared = hb.sources.Prepared(str(folder / "prepared"), "valid")
    held_back = rows.tail(prepared.num_rows())
    schema = hb.prepare.Workflow(folder / "prepared").schema
    (batch,) = hb.Dataset(prepared, schema, ROWS)
    columns = held_back.drop("at", "bought").to_dict(as_series=False)
    return columns, batch


def test_served_encodings_are_the_prepared_ones(folder: Path, valid: Any) -> None:
    columns, batch = valid
    session = hb.InferenceSession(folder / "run" / "export")
    request = RequestEncoder(session.model.schema)(columns)
    assert set(request.ids) == set(batch.ids)
    assert set(request.dense) == set(batch.dense)
    for name, ids in batch.ids.items():
        served = request.ids[name]
        np.testing.assert_array_equal(getattr(served, "values", served), ids.values, name)
    for name, values in batch.dense.items():
        np.testing.assert_array_equal(request.dense[name], values, name)
    assert (request.ids["user"].values == 0).any()
    assert (request.ids["user"].values > 0).any()


def test_requests_name_what_the_client_computes(folder: Path) -> None:
    model = hb.InferenceSession(folder / "run" / "export").model
    (text,) = model.schema.derived.values()
    assert list(model.schema.derived) == ["gap"]
    assert text.startswith("seconds since the latest row before of the same 'user'")


def test_a_server_scores_raw_rows_as_training_scores_prepared_ones(
    folder: Path, valid: Any
) -> None:
    columns, _ = valid
    model = hb.load(folder / "run")
    source = hb.sources.Prepared(str(folder / "prepared"), "valid")
    expected = model.predict(hb.Dataset(source, model.schema, ROWS))
    (folder / "prepared").rename(folder / "away")
    try:
        with (
            served(folder / "run" / "export") as address,
            triton.InferenceServerClient(address) as client,
        ):
            found = client.infer("export", tensors(client, columns)).as_numpy("prediction")
    finally:
        (folder / "away").rename(folder / "prepared")
    has_shop = np.array([shop is not None for shop in columns["shop"]])
    assert not has_shop.all()  # binary tensors have no missing text: it is sent as JSON null
    assert np.abs(found - expected)[has_shop].max() < 1e-6


def test_a_run_and_its_preparation_may_be_moved_before_the_export(
    folder: Path, valid: Any, tmp_path: Path
) -> None:
    columns, _ = valid
    expected = hb.InferenceSession(folder / "run" / "export").predict(columns)
    moved = folder.rename(tmp_path / "moved")
    try:
        (moved / "train.yaml").write_text(TRAIN.format(folder=moved))
        export(hb.Job.read(moved / "train.yaml"), tmp_path / "export")
        found = hb.InferenceSession(tmp_path / "export").predict(columns)
    finally:
        moved.rename(folder)
    np.testing.assert_array_equal(found, expected)


def tensors(client: Any, columns: dict[str, Any]) -> list[Any]:
    """Make the tensors that the model's metadata asks for."""
    made = []
    for told in client.get_model_metadata("export")["inputs"]:
        values = columns[told["name"]]
        kind = told["datatype"]
        if kind == "BYTES":
            array = np.array([value or "" for value in values], object)
        elif kind == "INT64":
            array = np.array(values, np.int64)
        else:
            kind = "FP64"
            array = np.array([np.nan if value is None else value for value in values], np.float64)
        made.append(triton.InferInput(told["name"], list(array.shape), kind))
        made[-1].set_data_from_numpy(array)
    return made


@contextmanager
def served(export: Path) -> Iterator[str]:
    """Serve an export without torch, and give the address."""
    code = "import sys; sys.modules['torch'] = None; from hotbed.cli.commands import main; main()"
    arguments = ["serve", str(export), "--http-port", "0", "--grpc-port", "-1"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--set", "drain_seconds=0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"listening on port (\d+)", line)
            if found:
                yield f"127.0.0.1:{found[1]}"
                return
        raise AssertionError("".join(lines))
    finally:
        process.terminate()
        process.communicate(timeout=60)
