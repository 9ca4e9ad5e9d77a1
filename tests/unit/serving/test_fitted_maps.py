# SPDX-License-Identifier: Apache-2.0
"""Exports bring the fitted maps of their schema, and servers of any kind apply them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import tritonclient.http
from forked import COMMANDS
from tritonclient.grpc import InferenceServerClient as GrpcClient

import hotbed as hb
from hotbed.cli import checkpoints
from hotbed.data.columns import ids_of
from hotbed.data.fitted import FittedMap
from hotbed.errors import FormatError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.saver import Saver
from hotbed.serving.stores.fetched_maps import FetchedMaps

from .conftest import Held, Process, Running, wait_for
from .test_grpc import triton

# the stock client's sockets
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
CITIES = [f"city {number}" for number in range(20)]


def draw(n: int, seed: int) -> dict[str, Any]:
    """Raw columns of n candidates; a fifth of the cities and users are unknown."""
    rng = np.random.default_rng(seed)
    cities = [*CITIES, "nowhere", "atlantis", "utopia", "arcadia"]
    return {
        "user": rng.integers(0, 50, n),
        "city": [cities[number] for number in rng.integers(0, len(cities), n)],
        "price": rng.integers(1, 9, n).astype(np.float32),
        "quantity": rng.integers(1, 9, n),
        "gap": rng.random(n).astype(np.float32),
        "shop": rng.integers(0, 50, n),
    }


def raw_schema(folder: Path) -> hb.Schema:
    """A schema as a preparation fits it, with its maps in `folder`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    cities = ids_of(pa.array(CITIES), "city")
    words = FittedMap.write(folder / "city.rows", cities)
    rates = FittedMap.write(folder / "rates.rows", cities, rng.random((20, 1)))
    spent = FittedMap.write(folder / "spent.rows", np.arange(40), rng.random((40, 1)) * 9)
    t = hb.transforms
    return hb.Schema(
        [
            hb.Label("label"),
            hb.Id("user"),
            hb.Id("city", transforms=[t.Map(fitted=words)]),
            hb.Dense("rate", [t.TargetEncode("label", prior=0.4, fitted=rates)], column="city"),
            hb.Dense(
                "spent", [t.JoinGroupby("price", "max", spent), t.FillMissing(-1.0)], column="shop"
            ),
            hb.Dense("total", [t.Expression("price * quantity"), t.Log()]),
            hb.Dense("gap"),
        ],
        derived={"gap": "seconds since the row before of the same user"},
    )


def prepared_schema(raw: hb.Schema) -> hb.Schema:
    """The schema of prepared columns."""
    columns: list[Any] = []
    for column in raw.columns:
        changes = {"column": None, "transforms": ()}
        columns.append(column if column.name == "label" else replace(column, **changes))
    return hb.Schema(columns, raw=raw)


class Trained:
    """A model of prepared columns, whose schema over raw rows has maps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        raw = raw_schema(folder / "prepared" / "maps")
        encoder = hb.Encoder(raw)
        encoder(hb.sources.Memory(draw(9, 0)).table, labels=False)
        self.raw = raw.with_types(encoder.types, encoder.shapes)
        self.schema = prepared_schema(self.raw)
        torch.manual_seed(0)
        network = hb.models.DNN(self.schema, hb.make_tables(self.schema, dim=4))
        self.model = hb.RecModel(network, "bce", hb.Adam(lr=0.01))
        self.fit(0)

    def rows(self, columns: dict[str, Any]) -> hb.sources.Memory:
        """Encode raw columns as a preparation does."""
        batch = hb.Encoder(self.raw)(hb.sources.Memory(columns).table, labels=False)
        ids = {name: ids.values for name, ids in batch.ids.items()}
        return hb.sources.Memory({**ids, **batch.dense, "label": np.arange(len(ids["user"])) % 2})

    def fit(self, seed: int) -> None:
        rows = self.rows(draw(200, seed))
        self.model.fit(hb.Dataset(rows, self.model.schema, 50), progress=False)

    def predict(self, columns: dict[str, Any]) -> Any:
        rows = self.rows(columns)
        return self.model.predict(hb.Dataset(rows, self.model.schema, len(columns["city"])))

    def export(self) -> Path:
        folder = self.folder / "export"
        self.model.export(folder)
        return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def exported(trained: Trained) -> Path:
    return trained.export()


@pytest.fixture
def elsewhere(exported: Path, trained: Trained, tmp_path: Path) -> Iterator[Path]:
    """The export alone, in another place; the maps of the preparation are gone."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(exported, moved)
    prepared = trained.folder / "prepared"
    prepared.rename(trained.folder / "away")
    yield moved
    (trained.folder / "away").rename(prepared)


