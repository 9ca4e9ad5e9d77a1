# SPDX-License-Identifier: Apache-2.0
"""Histories and counts at each door of serving are those of a dict that replays what was learned."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import tritonclient.grpc
import tritonclient.http
from kept_ratings import Replay, check_seen, dataset_of, make_model, read_ratings

import hotbed as hb
from hotbed.errors import DataError, FormatError
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.saver import Saver
from hotbed.persist.upkeep.inspect import verify
from hotbed.serving.kept import KeptColumns
from hotbed.serving.protocol.bodies import Readers
from hotbed.serving.protocol.inputs import Candidates, ModelInputs
from hotbed.serving.request import ScoreRequest
from hotbed.serving.request_log.rescoring import rescore
from hotbed.serving.rows import LookupResult
from hotbed.serving.server.options import LogOptions, ServerLimits
from hotbed.serving.server.scoring.batching import Batcher, DecodedRequest
from hotbed.serving.server.scoring.models import Models

from .conftest import Held, Running, wait_for

CANDIDATES = 12
PART = 320  # ratings that a version learns


class Trainer:
    """Learns ratings in their order and publishes versions: an export, then deltas."""

    def __init__(self, folder: Path, ratings: pl.DataFrame, part: int = PART) -> None:
        self.model = make_model()
        self.ratings = ratings
        self.folder = folder
        self.replay = Replay()
        self._learned = 0
        self._part = part
        self._saver = Saver(folder / "run")
        self._publisher = PublishDirectory(folder / "published")
        for table in self.model.tables.values():
            table.track()
        self._learn()
        self.exported = folder / "export"
        self.model.export(self.exported)
        self.of_export = deepcopy(self.replay)
        rows = dataset_of(self.later.head(part), self.model)
        self.scores_of_export = np.asarray(self.model.predict(rows))

    def publish(self) -> int:
        """Learn the next ratings, publish the state, and return the number of the version."""
        self._learn()
        changes = not self._saver.needs_full
        self._saver.submit(capture(self.model.state(), changes=changes))
        saved = self._saver.wait()
        assert saved is not None
        assert self._publisher.publish(saved) is not None
        return int(self.model.counters["steps"])

    def _learn(self) -> None:
        part = self.ratings.slice(self._learned, self._part)
        self.model.online_train(dataset_of(part, self.model), progress=False)
        for row in part.to_dicts():
            self.replay.leave(row)
        self._learned += self._part

    @property
    def later(self) -> pl.DataFrame:
        """The ratings that were not learned yet."""
        return self.ratings.slice(self._learned)


def requests_of(later: pl.DataFrame, num: int) -> list[dict[str, Any]]:
    """Return requests of users of later ratings, with their times, for some of their movies."""
    movies = later["movieId"].to_numpy()
    rng = np.random.default_rng(len(later))
    return [
        {
            "userId": np.array([row["userId"]]),
            "movieId": rng.choice(movies, CANDIDATES),
            "timestamp": np.array([row["timestamp"]]),
        }
        for row in later.head(num).to_dicts()
    ]


def expected_of(request: dict[str, Any], replay: Replay) -> list[tuple[list[int], list[float]]]:
    """Return what the dict says of each candidate."""
    of_all = {name: request[name][0].item() for name in ("userId", "timestamp")}
    return [replay.see({**of_all, "movieId": movie}) for movie in request["movieId"].tolist()]


def ask(session: hb.InferenceSession, request: dict[str, Any]) -> Any:
    """Return the scores of a request whose user and time hold for all candidates."""
    context = {name: values for name, values in request.items() if len(values) == 1}
    return session.ask({"movieId": request["movieId"]}, context)


@pytest.fixture(scope="module")
def ratings(request: pytest.FixtureRequest) -> pl.DataFrame:
    return read_ratings(request.config.rootpath, 5 * PART)


@pytest.fixture(scope="module")
def trainer(ratings: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("trainer"), ratings)


def tensors(client: Any, request: dict[str, Any]) -> list[Any]:
    made = []
    for name, values in request.items():
        made.append(client.InferInput(name, list(values.shape), "INT64"))
        made[-1].set_data_from_numpy(values)
    return made


def serves(models: Models, version: int) -> bool:
    return models.named("m").current.version.version == version


def logged(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the candidates of each logged request by its id, with the kept columns."""
    requests: dict[str, list[dict[str, Any]]] = {}
    log = hb.sources.RequestLog(folder, follow=False)
    for batch, _ in log.read():
        for row in batch.to_pylist():
            requests.setdefault(row["request_id"], []).append(row)
    return requests


def as_kept(rows: list[dict[str, Any]]) -> tuple[hb.Ids, Any]:
    lengths = [len(row["before"]) for row in rows]
    values = [movie for row in rows for movie in row["before"]]
    ids = hb.Ids(np.array(values, np.int64), np.cumsum([0, *lengths]))
    return ids, np.array([row["likes"] for row in rows])


