# SPDX-License-Identifier: Apache-2.0
"""What is served is what was trained: the same score for every model, pooling and transform, also
for unknown ids.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from any_batch import check_any_batch
from forked import COMMANDS, Command
from schedule import in_soak

import hotbed as hb
from hotbed.errors import ConfigError, DataError, FormatError
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.saver import Saver
from hotbed.prepare import Preparation, prepare

MODELS = ["LR", "FM", "WideDeep", "DeepFM", "DNN", "DCN", "DCNv2", "DLRM"]
# The parts of the others are in these, or they are served elsewhere: DNN and MMoE below.
QUICK_MODELS = {"DeepFM", "DCNv2", "DLRM", "PLE", "ESMM", "AITM"}
TWO_LABELS: dict[str, dict[str, Any]] = {
    "MMoE": {"num_experts": 2, "expert_hidden": [8], "tower_hidden": [8]},
    "PLE": {"levels": [[8], [8]]},
    "ESMM": {"hidden": [8]},
    "AITM": {"hidden": [8]},
}


def columns(n: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "user": draw.integers(0, 60, n),
        "item": [f"i{one}" for one in draw.integers(0, 90, n)],
        "genres": [
            "|".join(f"g{one}" for one in draw.integers(0, 9, draw.integers(0, 4)))
            for _ in range(n)
        ],
        "price": np.where(draw.random(n) < 0.2, np.nan, draw.random(n) * 100),
        "age": draw.integers(0, 90, n),
        "label": draw.integers(0, 2, n),
        "like": draw.integers(0, 2, n),
    }


def schema_of(labels: int) -> hb.Schema:
    t = hb.transforms
    return hb.Schema(
        [
            *([hb.Label("label"), hb.Label("like")][:labels]),
            hb.Id("user"),
            hb.Id("item"),
            hb.Id("genres", transforms=[t.Split("|")], pooling="mean"),
            hb.Id("pair", column="user", table="user", transforms=[t.Cross("age")]),
            hb.Dense("price", transforms=[t.FillMissing(statistic="mean"), t.Normalize()]),
            hb.Dense("age", transforms=[t.Log()]),
        ]
    )


def trained(kind: str, **options: Any) -> tuple[hb.RecModel, hb.Schema]:
    schema = schema_of(2 if kind in TWO_LABELS else 1).fit(hb.sources.Memory(columns(400, 0)))
    tables = hb.make_tables(schema, dim=4, admit=hb.MinCount(3), default=0.1)
    tables["user"] = hb.Table("user", 4)
    network = getattr(hb.models, kind)(schema, tables, **options)
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.01), {"auc"})
    model.fit(hb.Dataset(hb.sources.Memory(columns(400, 0)), schema, 64), epochs=2, progress=False)
    return model, schema


Frozen = Callable[[str], tuple[hb.RecModel, Path]]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """Give a trained model of a kind, and its export; no test changes them."""

    @cache
    def export(kind: str) -> tuple[hb.RecModel, Path]:
        model, _ = trained(kind, **TWO_LABELS.get(kind, {}))
        path = tmp_path_factory.mktemp(kind) / "export"
        model.export(path)
        return model, path

    return export


@pytest.mark.parametrize("kind", in_soak([*MODELS, *TWO_LABELS], QUICK_MODELS))
def test_a_served_score_is_the_training_score(kind: str, frozen: Frozen, tmp_path: Path) -> None:
    model, path = frozen(kind)
    served = hb.ParameterServer(tmp_path / "rows").load("m", path)
    asked = columns(200, 7)  # a third of it never seen
    expected = model.predict(hb.Dataset(hb.sources.Memory(asked), model.schema, 64))
    session = hb.InferenceSession(served)
    del asked["label"], asked["like"]
    found = session.predict(asked)
    check_any_batch(session, {name: values[:30] for name, values in asked.items()})
    if kind not in TWO_LABELS:
        expected, found = {"label": expected}, {"label": found}
    assert set(found) == set(expected)
    for name in expected:
        assert np.abs(found[name] - expected[name]).max() < 1e-6, name


def test_a_context_holds_for_every_candidate(frozen: Frozen) -> None:
    _, path = frozen("DCNv2")
    session = hb.InferenceSession(hb.ParameterServer().load("m", path))
    asked = {name: value for name, value in columns(50, 3).items() if name not in ("label", "like")}
    asked["user"], asked["age"] = np.full(50, 7), np.full(50, 30)
    rest = {name: value for name, value in asked.items() if name not in ("user", "age")}
    assert (session.predict(rest, context={"user": 7, "age": 30}) == session.predict(asked)).all()
    with pytest.raises(DataError, match="given twice"):
        session.predict(asked, context={"user": 7})
    assert session.predict({name: value[:0] for name, value in asked.items()}).shape == (0,)


def test_a_second_start_finds_the_rows_where_the_first_left_them(
    frozen: Frozen, tmp_path: Path
) -> None:
    model, path = frozen("DCNv2")
    hb.ParameterServer(tmp_path / "rows").load("m", path)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "rows").rglob("*.rows")}
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", path)
    assert files == {file: file.stat().st_mtime_ns for file in (tmp_path / "rows").rglob("*.rows")}
    rows, found = server.lookup("m", "user", [1, 10_000])
    assert found.tolist() == [True, False]
    assert (rows == model.tables["user"].lookup(np.array([1, 10_000]))).all()


@pytest.mark.parametrize(("kind", "options"), [("DCNv2", {}), ("DNN", {"batch_norm": True})])
def test_published_versions_are_served_with_the_scores_of_the_trainer(
    kind: str, options: Any, tmp_path: Path
) -> None:
    model, schema = trained(kind, **options)
    model.export(tmp_path / "export")
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", tmp_path / "export")
    saver, publisher, follower = (
        Saver(tmp_path / "run"),
        PublishDirectory(tmp_path / "out"),
        Follower(tmp_path / "out"),
    )
    for table in model.tables.values():
        table.track()
    asked = {
        name: value for name, value in columns(300, 9).items() if name not in ("label", "like")
    }
    scores, kinds = [], []
    for version in range(4):
        model.fit(
            hb.Dataset(hb.sources.Memory(columns(100, 20 + version)), schema, 50), progress=False
        )
        model.tables["user"].remove(np.arange(version * 5, version * 5 + 5))
        saver.submit(capture(model.state(), changes=not saver.needs_full))
        saved = saver.wait()
        assert saved is not None
        publisher.publish(saved)
        for reader in follower.poll():
            before, loaded = server.model("m"), server.load("m", reader)
            kinds.append(reader.manifest.kind)
        found = hb.InferenceSession(loaded).predict(asked)
        expected = model.predict(
            hb.Dataset(hb.sources.Memory({**asked, "label": np.zeros(300)}), schema, 100)
        )
        assert np.abs(found - expected).max() < 1e-6, version
        assert len(loaded.tables["user"].layers) <= 2
        scores.append(found)
    held = {path.name for path in (tmp_path / "rows" / "m").iterdir()} - {"CURRENT"}
    assert held == loaded.files() | before.files()  # of versions that are gone nothing is left
    assert kinds == ["full", "delta", "delta", "delta"]
    assert (scores[0] != scores[-1]).any()


def test_a_server_starts_from_what_a_trainer_publishes_and_training_does_not_notice(
    tmp_path: Path,
) -> None:
    states = []
    for publish in (PublishDirectory(tmp_path / "published", keep=9), None):
        schema = schema_of(1).fit(hb.sources.Memory(columns(400, 0)))
        torch.manual_seed(1)
        network = hb.models.DCNv2(schema, hb.make_tables(schema, dim=4), dropout=0.3)
        model = hb.RecModel(network, "bce", hb.Adam(lr=0.01))
        keep = hb.callbacks.Checkpoint(
            tmp_path / str(publish is None), every_steps=4, publish=publish, wait=True
        )
        data = hb.Dataset(hb.sources.Memory(columns(640, 0)), schema, 64)
        model.online_train(data, keep, progress=False, progressive=False)
        states.append(content_digest(model.tables))
    assert states[0] == states[1]  # dropout draws the same numbers
    asked = {
        name: value for name, value in columns(100, 9).items() if name not in ("label", "like")
    }
    versions = list(Follower(tmp_path / "published").poll())
    assert [(one.manifest.graph is not None, one.manifest.version) for one in versions] == [
        (True, 0),
        *((False, n) for n in (4, 8, 10)),
    ]
    assert all(one.manifest.caught <= one.manifest.published for one in versions)
    expected = model.predict(
        hb.Dataset(hb.sources.Memory({**asked, "label": np.zeros(100)}), schema, 100)
    )
    found = hb.InferenceSession(tmp_path / "published").predict(asked)
    assert np.abs(found - expected).max() < 1e-6


def test_what_cannot_be_served_is_refused_by_name(frozen: Frozen, tmp_path: Path) -> None:
    model, path = frozen("DCNv2")
    server = hb.ParameterServer(tmp_path / "rows")
    with pytest.raises(ConfigError, match="Export the model first"):
        server.load("m", model.save(tmp_path / "state"))
    with pytest.raises(ConfigError, match="not loaded"):
        server.model("m")
    server.load("m", path)
    with pytest.raises(ConfigError, match="unknown table, got 'x'"):
        server.lookup("m", "x", [1])
    torn = shutil.copytree(path, tmp_path / "torn")
    graph = next(torn.rglob("graph.onnx"))
    graph.write_bytes(graph.read_bytes()[:-5])
    with pytest.raises(FormatError, match=r"graph\.onnx"):
        hb.ParameterServer().load("m", torn)


def test_serving_needs_no_torch(frozen: Frozen, tmp_path: Path) -> None:
    model, path = frozen("DeepFM")
    expected = model.predict(hb.Dataset(hb.sources.Memory(columns(20, 5)), model.schema, 64))
    asked = {k: v for k, v in columns(20, 5).items() if k not in ("label", "like")}
    np.save(tmp_path / "asked.npy", asked, allow_pickle=True)
    code = """
