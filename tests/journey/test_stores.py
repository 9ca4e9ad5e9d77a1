# SPDX-License-Identifier: Apache-2.0
"""A served score is the training score whichever store the rows come from, cold and warm, across
deltas and removed rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from schedule import in_soak

import hotbed as hb
from hotbed.persist.container.format import CheckpointWriter, open_checkpoint
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.saver import Saver
from hotbed.serving.server.endpoints.rows_service import RowsServer
from hotbed.serving.server.options import RowsOptions
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.stores.base import RowStore

from .test_serve import columns, trained

ASKED = {name: value for name, value in columns(300, 9).items() if name not in ("label", "like")}


@contextmanager
def connected(server: hb.ParameterServer) -> Iterator[RowStore]:
    """The store over gRPC."""
    running = RowsServer(server, ["m"], RowsOptions(port=0, drain_seconds=1))
    thread = threading.Thread(target=running.run)
    thread.start()
    assert running.started.wait(20)
    store = hb.ParameterServer.connect(f"grpc://127.0.0.1:{running.port}")
    try:
        yield store
    finally:
        store.close()
        running.stop()
        thread.join()


@dataclass
class Door:
    """A store, its cache, and the session and scores of the version before."""

    name: str
    store: RowStore
    cache: hb.EmbeddingCache
    session: hb.InferenceSession

    def check(self, session: hb.InferenceSession, scores: dict[str, Any], what: str) -> None:
        answer = session.ask(ASKED)
        assert answer.late == 0
        for output, expected in scores.items():
            assert np.abs(answer.outputs[output] - expected).max() < 1e-6, (self.name, what, output)

    def check_twice(self, session: hb.InferenceSession, scores: dict[str, Any], what: str) -> None:
        """Check scores whose rows may miss in the cache, then that none of them does."""
        self.check(session, scores, f"cold, {what}")
        misses = self.cache.misses
        self.check(session, scores, f"warm, {what}")
        assert self.cache.misses == misses


def door(name: str, store: RowStore) -> Door:
    cache = hb.EmbeddingCache(store, "m", deadline_seconds=20)
    return Door(name, store, cache, hb.InferenceSession(store.model("m"), cache))


@pytest.mark.parametrize("kind", in_soak(["DCNv2", "MMoE"], {"MMoE"}))
def test_a_score_through_a_cache_is_the_training_score(kind: str, tmp_path: Path) -> None:
    model, schema = trained(kind)
    model.export(tmp_path / "export")
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", tmp_path / "export")
    saver = Saver(tmp_path / "run")
    publisher = PublishDirectory(tmp_path / "out")
    follower = Follower(tmp_path / "out")
    for table in model.tables.values():
        table.track()

    def expected() -> dict[str, Any]:
        labels = {"label": np.zeros(300), "like": np.zeros(300)}
        found = model.predict(hb.Dataset(hb.sources.Memory({**ASKED, **labels}), schema, 100))
        return found if isinstance(found, dict) else {"prediction": found}

    with connected(server) as remote:
        doors = [door("mapped", server), door("remote", remote)]
        old = expected()
        for each in doors:
            each.check_twice(each.session, old, "as exported")
        for version in range(3):
            model.fit(
                hb.Dataset(hb.sources.Memory(columns(100, 20 + version)), schema, 50),
                progress=False,
            )
            model.tables["user"].remove(np.arange(version * 5, version * 5 + 5))
            saver.submit(capture(model.state(), changes=not saver.needs_full))
            saved = saver.wait()
            assert saved is not None
            publisher.publish(saved)
            for reader in follower.poll():
                server.load("m", reader)
            scores = expected()
            assert any((old[name] != scores[name]).any() for name in scores)
            for each in doors:
                session = hb.InferenceSession(each.store.model("m"), each.cache)
                each.check(each.session, old, "the version before, past the cache")
                each.check_twice(session, scores, "after a delta")
                each.session = session
            old = scores


def test_a_graph_that_the_runtime_cannot_open_stops_neither_a_server_nor_its_next_start(
    tmp_path: Path,
) -> None:
    """As where a trainer is upgraded before its servers."""
    exported = tmp_path / "export"
    future = tmp_path / "future"
    trained("LR")[0].export(exported)
    link = open_checkpoint(exported).links[0]
    graph = onnx.load_model_from_string(bytes(link.read(link.manifest.graph.file)))
    graph.opset_import[0].version = 9999
    with CheckpointWriter(future) as writer:
        for name in link.manifest.files:
            is_graph = name == link.manifest.graph.file
            writer.write(name, graph.SerializeToString() if is_graph else link.read(name))
        writer.commit(replace(link.manifest, version=99))

    for start in range(2):
        models = Models(hb.ParameterServer(tmp_path / "rows"))
        models.add("m", exported)
        served = models.named("m").current.version.digest
        models.follow("m", lambda: Follower(future), 0.05)
        until = time.monotonic() + 30
        while not models.named("m").problem and time.monotonic() < until:
            time.sleep(0.02)
        models.close()
        assert "version 99 cannot be opened" in models.named("m").problem, start
        assert hb.ParameterServer(tmp_path / "rows").model("m").digest == served