def test_served_requests_are_those_of_a_dict_after_each_delta(
    trainer: Trainer, tmp_path: Path
) -> None:
    store = hb.ParameterServer(tmp_path / "rows")
    options = LogOptions(str(tmp_path / "log"), log_flush_seconds=0.02, log_part_seconds=0.1)
    models = Models(store, logs=options)
    models.add("m", trainer.exported)
    running = Running(trainer.exported, models=models)
    models.follow("m", lambda: Follower(trainer.folder / "published"), poll_seconds=0.05)
    expected = {}
    with (
        tritonclient.http.InferenceServerClient(running.http) as rest,
        tritonclient.grpc.InferenceServerClient(running.grpc) as grpc,
    ):
        check_optional(rest, grpc)
        for delta in range(3):
            version = trainer.publish() if delta else int(trainer.model.counters["steps"])
            wait_for(partial(serves, models, version), "it is served")
            for number, request in enumerate(requests_of(trainer.later, 8)):
                name = f"{version}-{number}"
                expected[name] = expected_of(request, trainer.replay)
                client, module = [(rest, tritonclient.http), (grpc, tritonclient.grpc)][number % 2]
                client.infer("m", tensors(module, request), request_id=name)
    folder = tmp_path / "log" / "m"
    wait_for(lambda: logged(folder).keys() == expected.keys(), "all are in the log")
    running.close()
    for name, rows in logged(folder).items():
        check_seen(*as_kept(rows), expected[name])
    assert any(movies for rows in expected.values() for movies, _ in rows)
    assert any(any(counts) for rows in expected.values() for _, counts in rows)
    session = hb.InferenceSession(store.model("m"))
    versions = rescore(hb.sources.RequestLog(folder, follow=False), session)
    assert [each.requests for each in versions] == [8, 8, 8]
    assert versions[-1].different == 0
    check_damage_is_named(store, trainer.folder / "published")


def check_optional(rest: Any, grpc: Any) -> None:
    """Check that clients read which inputs they need not send."""
    inputs = {each["name"]: each for each in rest.get_model_metadata("m")["inputs"]}
    optional = {"before", "likes", "timestamp"}
    marked = {name for name, each in inputs.items() if each.get("parameters", {}).get("optional")}
    assert (inputs.keys() - marked, marked) == ({"userId", "movieId"}, optional)
    assert [inputs[name]["datatype"] for name in ("before", "likes")] == ["INT64", "FP32"]
    assert [inputs[name]["shape"] for name in ("before", "likes")] == [[-1, -1], [-1, 6]]
    config = grpc.get_model_config("m").config
    assert {each.name for each in config.input if each.optional} == optional
    assert {each["name"] for each in rest.get_model_config("m")["input"] if each.get("optional")}


def check_damage_is_named(store: hb.ParameterServer, published: Path) -> None:
    """Flip a bit of the newest rows of a history, as they are served and as they are published."""
    (layer, *_) = store.model("m").spec["tables"]["before.newest"]["layers"]
    flip_bit(store.model("m").folder / layer["file"])
    assert store.check("m") == {layer["file"]}
    part = next(published.glob("*/tables/*before.newest/rows*"))
    flip_bit(part)
    with pytest.raises(FormatError, match=re.escape(part.name)):
        verify(part.parents[2])


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def test_a_cache_of_a_parameter_server_gives_the_same_histories(
    trainer: Trainer, tmp_path: Path
) -> None:
    rows = Held(tmp_path / "rows", f"m={trainer.exported}")
    remote = hb.ParameterServer.connect(f"grpc://127.0.0.1:{rows.port}")
    cache = hb.EmbeddingCache(remote, "m", preload=0, deadline_seconds=60)
    session = hb.InferenceSession(remote.model("m"), cache)
    local = hb.InferenceSession(trainer.exported)
    requests = requests_of(trainer.ratings.slice(PART), 40)
    for request in requests:
        scores = ask(session, request)
        check_seen(*of_each(scores.kept), expected_of(request, trainer.of_export))
        assert (
            scores.outputs["prediction"].tolist()
            == ask(local, request).outputs["prediction"].tolist()
        )
    fetches = cache.fetches
    assert fetches <= 3 * len(requests)  # newest rows, older ones, and those of the network
    ask(session, requests[0])
    assert cache.fetches == fetches
    rows.stop(signal.SIGKILL)
    lost = {**requests[0], "userId": np.array([-7])}
    assert ask(session, lost).late > 0


def test_rows_of_a_file_are_scored_as_in_training(trainer: Trainer) -> None:
    session = hb.InferenceSession(trainer.exported)
    rows = hb.sources.Memory(trainer.ratings.slice(PART, PART).drop("rating"))
    batches = pa.Table.from_batches(session.predict_source(rows))
    assert np.abs(batches["prediction"].to_numpy() - trainer.scores_of_export).max() < 1e-6