import sys
import numpy as np
import hotbed as hb
path, asked = arguments
rows = np.load(asked, allow_pickle=True).item()
for score in hb.InferenceSession(hb.ParameterServer().load("m", path)).predict(rows):
    say(score)
assert sys.modules["torch"] is None, "as where it is not installed"
"""
    scores = COMMANDS.run(code, path, tmp_path / "asked.npy")
    assert np.abs(np.array(scores, np.float32) - expected).max() < 1e-6


# --- every transform ------------------------------------------------------------------------------


def with_gaps(n: int, seed: int) -> dict[str, list[Any]]:
    """Raw columns with values that training never sees, and nulls in every one of them."""
    draw = np.random.default_rng(seed)

    def gaps(values: Any) -> list[Any]:
        return [
            None if gap else value for value, gap in zip(values, draw.random(n) < 0.15, strict=True)
        ]

    return {
        "user": gaps(draw.integers(0, 60, n).tolist()),
        "item": gaps([f"i{one}" for one in draw.integers(0, 90, n)]),
        "genres": gaps(
            [
                "|".join(f"g{one}" for one in draw.integers(0, 9, draw.integers(0, 4)))
                for _ in range(n)
            ]
        ),
        "title": gaps(
            [f"Film ({one})" if one % 7 else "Film" for one in draw.integers(1950, 2020, n)]
        ),
        "grade": gaps(draw.choice(["low", "mid", "high", "none"][: 3 + (seed > 0)], n).tolist()),
        "at": gaps((1_600_000_000 + draw.integers(0, 10**6, n)).tolist()),
        "price": gaps((draw.random(n) * 100).tolist()),
        "age": gaps(draw.integers(0, 90, n).tolist()),
        "label": draw.integers(0, 2, n).tolist(),
        "like": draw.integers(0, 2, n).tolist(),
    }


def all_transforms() -> hb.Schema:
    t = hb.transforms
    return hb.Schema(
        [
            hb.Label("label"),
            hb.Label("like"),
            hb.Id("user", transforms=[t.Hash(bins=40)]),
            hb.Id("item"),
            hb.Id("known", column="item", transforms=[t.Map(min_count=2)]),
            hb.Id("genres", transforms=[t.Split("|"), t.Hash(seed=3)], pooling="max"),
            hb.Id("year", column="title", transforms=[t.Extract(r"\((\d{4})\)$", number=True)]),
            hb.Id("hour", column="at", transforms=[t.TimeOfDay("hour_of_week")]),
            hb.Id("pair", column="user", transforms=[t.Cross(["age", "grade"])]),
            hb.Id("cheap", column="price", transforms=[t.Bucketize(bins=5)]),
            hb.Id("old", column="age", transforms=[t.Shift(90)]),
            hb.Dense(
                "price",
                transforms=[t.FillMissing(statistic="median"), t.Clip(1, 80), t.Normalize()],
            ),
            hb.Dense("age", transforms=[t.FillMissing(0), t.Log()]),
            hb.Dense("grade", transforms=[t.Map(["low", "mid"]), t.FillMissing(0)]),
            hb.Dense("rate", [t.TargetEncode("label")], column="item"),
            hb.Dense("pair_rate", [t.Cross(["grade"]), t.TargetEncode("like")], column="user"),
            hb.Dense("spent", [t.JoinGroupby("price", "sum")], column="user"),
            hb.Dense("most", [t.JoinGroupby("price", "max"), t.FillMissing(-1.0)], column="item"),
            hb.Dense("total", [t.Expression("price * age"), t.FillMissing(0.0), t.Log()]),
        ]
    )


def test_every_transform_gives_the_training_score_in_a_process_without_torch(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table(with_gaps(500, 0)), tmp_path / "raw.parquet")
    raw = hb.sources.Parquet(str(tmp_path / "raw.parquet"))
    schema = prepare(Preparation(raw, all_transforms(), output=str(tmp_path / "prepared"))).raw
    transforms = {
        type(one) for column in schema.columns for one in getattr(column, "transforms", ())
    }
    public = {
        one
        for one in vars(hb.transforms).values()
        if isinstance(one, type) and issubclass(one, hb.transforms.Transform)
    }
    # a new one is served too
    assert transforms == {one for one in public if not inspect.isabstract(one)}

    tables = hb.make_tables(schema, dim=4, admit=hb.MinCount(2), default=0.1)
    model = hb.RecModel(hb.models.MMoE(schema, tables), "bce", hb.Adam(lr=0.01), {"auc"})
    model.fit(
        hb.Dataset(hb.sources.Memory(with_gaps(500, 0)), schema, 64), epochs=2, progress=False
    )
    model.export(tmp_path / "export")
    asked = with_gaps(300, 1)
    expected = model.predict(hb.Dataset(hb.sources.Memory(asked), schema, 64))
    assert set(expected) == {"label", "like"}
    asked = {name: values for name, values in asked.items() if name not in expected}

    found = hb.InferenceSession(tmp_path / "export").predict(asked)
    for name, scores in expected.items():
        assert np.abs(found[name] - scores).max() < 1e-6, name

    with Serve(tmp_path / "export") as url:
        told = json.load(urlopen(f"{url}/v2/models/export"))
        kinds = {one["name"]: one["datatype"] for one in told["inputs"]}
        texts = {"item", "genres", "title", "grade"}
        assert kinds == {
            name: "BYTES" if name in texts else "FP64" if name == "price" else "INT64"
            for name in asked
        }
        inputs = [
            {"name": name, "datatype": kinds[name], "shape": [300], "data": asked[name]}
            for name in asked
        ]
        answer = json.load(
            urlopen(f"{url}/v2/models/export/infer", json.dumps({"inputs": inputs}).encode())
        )
    served = {one["name"]: np.array(one["data"], np.float32) for one in answer["outputs"]}
    for name, scores in expected.items():
        assert np.abs(served[name] - scores).max() < 1e-6, name


class Serve:
    """`hotbed serve` where torch is not installed, as far as Python can tell; gives its address."""

    def __init__(self, model: Path) -> None:
        ports = ["--http-port", "0", "--grpc-port", "-1"]
        command = ["serve", str(model), *ports, "--set", "drain_seconds=0"]
        self._process: Command = COMMANDS.start(command)

    def __enter__(self) -> str:
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if found := re.search(r"listening on port (\d+)", line):
                return f"http://127.0.0.1:{found.group(1)}"
        raise AssertionError("".join(lines))

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.stderr.read()
        self._process.stderr.close()
        assert self._process.wait(60) == 0