def test_an_export_is_of_raw_rows_and_brings_their_maps(exported: Path, trained: Trained) -> None:
    link = open_checkpoint(exported).newest_link
    schema = hb.Schema.from_json(link.manifest.schema or {})
    assert schema == trained.raw
    assert schema.derived == trained.raw.derived
    names = [fitted.path.as_posix() for fitted in schema.maps]
    assert names == [f"maps/{fitted.digest[:32]}.rows" for fitted in trained.raw.maps]
    assert all(link.manifest.files[name].sha256 for name in names)
    hb.checkpoints.verify(exported)


def test_a_moved_export_scores_raw_rows_as_the_model_scores_prepared_ones(
    elsewhere: Path, trained: Trained
) -> None:
    columns = draw(300, 5)
    asked = hb.InferenceSession(elsewhere).predict(columns)
    assert np.abs(asked - trained.predict(columns)).max() < 1e-6


def test_an_export_is_served_without_torch(elsewhere: Path, trained: Trained) -> None:
    columns = draw(9, 6)
    plain = {name: np.asarray(values).tolist() for name, values in columns.items()}
    code = """
import json
import hotbed as hb
exported, rows = arguments
say(json.dumps(hb.InferenceSession(exported).predict(json.loads(rows)).tolist()))
"""
    (scores,) = COMMANDS.run(code, elsewhere, json.dumps(plain))
    assert np.abs(np.array(json.loads(scores)) - trained.predict(columns)).max() < 1e-6


@pytest.mark.parametrize("way", ["flipped", "removed"])
def test_a_changed_or_missing_map_of_an_export_is_named(elsewhere: Path, way: str) -> None:
    path = next(elsewhere.rglob("maps/*.rows"))
    if way == "flipped":
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(FormatError, match=path.name):
        hb.InferenceSession(elsewhere)
    with pytest.raises(FormatError, match=path.name):
        hb.checkpoints.verify(elsewhere)


def test_an_export_of_a_lost_preparation_is_refused_by_name(
    elsewhere: Path, trained: Trained, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=r"city\.rows: the fitted map cannot be read"):
        trained.model.export(tmp_path / "again")
    assert not list((tmp_path / "again").glob("checkpoint-*"))


def test_derived_columns_and_types_of_inputs_are_listed(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "seconds since the row before of the same user"
    running = Running(exported)
    try:
        with tritonclient.http.InferenceServerClient(running.http) as rest:
            told = {one["name"]: one for one in rest.get_model_metadata("m")["inputs"]}
            config = rest.get_model_config("m")
        with GrpcClient(f"127.0.0.1:{running.server.grpc_port}") as client:
            assert {one.name for one in client.get_model_metadata("m").inputs} == set(told)
            ours = client.get_model_config("m").config
    finally:
        running.close()
    kinds = {name: one["datatype"] for name, one in told.items()}
    assert kinds == {
        "user": "INT64",
        "city": "BYTES",
        "price": "FP32",
        "quantity": "INT64",
        "gap": "FP32",
        "shop": "INT64",
    }
    assert {name: one["parameters"] for name, one in told.items() if "parameters" in one} == {
        "gap": {"derived": text}
    }
    assert config["parameters"] == {"derived.gap": {"string_value": text}}
    assert {key: one.string_value for key, one in ours.parameters.items()} == {"derived.gap": text}
    facts = hb.checkpoints.describe(exported)
    assert (facts["derived"], facts["maps"]) == ({"gap": text}, 3)
    checkpoints.print_checkpoint(facts)
    assert f"derived   gap: {text}" in capsys.readouterr().out


def test_a_served_folder_checks_its_maps(exported: Path, tmp_path: Path) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    version = server.load("m", exported)
    path = version.schema.maps[0].path
    data = bytearray(path.read_bytes())
    assert path.parent == tmp_path / "rows" / "m"
    del server, version
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=path.name):
        hb.ParameterServer(tmp_path / "rows").model("m")


def test_published_fulls_bring_maps_and_deltas_use_them(tmp_path: Path) -> None:
    one = Trained(tmp_path / "one")
    for table in one.model.tables.values():
        table.track()
    saver = Saver(tmp_path / "run")
    publisher = PublishDirectory(tmp_path / "published")
    publisher.graph = one.model.graph()
    server = hb.ParameterServer(tmp_path / "rows")
    follower = Follower(tmp_path / "published")
    columns = draw(100, 9)
    names = []
    for seed in range(4):
        one.fit(seed)
        saver.submit(capture(one.model.state(), changes=not (seed == 3 or saver.needs_full)))
        saved = saver.wait()
        assert saved is not None
        published = publisher.publish(saved)
        assert published is not None
        (reader,) = follower.poll()
        version = server.load("m", reader)
        assert bool(list(Path(str(published.folder)).glob("maps/*"))) == (published.kind == "full")
        session = hb.InferenceSession(version)
        assert np.abs(session.predict(columns) - one.predict(columns)).max() < 1e-6
        names.append(sorted(path.name for path in (tmp_path / "rows" / "m").glob("*.map")))
    assert [len(found) for found in names] == [3, 3, 3, 3]
    assert names[0] == names[3]


