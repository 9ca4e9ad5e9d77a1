# SPDX-License-Identifier: Apache-2.0
"""A session is opened by a path or a version, with or without a cache, and never scores with rows
of another model.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotbed as hb
from hotbed.errors import ConfigError, DataError
from hotbed.serving.cache import EmbeddingCache
from hotbed.serving.request import RequestEncoder
from hotbed.serving.stores.base import ModelVersion

from .conftest import draw

ASKED = draw(50, 11)


@pytest.mark.parametrize("file", ["", "MANIFEST.json"])
def test_a_path_alone_serves_the_exported_models_own_rows(
    file: str, exported: Path, session: hb.InferenceSession
) -> None:
    folder = next(exported.rglob("MANIFEST.json")).parent if file else exported
    answer = hb.InferenceSession(str(folder / file)).ask(ASKED)
    assert (answer.outputs["prediction"] == session.predict(ASKED)).all()
    assert (answer.version, answer.late) == (session.model.version, 0)


def test_a_path_and_a_cache_serve_what_the_caches_server_serves(
    exported: Path, session: hb.InferenceSession
) -> None:
    server = hb.ParameterServer()
    version = server.load("m", exported)
    for config_file in (exported, version):
        cached = hb.InferenceSession(config_file, EmbeddingCache(server, "m", deadline_seconds=60))
        for _ in range(2):  # what the cache lacks, and what it holds
            assert (cached.predict(ASKED) == session.predict(ASKED)).all()
        assert cached.model.digest == version.digest


def test_cache_of_another_model_is_rejected(exported: Path, tmp_path: Path) -> None:
    schema = hb.Schema([hb.Label("label"), hb.Id("user")])
    other = hb.RecModel(
        hb.models.LR(schema, hb.make_tables(schema, dim=2)), "bce", hb.Adam(lr=0.01)
    )
    other.fit(
        hb.Dataset(hb.sources.Memory({"user": [1, 2], "label": [0, 1]}), schema, 2), progress=False
    )
    other.export(tmp_path / "other")
    server = hb.ParameterServer()
    server.load("m", tmp_path / "other")
    with pytest.raises(ConfigError, match="not the model that the cache's server serves"):
        hb.InferenceSession(exported, EmbeddingCache(server, "m"))


def test_provider_that_onnx_runtime_lacks_is_refused_by_name(session: hb.InferenceSession) -> None:
    cpu = hb.InferenceSession(session.model, providers=["CPUExecutionProvider"])
    assert cpu._session.get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(ConfigError, match="has no such provider, got 'CudaProvider'"):
        hb.InferenceSession(session.model, providers=["CudaProvider"])


def test_version_without_rows_needs_a_cache(session: hb.InferenceSession) -> None:
    class Elsewhere(ModelVersion):
        def graph_bytes(self) -> bytes:
            return session.model.graph_bytes()

        def weights(self) -> Any:
            return session.model.weights()

        def find(self, wanted: Any, seconds: float | None = None) -> Any:
            return session.model.find(wanted, seconds)

    m = session.model
    elsewhere = Elsewhere(
        m.name, m.version, m.digest, m.schema, m.graph, m.configs, m.published, m.learned, 0
    )
    with pytest.raises(ConfigError, match="does not hold rows"):
        hb.InferenceSession(elsewhere)


def test_a_context_may_be_a_value_or_an_arrow_array_of_one(session: hb.InferenceSession) -> None:
    rest = {name: values for name, values in ASKED.items() if name != "user"}
    expected = session.predict({**rest, "user": np.full(50, 7)})
    for value in (7, np.int32(7), pa.array([7]), pa.array([1, 7]).slice(1)):
        assert (session.predict(rest, {"user": value}) == expected).all()
    missing = session.predict({**rest, "user": pa.array([None] * 50, pa.int64())})
    assert (session.predict(rest, {"user": None}) == missing).all()
    with pytest.raises(DataError, match="context is one value"):
        session.predict(rest, {"user": pa.array([1, 2])})


def test_columns_that_do_not_fit_are_rejected_by_name(session: hb.InferenceSession) -> None:
    with pytest.raises(DataError, match=r"\['item'\] are missing"):
        session.predict(
            {name: values for name, values in ASKED.items() if name != "item"}, {"hour": 3}
        )
    with pytest.raises(DataError, match="'user': expected one value a candidate, got 7"):
        session.predict({**ASKED, "user": 7})
    with pytest.raises(DataError, match="differ in length"):
        session.predict({**ASKED, "user": [7]})
    with pytest.raises(DataError, match="price"):
        session.predict({**ASKED, "price": np.full(50, np.nan, np.float32)})
    with pytest.raises(DataError, match="price"):
        session.predict(
            {name: values for name, values in ASKED.items() if name != "price"},
            {"price": float("nan")},
        )


def test_threads_share_a_session(session: hb.InferenceSession) -> None:
    requests = [draw(n, n) for n in (1, 2, 30, 100) * 8]
    expected = [session.predict(one) for one in requests]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(session.predict, requests))
    assert all((one == other).all() for one, other in zip(found, expected, strict=True))


def _calls_of_a_request(num_columns: int) -> Counter[str]:
    """Return how often each function is called while a request of plain columns is encoded."""
    ids = {f"c{number}": np.arange(10) for number in range(num_columns)}
    numbers = {f"d{number}": np.ones(10, np.float32) for number in range(num_columns)}
    encode = RequestEncoder(hb.Schema([*map(hb.Id, ids), *map(hb.Dense, numbers)]))
    request = {**ids, **numbers}
    encode(request)
    calls = Counter[str]()

    def count(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[function.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        encode(request)
    finally:
        sys.setprofile(before)
    return calls


def test_plain_column_costs_a_request_no_call_but_that_of_its_length() -> None:
    more = _calls_of_a_request(11) - _calls_of_a_request(1)
    assert more == {"len": 20, "add": 20}