def test_a_summary_says_what_keys_take(trainer: Trainer) -> None:
    lines = trainer.model.summary().splitlines()
    (history,) = [
        line for line in lines if re.match(r"before: [\d,]+ keys by user, [\d,]+ B", line)
    ]
    assert f" {len(trainer.model.tables['before.newest']):,} keys" in history


def of_each(kept: Any) -> tuple[hb.Ids, Any]:
    """Return kept values of all candidates, the history of the user once for each."""
    places = np.zeros(CANDIDATES, np.int64) if len(kept["before"]) == 1 else slice(None)
    return kept["before"].take(places), kept["likes"]


def test_a_request_may_leave_out_the_time_and_bring_the_columns(trainer: Trainer) -> None:
    session = hb.InferenceSession(trainer.exported)
    (request,) = requests_of(trainer.ratings.slice(PART), 1)
    timeless = {name: request[name] for name in ("userId", "movieId")}
    now = {**request, "timestamp": np.array([int(time.time())])}
    kept = ask(session, timeless).kept
    check_seen(*of_each(kept), expected_of(now, trainer.of_export))

    history = pa.array([[1, 2]])
    numbers = np.full((CANDIDATES, 6), 0.5, np.float32)
    context = {"userId": request["userId"], "before": history}
    brought = session.ask({"movieId": request["movieId"], "likes": numbers}, context)
    assert not brought.kept
    ids = {
        "user": np.repeat(request["userId"], CANDIDATES),
        "movie": request["movieId"],
        "before": [[1, 2]] * CANDIDATES,
    }
    encoded = session.ask_encoded({"likes": numbers}, ids)
    assert brought.outputs["prediction"].tolist() == encoded.outputs["prediction"].tolist()
    half = session.ask({"movieId": request["movieId"]}, context)
    assert half.kept.keys() == {"likes"}


def test_a_part_of_the_features_of_a_history_is_refused() -> None:
    schema = hb.Schema(
        [
            hb.Label("liked"),
            hb.Time("at"),
            hb.Id("user"),
            hb.Id("movie"),
            hb.History("before", of=["movie", "at"], by="user"),
        ]
    )
    columns = KeptColumns(schema, lambda ids, num_samples, asked: LookupResult(np.empty(0), []))
    request = ScoreRequest({"user": np.array([1]), "before": np.array([2])}, {}, 1)
    with pytest.raises(DataError, match=r"brings all of \['before', 'before_at'\] or none"):
        columns.fill(request, 0.0)


def test_a_request_whose_kept_history_is_long_is_not_scored_on_the_loop() -> None:
    """The loop reads nothing while it scores."""
    before = hb.History("before", of=["movie", "at"], by="user", length=500)
    columns = [hb.Label("liked"), hb.Time("at"), hb.Id("user"), hb.Id("movie"), before]
    schema = hb.Schema(columns)
    threads = []

    def ask(*_: Any) -> None:
        threads.append(threading.current_thread().name)
        raise DataError("no scores")

    served: Any = SimpleNamespace(session=SimpleNamespace(ask=ask), inputs=ModelInputs(schema))
    batcher = Batcher(lambda: served, ServerLimits(), Readers(), lambda *_: None)

    async def submit(num_rows: int, context: dict[str, Any]) -> None:
        candidates = Candidates(num_rows, {"movie": np.arange(num_rows)}, context)
        decoded = DecodedRequest(candidates, lambda scores: scores)
        with pytest.raises(DataError, match="no scores"):
            await batcher.submit(0, lambda served: decoded, is_last=True)

    context: dict[str, Any] = {"user": np.array([7])}
    asyncio.run(submit(8, context))
    short = pa.array([[1, 2]], pa.large_list(pa.int64()))
    asyncio.run(submit(9, {**context, "before": short, "before_at": short}))
    asyncio.run(submit(9, context))
    batcher.close()
    on_loop = threading.current_thread().name
    assert threads == [on_loop, on_loop, "hotbed-batcher"]


@pytest.mark.soak
def test_fifty_thousand_served_requests_are_those_of_a_dict(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    part = 5000
    trainer = Trainer(tmp_path, read_ratings(request.config.rootpath, 12 * part), part)
    store = hb.ParameterServer(tmp_path / "rows")
    follower = Follower(tmp_path / "published")
    session = hb.InferenceSession(store.load("m", trainer.exported))
    num_requests = 0
    while num_requests < 50_000:
        for row in trainer.later.head(part).to_dicts():
            context = {"userId": row["userId"], "timestamp": row["timestamp"]}
            kept = session.ask({"movieId": [row["movieId"]]}, context).kept
            check_seen(kept["before"], [kept["likes"][0]], [trainer.replay.see(row)])
            num_requests += 1
        trainer.publish()
        for reader in follower.poll():
            session = hb.InferenceSession(store.load("m", reader))
    assert num_requests == 50_000
