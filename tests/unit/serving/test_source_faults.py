# SPDX-License-Identifier: Apache-2.0
"""A fault of the source, at a start, while a server follows, or in a load: the last good version
is served, with a reason, until the source is mended.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import ConfigError, HotbedError, StoreAway
from hotbed.persist.container.store import MANIFEST_FILE
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.saver import Saver
from hotbed.serving.main import _load_each
from hotbed.serving.server.endpoints.rows_service import RowsServer
from hotbed.serving.server.options import RowsOptions
from hotbed.serving.server.scoring import models as scored
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.stores import following
from hotbed.serving.stores.successors import check_same_model

from .conftest import Trainer, damage_rows, draw, wait_for


@dataclass(frozen=True)
class Published:
    """Folders of published versions: three fulls of the model, and one of another model."""

    folder: Path
    other: Path
    versions: list[int]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Published:
    root = tmp_path_factory.mktemp("source faults")
    trainer = Trainer(root, exported)
    trainer.publisher = PublishDirectory(root / "published", keep=3)
    trainer.publisher.graph = trainer.model.graph()
    versions = [trainer.publish(seed, full=True) for seed in range(3)]
    schema = hb.Schema([hb.Label("label"), hb.Id("shop"), hb.Id("query")])
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 2, 64) for name in ("label", "shop", "query")}
    tables = hb.make_tables(schema, dim=2)
    other = hb.RecModel(hb.models.DNN(schema, tables, hidden=[4]), "bce", hb.Adam(lr=0.01))
    other.fit(hb.Dataset(hb.sources.Memory(rows), schema, 64), progress=False)
    saver = Saver(root / "other run")
    saver.submit(capture(other.state(), changes=False))
    saved = saver.wait()
    assert saved is not None
    publisher = PublishDirectory(root / "other")
    publisher.graph = other.graph()
    publisher.publish(saved)
    return Published(root / "published", root / "other", versions)


class Source:
    """A copy of the published folder, whose CURRENT names the second version, and its faults.

    `number`: of the version that CURRENT names once the fault is mended.
    """

    def __init__(self, published: Published, place: Path) -> None:
        self.published = published
        self.path = place / "source"
        self.number = 1
        self.mend()

    def mend(self) -> None:
        """Put a whole folder in its place: a server that looks meanwhile sees no half of it."""
        whole = self.path.with_name("whole")
        shutil.copytree(self.published.folder, whole)
        self.point_to(self.number, whole)
        shutil.rmtree(self.path, ignore_errors=True)
        whole.rename(self.path)

    def point_to(self, number: int, path: Path | None = None) -> None:
        path = path or self.path
        folder = sorted(path.glob("checkpoint-*"))[number]
        digest = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
        (path / "CURRENT").write_text(f"{folder.name} {digest}\n")

    def missing(self) -> None:
        shutil.rmtree(self.path)

    def empty(self) -> None:
        shutil.rmtree(self.path)
        self.path.mkdir()

    def torn_pointer(self) -> None:
        (self.path / "CURRENT").write_text("torn")

    def torn_part(self) -> None:
        for part in max(self.path.glob("checkpoint-*")).rglob("*.arrow"):
            part.write_bytes(part.read_bytes()[:-7])
        self.number = 2
        self.point_to(2)

    def pipe_part(self) -> None:
        """A pipe to which nobody writes: whoever opens it waits."""
        self.number = 2
        for part in max(self.path.glob("checkpoint-*")).rglob("*.arrow"):
            part.unlink()
            os.mkfifo(part)
        self.point_to(2)

    def other_model(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self.published.other, self.path)

    def older(self) -> None:
        self.point_to(0)


FAULTS = {
    "missing": "missing",
    "empty": "empty",
    "torn_pointer": "CURRENT",
    "torn_part": "torn",
    "pipe_part": "not a regular file",
    "other_model": "another model",
    "older": "versions only grow",
}


@pytest.fixture
def source(published: Published, tmp_path: Path) -> Source:
    return Source(published, tmp_path)


@pytest.fixture
def models(source: Source, tmp_path: Path) -> Iterator[Models]:
    """Of a server whose folder of rows holds the newest version."""
    hb.ParameterServer(tmp_path / "rows").load("m", source.path)
    found = Models(hb.ParameterServer(tmp_path / "rows"))
    yield found
    found.close()


def follow(models: Models, source: Source) -> None:
    models.follow("m", lambda: Follower(source.path), 0.02)


def assert_served(models: Models, source: Source, number: int) -> None:
    (entry,) = models.index()
    assert (entry["version"], entry["state"]) == (str(source.published.versions[number]), "READY")


@pytest.mark.parametrize(("fault", "reason"), FAULTS.items())
def test_start_serves_the_kept_version_until_the_source_is_mended(
    models: Models, source: Source, fault: str, reason: str
) -> None:
    getattr(source, fault)()
    models.add("m", source.path, is_followed=True)
    assert_served(models, source, 1)
    assert reason in models.index()[0]["reason"]
    follow(models, source)
    source.mend()
    wait_for(lambda: models.index()[0]["reason"] == "", "the reason is gone")
    assert_served(models, source, source.number)


@pytest.mark.parametrize("fault", ["missing", "empty", "torn_pointer", "torn_part"])
def test_start_without_watch_serves_the_kept_version_until_a_load(
    models: Models, source: Source, fault: str
) -> None:
    getattr(source, fault)()
    models.add("m", source.path)
    assert_served(models, source, 1)
    assert models.index()[0]["reason"] != ""
    source.mend()
    models.load("m")
    assert models.index()[0]["reason"] == ""
    assert_served(models, source, source.number)


@pytest.mark.parametrize(("fault", "reason"), FAULTS.items())
@pytest.mark.parametrize("is_followed", [True, False])
def test_running_server_keeps_its_version_with_a_reason(
    models: Models, source: Source, fault: str, reason: str, is_followed: bool
) -> None:
    """While it follows, and in a load that a client requests. The reason goes with the fault."""
    models.add("m", source.path, is_followed=True)
    if is_followed:
        follow(models, source)
        wait_for(lambda: models.named("m").swaps == 1, "the follower is there")
    getattr(source, fault)()
    if is_followed:
        wait_for(lambda: reason in models.index()[0]["reason"], "the reason is shown")
    else:
        with pytest.raises(HotbedError, match=reason):
            models.load("m")
        assert reason in models.index()[0]["reason"]
    assert_served(models, source, 1)
    source.mend()
    if is_followed:
        wait_for(
            lambda: models.index()[0]["version"] == str(source.published.versions[source.number]),
            "the version is served",
        )
        wait_for(lambda: models.index()[0]["reason"] == "", "the reason is gone")
        assert_served(models, source, source.number)


@pytest.mark.parametrize("fault", FAULTS)
def test_parameter_server_starts_with_the_kept_version(
    source: Source, tmp_path: Path, fault: str
) -> None:
    hb.ParameterServer(tmp_path / "rows").load("m", source.path)
    getattr(source, fault)()
    store = hb.ParameterServer(tmp_path / "rows")
    server = RowsServer(store, ["m"], RowsOptions(port=0))
    server.load_or_keep("m", str(source.path), is_followed=True)
    assert store.model("m").version == source.published.versions[1]


@pytest.mark.parametrize("fault", ["mend", "missing", "torn_part"])
def test_start_serves_no_damaged_rows(
    models: Models, source: Source, tmp_path: Path, fault: str
) -> None:
    """They are read anew, now or when the source is back."""
    damage_rows(tmp_path / "rows")
    getattr(source, fault)()
    if fault == "torn_part":
        with pytest.raises(HotbedError, match="torn"):
            models.add("m", source.path, is_followed=True)
    else:
        models.add("m", source.path, is_followed=True)
    if fault != "mend":
        (entry,) = models.index()
        assert entry["state"] == "UNAVAILABLE"
        assert "damaged files" in entry["reason"]
        assert hb.ParameterServer(tmp_path / "rows").find("m") is None  # what workers see
        source.mend()
        follow(models, source)
        wait_for(lambda: models.named("m").ready, "it is served")
    assert_served(models, source, source.number)
    assert models.index()[0]["reason"] == ""
    assert models.named("m").current.version.mended == (fault == "mend")
    assert hb.ParameterServer(tmp_path / "rows").damaged("m") == set()


def test_running_server_reports_damaged_rows_and_reads_them_anew(
    models: Models, source: Source, tmp_path: Path
) -> None:
    models.add("m", source.path, is_followed=True)
    rows = draw(30, 1)
    expected = models.named("m").current.session.predict(rows)
    models.check_kept(0.05)
    source.missing()
    damage_rows(tmp_path / "rows")
    wait_for(lambda: "damaged files" in models.index()[0]["reason"], "the reason is shown")
    assert_served(models, source, 1)
    assert 'hotbed_model_damaged{model="m"} 1.0' in models.meters.text().decode()
    assert models.named("m").problems > 0
    source.mend()
    wait_for(lambda: models.index()[0]["reason"] == "", "it is mended")
    assert 'hotbed_model_damaged{model="m"} 0.0' in models.meters.text().decode()
    assert (models.named("m").current.session.predict(rows) == expected).all()


class HangingServer(hb.ParameterServer):
    """Its loads of model `m` wait while `goes_on` is clear, as for a mount that hangs.

    `end`: raised once by a load that has waited, as by a mount that was taken away.
    """

    end: OSError | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def load(self, name: str, *arguments: Any) -> Any:
        with self._change(name), self._writing(name):
            assert name != "m" or self.goes_on.wait(20)
            end = self.end
            self.end = None
            if end is not None:
                raise end
            return super().load(name, *arguments)


@pytest.mark.parametrize(
    "end",
    [
        None,
        errno.ENOTCONN,
        pytest.param(errno.ESTALE, marks=pytest.mark.soak),
        pytest.param(errno.EIO, marks=pytest.mark.soak),
    ],
)
def test_read_that_hangs_is_reported_and_served_once_it_ends(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    """Also where the mount that hung is replaced, which ends the read by an error."""
    monkeypatch.setattr(following, "_HANG_SECONDS", 0.2)
    # with kept rows, a slow machine has longer than `load_seconds` for the first load
    hb.ParameterServer(tmp_path / "rows").load("m", source.path)
    server = HangingServer(tmp_path / "rows")
    models = Models(server, load_seconds=1.0)
    models.add("m", source.path, is_followed=True)
    follow(models, source)
    wait_for(lambda: models.named("m").swaps >= 1, "the follower is there")
    server.goes_on.clear()
    source.number = 2
    source.point_to(2)
    wait_for(lambda: "has not ended" in models.index()[0]["reason"], "the reason is shown")
    with pytest.raises(StoreAway, match="another load"):
        models.load("m")
    assert_served(models, source, 1)
    if end is not None:
        source.mend()
        server.end = OSError(end, os.strerror(end))
    server.goes_on.set()
    wait_for(
        lambda: models.index()[0]["version"] == str(source.published.versions[2]),
        "the version is served",
    )
    wait_for(lambda: models.index()[0]["reason"] == "", "the reason is gone")
    assert_served(models, source, 2)
    models.close()


@pytest.mark.parametrize("is_followed", [True, False])
def test_start_and_load_during_a_read_that_hangs_serve_the_kept_version(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_followed: bool
) -> None:
    hb.ParameterServer(tmp_path / "rows").load("m", source.path)
    monkeypatch.setattr(scored, "START_SECONDS", 0.2)
    server = HangingServer(tmp_path / "rows")
    server.goes_on.clear()
    models = Models(server, load_seconds=0.2)
    source.point_to(2)
    models.add("m", source.path, is_followed=is_followed)
    assert_served(models, source, 1)
    for _ in range(2):
        with pytest.raises(StoreAway, match="has not ended"):
            models.load("m")
    assert "has not ended" in models.index()[0]["reason"]
    server.goes_on.set()
    wait_for(lambda: models.index()[0]["reason"] == "", "the reason is gone")
    assert_served(models, source, 2)
    models.close()


def test_read_that_hangs_holds_up_no_other_model(
    source: Source, published: Published, tmp_path: Path
) -> None:
    (tmp_path / "n").mkdir()
    other = Source(published, tmp_path / "n")
    server = HangingServer(tmp_path / "rows")
    server.goes_on.clear()
    models = Models(server, load_seconds=2.0)
    models.add("m", source.path, is_followed=True)  # without kept rows
    models.add("n", other.path, is_followed=True)
    assert [entry["state"] for entry in models.index()] == ["UNAVAILABLE", "READY"]
    models.follow("m", lambda: Follower(source.path), 0.02)
    models.follow("n", lambda: Follower(other.path), 0.02)
    loads = [models.named("m").aside.submit(models.load, "m") for _ in range(20)]
    other.point_to(2)
    wait_for(lambda: models.index()[1]["version"] == str(published.versions[2]), "it is followed")
    models.named("n").aside.submit(models.load, "n").result(5)
    models.named("n").aside.submit(models.unload, "n").result(5)
    with pytest.raises(StoreAway, match="has not ended"):
        loads[0].result(5)
    server.goes_on.set()
    wait_for(lambda: models.named("m").ready, "it is served")
    wait([*loads], 20)
    wait_for(lambda: models.index()[0]["reason"] == "", "the reason is gone")
    models.close()


def number_of(store: hb.ParameterServer) -> int | None:
    version = store.find("m")
    return None if version is None else version.version


def test_parameter_server_starts_while_a_read_hangs(source: Source, tmp_path: Path) -> None:
    """With the kept version, and with none, until the read ends."""
    hb.ParameterServer(tmp_path / "rows").load("m", source.path)
    source.point_to(2)
    newest = source.published.versions[2]
    for kept, folder in ((source.published.versions[1], "rows"), (None, "none")):
        store = HangingServer(tmp_path / folder)
        store.goes_on.clear()
        server = RowsServer(store, ["m"], RowsOptions(port=0))
        server.load_or_keep("m", str(source.path), start_seconds=0.1, load_seconds=0.1)
        assert number_of(store) == kept
        store.goes_on.set()
        wait_for(lambda store=store: number_of(store) == newest, "it is served")


def test_other_model_and_earlier_version_are_served_after_an_unload(
    models: Models, source: Source
) -> None:
    models.add("m", source.path, is_followed=True)
    for fault in ("older", "other_model"):
        source.mend()
        getattr(source, fault)()
        models.unload("m")
        models.load("m")
        assert models.index()[0]["reason"] == ""
    assert models.named("m").current.inputs.allowed == {"shop", "query"}


def test_bad_model_stops_no_other_model(models: Models, source: Source, tmp_path: Path) -> None:
    sources = {"n": tmp_path / "typo", "m": source.path}
    _load_each(sources, lambda name: models.add(name, sources[name]))
    assert [entry["state"] for entry in models.index()] == ["UNAVAILABLE", "READY"]
    assert "there is no checkpoint" in models.index()[0]["reason"]
    with pytest.raises(HotbedError, match="there is no checkpoint"):
        _load_each(["n"], lambda name: models.add(name, sources[name]))


COLUMNS = [hb.Label("label"), hb.Id("user"), hb.Dense("price", width=2)]
TYPES = {"user": "integer", "price": "number"}
GRAPH = {"outputs": ["prediction"]}


@pytest.mark.parametrize(
    ("columns", "types", "graph", "difference"),
    [
        (COLUMNS, TYPES, GRAPH, ""),
        (COLUMNS, {}, GRAPH, ""),
        (COLUMNS, {**TYPES, "user": "uint64", "price": "float32"}, GRAPH, ""),
        ([COLUMNS[2], hb.Id("user", table="people")], TYPES, GRAPH, ""),
        (COLUMNS[:2], TYPES, GRAPH, "inputs"),
        ([*COLUMNS, hb.Id("item")], TYPES, GRAPH, "inputs"),
        ([*COLUMNS[:2], hb.Dense("price")], TYPES, GRAPH, "price"),
        ([*COLUMNS[:2], hb.Id("price")], TYPES, GRAPH, "price"),
        (COLUMNS, {**TYPES, "user": "text"}, GRAPH, "'user'"),
        (COLUMNS, {**TYPES, "user": "timestamp[ms]"}, GRAPH, "'user'"),
        (COLUMNS, TYPES, {"outputs": ["click"]}, "outputs"),
        (COLUMNS, TYPES, {"outputs": ["prediction", "click"]}, "outputs"),
        (COLUMNS, TYPES, {**GRAPH, "ids": {"widths": {"prediction": [3]}}}, "outputs"),
    ],
)
def test_models_differ_by_inputs_types_and_outputs(
    exported: Path, columns: Any, types: Any, graph: Any, difference: str
) -> None:
    version = hb.ParameterServer().load("m", exported)
    before = replace(version, schema=hb.Schema(COLUMNS).with_types(TYPES, {}), graph=GRAPH)
    after = hb.Schema(columns).with_types(types, {}).to_json()
    if difference:
        with pytest.raises(ConfigError, match=f"folder: .*another model.*{difference}"):
            check_same_model(before, after, graph, "folder")
    else:
        check_same_model(before, after, graph, "folder")
