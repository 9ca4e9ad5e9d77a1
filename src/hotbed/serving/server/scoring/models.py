# SPDX-License-Identifier: Apache-2.0
"""The models of a server: how each is loaded, and how it follows its trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from hotbed.errors import ConfigError, HotbedError, NotServed
from hotbed.files import Where
from hotbed.persist.container.format import Reader
from hotbed.persist.publish import Follower
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.protocol.bodies import Bounds, Readers
from hotbed.serving.request_log.writer import RequestIds
from hotbed.serving.server.meters import Meters, model_status
from hotbed.serving.server.options import NO_LOGS, LogOptions, ServerLimits
from hotbed.serving.server.scoring.caches import ModelCaches
from hotbed.serving.server.scoring.model import Model
from hotbed.serving.server.scoring.routed import LocalRules, VersionLoader, answer_by
from hotbed.serving.session import InferenceSession
from hotbed.serving.stores.base import ModelVersion, RowStore
from hotbed.serving.stores.following import (
    LOAD_SECONDS,
    START_SECONDS,
    Following,
    KeepsOn,
    hanging,
    open_newest,
)
from hotbed.serving.stores.opening import is_remote
from hotbed.serving.threads import DaemonThreads

log = logging.getLogger("hotbed.serving")
_REMOTE_SECONDS = 1.0  # between polls of a parameter server


class Models:
    """The models of a server.

    They are named at the start, loaded and unloaded by clients, and followed in the background. A
    model at grpc://HOST:PORT[/NAME] belongs to a parameter server elsewhere.

    Args:
        server: loads models from folders.
        limits: bounds of requests and of the queues.
        reach: returns the store at the address of a parameter server.
        cache: keywords of the `EmbeddingCache` for the rows of a parameter server.
        load_seconds: after which a load that a client requests ends with an error; the version is
            served once it is read.
        logs: the log of requests.

    Attributes:
        request_ids: names the requests.
        access_log: as in `LogOptions`.
        rules: by which the versions of the models answer.

    Example:
        >>> models = Models(hb.ParameterServer("rows"))
        >>> models.add("ranker", "exported")
        >>> models.follow("ranker", lambda: Follower("published"))
    """

    def __init__(
        self,
        server: VersionLoader,
        limits: ServerLimits | None = None,
        reach: Callable[[str], RowStore] = ParameterServer.connect,
        cache: Mapping[str, Any] | None = None,
        load_seconds: float = LOAD_SECONDS,
        logs: LogOptions = NO_LOGS,
    ) -> None:
        self._logs = logs
        self.request_ids = RequestIds(is_logging=logs.log is not None or logs.access_log > 0)
        self.access_log = logs.access_log
        self.limits = limits or ServerLimits()
        self.stopping = False
        self.meters = Meters(self)
        self.parent: ParentProcess | None = (
            None  # in a worker: the process that loads and unloads for all
        )
        self._server = server
        self.rules = LocalRules(server, self.named, self.__iter__)
        self._models = dict[str, Model]()
        self._reach = reach
        self._cache = dict(cache or {})
        self._load_seconds = load_seconds
        self.readers = Readers()
        self._following = Following(
            lambda name, error: self.named(name).failed(error),
            lambda name, error: self.named(name).recovered(error),
        )

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    @property
    def bounds(self) -> Bounds:
        """The bounds of a request to an unknown model: those of the model with most columns."""
        bounds = [model.bounds for model in self]
        if not bounds:
            return self.limits.bounds(0)
        return max(bounds, key=lambda each: each.inputs)

    @property
    def ready(self) -> bool:
        """Whether all models are loaded, and the server does not stop."""
        return not self.stopping and all(model.ready for model in self)

    def add(self, name: str, source: Where, *, is_followed: bool = False) -> None:
        """Add a model, and load it.

        If it cannot be loaded, serve the version that the folder of rows holds; `reason` says why.
        A source that is followed may be empty: the model is not ready until its first version is
        there.

        Raises:
            ConfigError: the name does not fit into a URL, or is reserved.
            HotbedError: whatever `ParameterServer.load` raises.
        """
        check_model_name(name)
        if is_remote(source):
            self._add_remote(name, str(source))
        else:
            find = partial(self._find, name, source, is_followed)
            model = self._models[name] = self._new(name, find)
            self.rules.look_at(name)
            try:
                has_rows = self._server.find(name) is not None
                model.serve(self._read(model, START_SECONDS if has_rows else self._load_seconds))
            except (HotbedError, OSError) as error:
                model.failed(error)
                self._serve_kept(model, error)

    def _new(self, name: str, find: Callable[[], ModelVersion]) -> Model:
        return Model(name, find, self.limits, self.readers, self._logs.writer(name))

    def _serve_kept(self, model: Model, error: Exception) -> None:
        """Serve the version that the folder of rows holds, as the source gave `error`.

        If the folder holds none, or a damaged one, wait for the first version of a source that has
        none yet or whose read is under way, and raise any other error.
        """
        damaged = self._server.damaged(model.name)
        if damaged:
            model.note_damage(damaged)
            self._server.unload(model.name)  # workers would serve it
        version = self._server.find(model.name)
        if version is not None:
            model.serve(version, model.problem)
        elif not (isinstance(error, NotServed) or model.reading or model.ready):
            raise error

    def _find(self, name: str, source: Where, is_followed: bool) -> ModelVersion:
        """Load the newest version at a source; a source that is followed keeps to its model."""
        if not is_followed:
            return self._server.load(name, source, InferenceSession)
        newest = open_newest(source)
        self._server.check(name)  # what is damaged is written anew
        return self._server.load(name, newest, InferenceSession)

    def check_kept(self, seconds: float) -> None:
        """Check the kept files of each model that this process loads, every `seconds`."""
        for model in self:
            if model.caches is None:
                self._following.check_kept(model.name, partial(self._check, model), seconds)

    def _check(self, model: Model, keeps_on: KeepsOn) -> None:
        """Read the kept files of a model; if one is damaged, load the model anew.

        A version of its rule is written anew by whoever watches the file of rules.
        """
        damaged = self._server.check(model.name, keeps_on)
        with model.composing:  # a rule that is renewed meanwhile clears it
            of_rule = set().union(*self._server.held.damaged(model.name).values())
            model.note_damage(damaged if model.wanted else (), of_rule)
        if damaged and model.wanted and not self._following.again(model.name):
            with suppress(HotbedError, OSError):  # which is logged
                self.load(model.name)

    def watch(
        self,
        name: str,
        find: Callable[[], ModelVersion],
        poll_seconds: float,
        caches: ModelCaches | None = None,
    ) -> None:
        """Add a model that another process loads, and serve the version that `find` returns.

        `find` is called now and every `poll_seconds`. `caches`: of the rows of a parameter server.
        """
        model = self._models[name] = self._new(name, find)
        model.caches = caches
        model.look = lambda: self._advance(model)
        try:
            model.look()
        except HotbedError as error:  # a version may appear later
            model.failed(error)
        self._following.repeat(name, model.look, poll_seconds)

    def load(self, name: str) -> None:
        """Load the newest version of a model from the place that it was added with.

        On an error, the served version stays. If a trainer is followed, the version that it
        published last is loaded afterwards.
        """
        model = self.named(name)
        if self.parent is not None:
            self.parent.load(name)
            return
        with self._changing(model):
            model.wanted = True
            self.rules.look_at(name)
            try:
                model.serve(self._read(model, self._load_seconds))
            except Exception as error:
                model.failed(error)
                raise
            finally:
                if not model.problem or not model.ready:
                    self._following.again(name)

    def unload(self, name: str) -> None:
        """Answer the requests of a model that wait, then stop serving it."""
        model = self.named(name)
        if self.parent is not None:
            self.parent.unload(name)
            return
        with self._changing(model):
            model.wanted = False
            if model.ready:
                model.close()
                if model.caches is None and self._server.find(name) is not None:
                    self._server.unload(name)

    @contextmanager
    def _changing(self, model: Model) -> Iterator[None]:
        """Hold the lock of loads and unloads. Raises StoreAway if another one does not end."""
        if not model.changing.acquire(timeout=self._load_seconds):
            raise hanging("another load", self._load_seconds)
        try:
            yield
        finally:
            model.changing.release()

    def _read(self, model: Model, seconds: float) -> ModelVersion:
        """Return the newest version of a model, read on a thread that may hang.

        Raises StoreAway if it is not read after `seconds`; then it is served once it is.
        """
        reading = model.reading
        if reading is None or reading.done():
            reading = model.reading = DaemonThreads(1, "hotbed-read").submit(model.find)
        wait([reading], seconds)
        if not reading.done():
            reading.add_done_callback(partial(self._serve_late, model))
            raise hanging(f"model {model.name!r}", seconds)
        model.reading = None  # it holds the version
        return reading.result()

    def _serve_late(self, model: Model, reading: Future[ModelVersion]) -> None:
        with model.changing:
            if model.reading is not reading:  # a later call has waited for it
                return
            model.reading = None
            error = reading.exception()
            if isinstance(error, Exception):
                model.failed(error)
            elif model.wanted and not self.stopping:
                model.advance(reading.result())

    def find(self, name: str) -> Model | None:
        """Return the model of that name, or None."""
        return self._models.get(name)

    def named(self, name: str) -> Model:
        """Return the model of that name. Raises NotServed for an unknown name."""
        model = self._models.get(name)
        if model is None:
            raise NotServed(
                f"model: unknown name, got {name[:100]!r}. Use one of {sorted(self._models)}."
            )
        return model

    def index(self, ready: bool = False) -> list[dict[str, str]]:
        """Return name, version, state (READY or UNAVAILABLE) and reason of each loaded version.

        A model without a loaded version has an entry, too, unless `ready`.
        """
        entries = []
        for model in self:
            if model.ready:
                state = {"state": "READY", "reason": model.reason}
                for version in model.versions:
                    entries.append({"name": model.name, "version": version, **state})
            elif not ready:
                entries.append(_unavailable(model))
        return entries

    def metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Return the model metadata of the protocol."""
        model = self.named(name)
        loaded = model.loaded(version)
        widths = loaded.version.graph.get("ids", {}).get("widths", {})
        outputs = [
            {"name": output, "datatype": "FP32", "shape": [-1, *widths.get(output, ())]}
            for output in loaded.version.graph["outputs"]
        ]
        return {
            "name": name,
            "versions": model.versions,
            "platform": "hotbed_onnx",
            "inputs": loaded.inputs.metadata(),
            "outputs": outputs,
        }

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each model in this process; see `combine_statuses`."""
        entries = []
        for model in self:
            entry = _unavailable(model)
            if model.ready:
                entry |= {"version": model.versions[0], "state": "READY"}
            entries.append({**entry, **model_status(model)})
        return entries

    def follow(
        self, name: str, follower: Callable[[], Follower], poll_seconds: float = 1.0
    ) -> None:
        """Serve the versions that a trainer publishes from now on; a thread follows it.

        `follower` is called on the thread, and again after an error.
        """
        self._following.follow(
            name, follower, lambda reader: self._take(self.named(name), reader), poll_seconds
        )

    def close(self) -> None:
        """Stop following, answer the requests that wait, and release all models."""
        self.stopping = True
        self._following.close()
        for model in self:
            model.close()
            if model.log is not None:
                model.log.close()

    def _add_remote(self, name: str, source: str) -> None:
        parts = urlsplit(source)
        store = self._reach(f"{parts.scheme}://{parts.netloc}")
        remote_name = unquote(parts.path.strip("/")) or name

        def find() -> ModelVersion:
            newest, in_force = store.routed(remote_name)
            answer_by(self.named(name), lambda: in_force, partial(store.version_of, remote_name))
            return newest

        self.watch(name, find, _REMOTE_SECONDS, ModelCaches(store, remote_name, dict(self._cache)))

    def _advance(self, model: Model) -> None:
        if not model.wanted:
            with model.changing:
                model.close()
            return
        with model.looking:
            if model.caches is None:
                self.rules.look_at(model.name)
            newest = model.find()
            with model.changing:
                model.advance(newest)

    def _take(self, model: Model, reader: Reader) -> None:
        with model.changing:
            if model.wanted:
                loaded = self._server.load(model.name, reader, InferenceSession)
                if not self.stopping:
                    model.serve(loaded)


def _unavailable(model: Model) -> dict[str, str]:
    return {"name": model.name, "version": "", "state": "UNAVAILABLE", "reason": model.reason}


def check_model_name(name: str) -> None:
    """Raise ConfigError for a name that does not fit into a URL, or that is reserved."""
    if not name or set(name) & set("/?#%"):
        raise ConfigError(
            f"model {name!r}: expected a name for a URL, without / ? # %, got {name!r}. "
            "Give the model another: NAME=SOURCE."
        )
    if name == "stats":  # /v2/models/stats returns the statistics of all models
        raise ConfigError(
            "model 'stats': the protocol keeps this name. Give the model another: NAME=SOURCE."
        )


class ParentProcess(Protocol):
    """The process that started several servers at the same ports."""

    def load(self, name: str) -> None: ...
    def unload(self, name: str) -> None: ...
    def metrics(self) -> bytes: ...
    def status(self) -> dict[str, Any]: ...
