# SPDX-License-Identifier: Apache-2.0
"""Models that a server answers for: which version each serves, and how it follows its trainer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from hotbed.errors import ConfigError, HotbedError, NotServed, NotWritten
from hotbed.files import Where
from hotbed.persist.format import Reader
from hotbed.persist.publish import Follower
from hotbed.serving.cache import EmbeddingCache
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.server.batching import Batcher, Limits, Request
from hotbed.serving.server.bodies import ASIDE_BYTES, Bounds, Readers
from hotbed.serving.server.meters import Meters, status_of
from hotbed.serving.server.protocol import Given, Inputs
from hotbed.serving.session import InferenceSession, Scores
from hotbed.serving.stores.base import ModelVersion, Store
from hotbed.serving.stores.following import Following
from hotbed.serving.threads import DaemonThreads

log = logging.getLogger("hotbed.serving")
T = TypeVar("T")
_LOADS = 8  # at the same time; they wait for each other anyway
_READINGS = 512  # request times kept for the page
_REMOTE_SECONDS = 1.0  # between looks at what a parameter server has


@dataclass(frozen=True)
class Reading(Generic[T]):
    """Candidates of a request, and what makes an answer of their scores."""

    given: Given
    write: Callable[[Scores], T]


@dataclass(frozen=True)
class Current:
    """The version that a model serves now: what requests need of it, swapped as one."""

    session: InferenceSession
    inputs: Inputs
    bounds: Bounds
    since: float = field(default_factory=time.time)

    @property
    def version(self) -> ModelVersion:
        """The rows and the graph."""
        return self.session.model


@dataclass
class Counts:
    """Requests of a model since the start. `answered` and `refused`: how they ended, and the
    seconds that they took from first to last; `scored`: those that were in a batch, the seconds
    that they waited, and the seconds of their batches; `last_scored`: Unix seconds, 0 = never.
    """

    answered: int = 0
    answered_seconds: float = 0.0
    refused: int = 0
    refused_seconds: float = 0.0
    scored: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    last_scored: float = 0.0

    def ended(self, seconds: float, well: bool) -> None:
        """One request ended, with an answer or an error."""
        if well:
            self.answered += 1
            self.answered_seconds += seconds
        else:
            self.refused += 1
            self.refused_seconds += seconds


class Model:
    """One model: the version it serves, its queue, and what went wrong last. Made by `Models`.

    `find`: gives the newest version; `cache`: of the rows of a model whose versions do not hold
    them.
    """

    def __init__(self, name: str, find: Callable[[], ModelVersion], limits: Limits) -> None:
        self.name = name
        self.find = find
        self._limits = limits
        self.cache: EmbeddingCache | None = None
        self.looking = threading.Lock()
        self.look: Callable[[], None] = lambda: None  # of a model that is watched: once more, now
        self.wanted = True  # `outside`: what went wrong where it is loaded
        self.outside = ""
        self._current: Current | None = None
        self._batcher: Batcher | None = None
        self.problem = ""
        self.swaps: int = 0
        self.problems: int = 0
        self.rows: int = 0
        self.batches: int = 0
        self.batch_seconds: float = 0.0
        self.seconds = deque[float](maxlen=_READINGS)
        self.counts = Counts()

    @property
    def current(self) -> Current:
        """Raises NotServed where no version is loaded."""
        current = self._current
        if current is None:
            raise NotServed(
                f"model {self.name!r}: not loaded — received {self.problem or 'an unload'} — load "
                "it"
            )
        return current

    @property
    def bounds(self) -> Bounds:
        """How much a request may hold; the least of all models where no version is loaded."""
        current = self._current
        return self._limits.bounds(0) if current is None else current.bounds

    @property
    def batcher(self) -> Batcher:
        """Its queue. Raises NotServed where no version is loaded."""
        batcher = self._batcher
        if batcher is None:
            raise NotServed(
                f"model {self.name!r}: not loaded — received {self.problem or 'an unload'} — load "
                "it"
            )
        return batcher

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self._current is not None

    @property
    def waiting_rows(self) -> int:
        """Candidates in its queue."""
        return 0 if self._batcher is None else self._batcher.waiting_rows

    def serve(self, loaded: ModelVersion, problem: str = "") -> None:
        """From the next batch on, answer with this version; batches under way end with the one they
        began with.

        `problem`: why it is not the one that was asked for.
        """
        inputs = Inputs(loaded.schema)
        bounds = self._limits.bounds(len(inputs.allowed))
        current = Current(InferenceSession(loaded, self.cache), inputs, bounds)
        if self._batcher is None:
            alone = self.cache is None  # else scoring may have to wait for rows
            self._batcher = Batcher(lambda: self.current.session, self._limits, self._scored, alone)
        before = self._current
        self._current = current
        self.problem = problem
        self.swaps += before is not None
        log.info("model %s serves version %d (%s)", self.name, loaded.version, loaded.digest[:12])

    def advance(self, newest: ModelVersion) -> None:
        """Serve a version unless it is served, or the model is unloaded."""
        if not self.wanted:
            return
        if self._current is None or self._current.version.digest != newest.digest:
            self.serve(newest)
        self.problem = self.outside

    def failed(self, error: Exception) -> None:
        """Remember and say what went wrong; what is served stays."""
        self.problem = str(error)
        self.problems = self.problems + 1
        kept = (
            f"version {self._current.version.version} stays"
            if self._current
            else "it is not served"
        )
        log.warning("model %s: %s; %s", self.name, error, kept)

    def close(self) -> None:
        """Answer what waits, then stop."""
        batcher = self._batcher
        self._batcher = None
        if batcher is not None:
            batcher.close()
        self._current = None

    def _scored(self, batch: Sequence[Request], started: float, ended: float) -> None:
        self.batches += 1
        self.rows += sum(request.num_rows for request in batch)
        self.batch_seconds += ended - started
        self.counts.scored += len(batch)
        self.counts.queue_seconds += sum(started - request.asked for request in batch)
        self.counts.compute_seconds += len(batch) * (ended - started)
        self.counts.last_scored = time.time()


class Models:
    """The models of a server: named by who starts it, loaded and unloaded by who may, followed in
    the
        background.

    `server`: loads what comes from folders. A model at grpc://HOST:PORT[/NAME] is that of a
    parameter server: `reach` gives the store of such an address, and rows come through a cache with
    the keywords `cache`.

    Example:
        >>> models = Models(hb.ParameterServer("rows"))
        >>> models.add("ranker", "exported")
        >>> models.follow("ranker", lambda: Follower("published"))
    """

    def __init__(
        self,
        server: Loads,
        limits: Limits | None = None,
        reach: Callable[[str], Store] = ParameterServer.connect,
        cache: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.stopping = False
        self.meters = Meters(self)
        self.parent: Parent | None = None  # of a worker: who loads and unloads for all
        self._server = server
        self._models = dict[str, Model]()
        self._lock = threading.Lock()
        self._reach = reach
        self._cache = dict(cache or {})
        # where loads and unloads run that are asked for
        self.aside = DaemonThreads(_LOADS, "hotbed-load")
        self.readers = Readers()
        self._following = Following(lambda name, error: self.named(name).failed(error))

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    @property
    def bounds(self) -> Bounds:
        """How much a request may hold whose model is not known yet."""
        bounds = [model.bounds for model in self]
        return max(bounds, key=lambda one: one.inputs, default=self.limits.bounds(0))

    @property
    def ready(self) -> bool:
        """Whether all models answer, and the server does not stop."""
        return not self.stopping and all(model.ready for model in self)

    def add(self, name: str, source: Where) -> None:
        """Name a model, and load it; where its rows cannot be written, serve those that the folder
        holds.

        Raises what `ParameterServer.load` raises.
        """
        if not name or set(name) & set("/?#%"):
            raise ConfigError(
                f"model {name!r}: no name for a URL — received {name!r} — leave out / ? # %"
            )
        if name == "stats":  # /v2/models/stats is the statistics of all models
            raise ConfigError(
                "model 'stats': the protocol keeps this name. Give the model another: NAME=SOURCE."
            )
        if is_remote(source):
            self._add_remote(name, str(source))
        else:
            self._models[name] = Model(
                name, lambda: self._server.load(name, source, InferenceSession), self.limits
            )
            try:
                self.load(name)
            except NotWritten:
                held = self._server.find(name)
                if held is None:
                    raise
                self._models[name].serve(held, self._models[name].problem)

    def watch(self, name: str, find: Callable[[], ModelVersion], poll_seconds: float) -> None:
        """Name a model that another process loads, and serve what `find` gives, now and whenever it
        gives another.
        """
        model = self._models[name] = Model(name, find, self.limits)
        model.look = lambda: self._advance(model)
        try:
            model.look()
        except HotbedError as error:  # it may come later
            model.failed(error)
        self._following.repeat(name, model.look, poll_seconds)

    def load(self, name: str) -> None:
        """Load, or load again, the newest version of a model where it was exported to; on an error
        what is served stays.

        What a trainer that is followed published last comes after it.
        """
        model = self.named(name)
        if self.parent is not None:
            self.parent.load(name)
            return
        with self._lock:
            model.wanted = True
            try:
                model.serve(model.find())
            except Exception as error:
                model.failed(error)
                raise
            finally:
                if not model.problem or not model.ready:
                    self._following.again(name)

    def unload(self, name: str) -> None:
        """Stop serving a model once its requests are answered."""
        model = self.named(name)
        if self.parent is not None:
            self.parent.unload(name)
            return
        with self._lock:
            model.wanted = False
            if model.ready:
                model.close()
                if model.cache is None:
                    self._server.unload(name)

    def find(self, name: str) -> Model | None:
        """The model of a name, if there is one."""
        return self._models.get(name)

    def named(self, name: str, version: str = "") -> Model:
        """A model; raises NotServed for an unknown name, or a `version` other than the one that is
        served.
        """
        model = self._models.get(name)
        if model is None:
            raise NotServed(
                f"model {name[:100]!r}: unknown — received it for {sorted(self._models)} — name "
                "one of them"
            )
        if version and version != str(served := model.current.version.version):
            raise NotServed(
                f"model {name!r}: version {version[:40]!r} is not served — received it for "
                f"{served} — "
                "leave the version out for the newest"
            )
        return model

    def index(self, ready: bool = False) -> list[dict[str, str]]:
        """Name, version, state (READY, UNAVAILABLE) and reason of each model; with `ready` only
        those that answer.
        """
        found = []
        for model in self:
            try:
                entry = {
                    "name": model.name,
                    "version": str(model.current.version.version),
                    "state": "READY",
                }
            except NotServed:
                entry = {"name": model.name, "version": "", "state": "UNAVAILABLE"}
            if model.ready or not ready:
                found.append({**entry, "reason": model.problem})
        return found

    def metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """What the protocol tells of a model."""
        current = self.named(name, version).current
        outputs = [
            {"name": one, "datatype": "FP32", "shape": [-1]}
            for one in current.version.graph["outputs"]
        ]
        found: Mapping[str, Any] = {
            "name": name,
            "versions": [str(current.version.version)],
            "platform": "hotbed_onnx",
        }
        return {**found, "inputs": current.inputs.metadata(), "outputs": outputs}

    def status(self) -> list[dict[str, Any]]:
        """What this process tells of each model; see `together`."""
        return [
            {**told, **status_of(model)} for model, told in zip(self, self.index(), strict=False)
        ]

    def follow(
        self, name: str, follower: Callable[[], Follower], poll_seconds: float = 1.0
    ) -> None:
        """Serve what a trainer publishes from now on, on a thread. `follower` is called there,
        again after an error.
        """
        self._following.follow(
            name, follower, lambda reader: self._take(self.named(name), reader), poll_seconds
        )

    def close(self) -> None:
        """Stop following, answer what waits, let go of all models."""
        self.stopping = True
        self._following.close()
        for model in self:
            model.close()

    def score(
        self, name: str, version: str, size: int, read: Callable[[Current], Reading[T]]
    ) -> asyncio.Future[T]:
        """The answer to a request of `size` bytes for the candidates that `read` finds in it;
        called on a loop.

        Raises DataError, NotServed or Overloaded, at once or as the future's error.
        """
        model = self.named(name, version)
        if size <= ASIDE_BYTES:
            return self._submit(model, version, read(model.current))

        async def aside() -> T:
            reading = await self.readers.read(size, lambda: read(model.current))
            return await self._submit(model, version, reading)

        return asyncio.ensure_future(aside())

    def _submit(self, model: Model, version: str, reading: Reading[T]) -> asyncio.Future[T]:

        def checked(scores: Scores) -> T:
            if version and version != str(scores.version):
                raise NotServed(
                    f"model {model.name!r}: version {version} has gone — received it for "
                    f"{scores.version} — ask again"
                )
            return reading.write(scores)

        request = Request(*reading.given, checked)
        model.batcher.submit(request)
        return request.future

    def _add_remote(self, name: str, source: str) -> None:
        parts = urlsplit(source)
        store = self._reach(f"{parts.scheme}://{parts.netloc}")
        theirs = unquote(parts.path.strip("/")) or name

        def find() -> ModelVersion:
            newest = store.model(theirs)
            model = self.named(name)
            model.cache = model.cache or EmbeddingCache(store, theirs, **self._cache)
            return newest

        self.watch(name, find, _REMOTE_SECONDS)

    def _advance(self, model: Model) -> None:
        if not model.wanted:
            with self._lock:
                model.close()
            return
        with model.looking:  # of two looks the later one has the newer version
            newest = model.find()
            with self._lock:
                model.advance(newest)

    def _take(self, model: Model, reader: Reader) -> None:
        with self._lock:
            if model.wanted:
                loaded = self._server.load(model.name, reader, InferenceSession)
                if not self.stopping:
                    model.serve(loaded)


class Parent(Protocol):
    """The process that several servers at the same ports were started by."""

    def load(self, name: str) -> None: ...
    def unload(self, name: str) -> None: ...
    def metrics(self) -> bytes: ...
    def status(self) -> dict[str, Any]: ...


class Loads(Protocol):
    """What `Models` needs of a parameter server."""

    def load(
        self, name: str, source: Where | Reader, accept: Callable[[Any], object]
    ) -> ModelVersion: ...
    def unload(self, name: str) -> None: ...
    def find(self, name: str) -> ModelVersion | None: ...


def is_remote(source: Where) -> bool:
    """Whether a model comes from a parameter server elsewhere."""
    return str(source).startswith(("grpc://", "grpcs://"))