def inputs(columns: dict[str, Any], client: Any) -> list[Any]:
    kinds = {
        "user": "INT64",
        "city": "BYTES",
        "price": "FP32",
        "quantity": "INT64",
        "gap": "FP32",
        "shop": "INT64",
    }
    found = []
    for name, values in columns.items():
        array = np.array(values, object) if kinds[name] == "BYTES" else np.asarray(values)
        found.append(client.InferInput(name, list(array.shape), kinds[name]))
        found[-1].set_data_from_numpy(array)
    return found


def test_stock_clients_get_the_scores_of_the_model(elsewhere: Path, trained: Trained) -> None:
    running = Running(elsewhere)
    columns = draw(60, 11)
    expected = trained.predict(columns)
    try:
        with tritonclient.http.InferenceServerClient(running.http) as rest:
            found = rest.infer("m", inputs(columns, tritonclient.http)).as_numpy("prediction")
            assert np.abs(found - expected).max() < 1e-6
        with GrpcClient(f"127.0.0.1:{running.server.grpc_port}") as client:
            found = client.infer("m", inputs(columns, triton)).as_numpy("prediction")
            assert np.abs(found - expected).max() < 1e-6
    finally:
        running.close()


@pytest.mark.slow
def test_a_server_of_a_parameter_server_fetches_maps(
    elsewhere: Path, trained: Trained, tmp_path: Path
) -> None:
    rows = Held(tmp_path / "rows", f"ranker={elsewhere}")
    store = hb.ParameterServer.connect(f"grpc://127.0.0.1:{rows.port}")
    version = store.model("ranker")
    assert version.schema == trained.raw
    assert not any(str(tmp_path / "rows") in str(fitted.path) for fitted in version.schema.maps)
    columns = draw(60, 12)
    expected = trained.predict(columns)
    session = hb.InferenceSession(version, hb.EmbeddingCache(store, "ranker", deadline_seconds=60))
    assert np.abs(session.predict(columns) - expected).max() < 1e-6
    store.close()
    server = Process(f"m=grpc://127.0.0.1:{rows.port}/ranker", "--set", "cache_deadline_seconds=5")
    with tritonclient.http.InferenceServerClient(server.http) as rest:
        wait_for(lambda: rest.is_model_ready("m"), "it is served")
        found = rest.infer("m", inputs(columns, tritonclient.http)).as_numpy("prediction")
        assert np.abs(found - expected).max() < 1e-6
    assert server.stop() == 0
    assert rows.stop() == 0


def schema_of(*maps: FittedMap) -> hb.Schema:
    columns = []
    for number, fitted in enumerate(maps):
        columns.append(hb.Id(f"f{number}", transforms=[hb.transforms.Map(fitted=fitted)]))
    return hb.Schema(columns)


def test_fetched_maps_are_kept_while_a_model_needs_them(tmp_path: Path) -> None:
    a, b, c = (FittedMap.write(tmp_path / f"{key}.rows", np.array([key])) for key in range(3))
    files = {fitted.digest: fitted.path.read_bytes() for fitted in (a, b, c)}
    fetched = []

    def fetch(digest: str) -> Iterator[bytes]:
        fetched.append(digest)
        yield from (files[digest][:50], files[digest][50:])

    kept = FetchedMaps()
    first = kept.local("one", schema_of(a, b), fetch)
    other = kept.local("two", schema_of(b), fetch)
    second = kept.local("one", schema_of(c), fetch)
    assert fetched == [a.digest, b.digest, c.digest]
    folder = second.maps[0].path.parent
    names = {fitted.path.name for fitted in (*other.maps, *second.maps)}
    assert {path.name for path in folder.glob("*.map")} == names
    assert [one.slots(np.arange(3)).tolist() for one in first.maps] == [[0, -1, -1], [-1, 0, -1]]


def test_map_that_arrives_torn_is_fetched_again(tmp_path: Path) -> None:
    fitted = FittedMap.write(tmp_path / "a.rows", np.arange(9))
    data = fitted.path.read_bytes()
    kept = FetchedMaps()
    with pytest.raises(FormatError, match="the fitted map changed"):
        kept.local("m", schema_of(fitted), lambda _: [data[:-64]])
    (again,) = kept.local("m", schema_of(fitted), lambda _: [data]).maps
    assert again.slots(np.arange(9)).tolist() == list(range(9))
