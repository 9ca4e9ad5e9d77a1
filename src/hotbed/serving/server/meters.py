# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus: outcome and duration of requests, and the state of each model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hotbed.errors import ConfigError, HotbedError, MissingExtra
from hotbed.memory_limit import memory_limits
from hotbed.serving.server.route_meters import (
    RoutedModel,
    combine_routes,
    route_families,
    routes_status,
)

if TYPE_CHECKING:
    from hotbed.serving.stores.base import ModelVersion


@dataclass
class RequestCounts:
    """Counts of a model's requests since the start.

    `answered` and `refused`: requests by outcome, with the sum of their seconds. `scored`: requests
    that were in a batch; `queue_seconds`: the time that they waited; `compute_seconds`: the time of
    their batches. `last_scored`: Unix time, 0 = never. `nonfinite`: scores that are NaN or
    infinite.
    """

    answered: int = 0
    answered_seconds: float = 0.0
    refused: int = 0
    refused_seconds: float = 0.0
    scored: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    last_scored: float = 0.0
    nonfinite: int = 0

    def ended(self, seconds: float, well: bool) -> None:
        """Count a request that ended with an answer (`well`) or an error."""
        if well:
            self.answered += 1
            self.answered_seconds += seconds
        else:
            self.refused += 1
            self.refused_seconds += seconds


class ServedModelVersion(Protocol):
    """The version that a model serves, and since when, in Unix seconds."""

    @property
    def version(self) -> ModelVersion: ...
    @property
    def since(self) -> float: ...


class MeasuredLog(Protocol):
    """What a request log has counted."""

    logged: int
    dropped: int


class MeasuredCaches(Protocol):
    """The caches of a model; see `scoring.caches.ModelCaches`."""

    def status(self) -> Mapping[str, float]: ...


class MeasuredModel(RoutedModel, Protocol):
    """What the metrics read of a model; see `scoring.models.Model`."""

    counts: RequestCounts
    seconds: deque[float]
    swaps: int
    problems: int
    rows: int
    batches: int
    batch_seconds: float
    problem: str
    damage: str
    held_damage: str

    @property
    def caches(self) -> MeasuredCaches | None: ...
    @property
    def log(self) -> MeasuredLog | None: ...
    @property
    def served(self) -> ServedModelVersion | None: ...
    @property
    def waiting_rows(self) -> int: ...
    @property
    def ready(self) -> bool: ...


class MeasuredModels(Protocol):
    """The models of a server."""

    def find(self, name: str) -> MeasuredModel | None: ...
    def __iter__(self) -> Iterator[MeasuredModel]: ...


class Meters:
    """The metrics of a server. Needs prometheus-client."""

    def __init__(self, models: MeasuredModels) -> None:
        client = _client()
        self._models = models
        self._families = client.core
        self._text = client.generate_latest
        self._registry = client.CollectorRegistry()
        self._registry.register(self)
        labels = ["model", "protocol"]
        self._seconds = client.Histogram(
            "hotbed_request_seconds",
            "Requests that were answered, by how long it took",
            labels,
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._requests = client.Counter(
            "hotbed_requests",
            "Requests for predictions, by how they ended",
            [*labels, "outcome"],
            registry=self._registry,
        )
        self._closed_connections = _closed_connections(client, self._registry)
        self._children: dict[Any, Any] = {}

    def ended(
        self, name: str, protocol: str, started: float, error: BaseException | None = None
    ) -> None:
        """Record the end of a request for predictions; `error` is None if it was answered.

        `started`: when the request began (`time.perf_counter`).
        """
        model = self._models.find(name)
        if model is None:
            name = ""  # unknown names make no series
        seconds = time.perf_counter() - started
        if model is not None:
            model.counts.ended(seconds, error is None)
        if error is None:
            self._child(self._seconds, name, protocol).observe(seconds)
            if model is not None:
                model.seconds.append(seconds)
            outcome = "ok"
        elif isinstance(error, HotbedError):
            outcome = type(error).__name__.strip("_")
        elif isinstance(error, asyncio.CancelledError):
            outcome = "cancelled"
        else:
            outcome = "failed"
        self._child(self._requests, name, protocol, outcome).inc()

    def connection_closed(self) -> None:
        """Count a gRPC connection that was closed because of the frames that it sent."""
        self._closed_connections.inc()

    def watch(self, name: str, protocol: str, started: float, future: asyncio.Future[Any]) -> None:
        """Call `ended` once the future is done, which it may be now."""

        def record(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                self.ended(name, protocol, started, asyncio.CancelledError())
            else:
                self.ended(name, protocol, started, done.exception())

        if future.done():
            record(future)
        else:
            future.add_done_callback(record)

    def _child(self, family: Any, *labels: str) -> Any:
        """Return `family.labels(*labels)`, cached."""
        key = (family, *labels)
        child = self._children.get(key)
        if child is None:
            child = family.labels(*labels)
            self._children[key] = child
        return child

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return bytes(self._text(self._registry))

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; called by prometheus-client for each scrape."""
        for name, kind, text, read in _GAUGES:
            family = getattr(self._families, f"{kind}MetricFamily")(
                f"hotbed_{name}", text, labels=["model"]
            )
            for model in self._models:
                value = read(model)
                if value is not None:
                    family.add_metric([model.name], value)
            yield family
        yield from route_families(self._families, list(self._models))
        yield from _of_memory(self._families)
        versions: list[tuple[str, ModelVersion, float | None]] = []
        for model in self._models:
            current = model.served
            if current is not None:
                versions.append((model.name, current.version, current.since))
        yield from _of_versions(self._families, versions)


class CallMeters:
    """The metrics of a parameter server: calls, rows and versions. Needs prometheus-client.

    `since`: when the version of each model was loaded, in Unix seconds, by name of the model.
    `damaged`: whether a file of it was found damaged.

    Args:
        newest: returns the newest version of each model that has one, by name.
    """

    def __init__(self, newest: Callable[[], Mapping[str, ModelVersion]]) -> None:
        client = _client()
        self._newest = newest
        self._families = client.core
        self._start = client.start_http_server
        self._registry = client.CollectorRegistry()
        self._registry.register(self)
        self._seconds = client.Histogram(
            "hotbed_call_seconds",
            "Calls, by how long they took",
            ["call"],
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._calls = client.Counter(
            "hotbed_calls",
            "Calls, by the gRPC status they ended with",
            ["call", "code"],
            registry=self._registry,
        )
        self._rows = client.Counter(
            "hotbed_asked_rows", "Ids whose rows were asked for", ["model"], registry=self._registry
        )
        self._closed_connections = _closed_connections(client, self._registry)
        self.since = dict[str, float]()
        self.damaged = dict[str, bool]()

    @contextlib.contextmanager
    def listening(self, host: str, port: int | None) -> Iterator[int | None]:
        """Answer scrapes at a port, and yield its number.

        Args:
            host: address to listen at.
            port: 0 = a free port; None = do not listen.

        Raises:
            ConfigError: the port is taken.
        """
        if port is None:
            yield None
            return
        try:
            server, thread = self._start(port, host, self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics_port: cannot listen at {host}:{port}, got {error}. "
                "Give a free port, or 0."
            ) from error
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    @contextlib.contextmanager
    def timed(self, call: str, context: Any) -> Iterator[None]:
        """Count a call by the status of its `context` when it has ended, and time it."""
        started = time.perf_counter()
        code = "OK"
        try:
            yield
        except BaseException:
            status = context.code()
            code = "CANCELLED" if status is None else status.name
            raise
        finally:
            self._seconds.labels(call).observe(time.perf_counter() - started)
            self._calls.labels(call, code).inc()

    def connection_closed(self) -> None:
        """Count a gRPC connection that was closed because of the frames that it sent."""
        self._closed_connections.inc()

    def asked(self, model: str, rows: int) -> None:
        """Count ids of a model whose rows were requested."""
        self._rows.labels(model).inc(rows)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; called by prometheus-client for each scrape."""
        newest = self._newest()
        versions = [(name, version, self.since.get(name)) for name, version in newest.items()]
        family = self._families.GaugeMetricFamily(
            "hotbed_model_damaged", _DAMAGED, labels=["model"]
        )
        for name in newest:
            family.add_metric([name], float(self.damaged.get(name, False)))
        yield family
        yield from _of_memory(self._families)
        yield from _of_versions(self._families, versions)


def _closed_connections(client: Any, registry: Any) -> Any:
    return client.Counter(
        "hotbed_grpc_closed_connections",
        "Connections of gRPC that were closed because of the frames that they sent",
        registry=registry,
    )


def model_status(model: MeasuredModel) -> dict[str, Any]:
    """Return the state of a model in this process.

    Durations are in seconds, moments are Unix times; unknown values are None.
    """
    current = model.served
    status: dict[str, Any] = {
        "digest": "",
        "published": None,
        "learned": None,
        "since": None,
        "cache": None if model.caches is None else model.caches.status(),
    }
    if current is not None:
        version = current.version
        status |= {
            "digest": version.digest,
            "published": version.published,
            "learned": version.learned,
            "since": current.since,
        }
    log = model.log
    return {
        **status,
        "log": None if log is None else {"logged": log.logged, "dropped": log.dropped},
        "routes": routes_status(model),
        "swaps": model.swaps,
        "problems": model.problems,
        "rows": model.rows,
        "batches": model.batches,
        **asdict(model.counts),
        "now": time.time(),
        "waiting": model.waiting_rows,
        "seconds": list(model.seconds),
    }


def combine_statuses(statuses: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the state of each model over all processes, from `Models.status` of each process.

    Counts are sums, latencies are over the requests of all processes, and the version is that of
    the process that is furthest behind.
    """
    by_name = dict[str, list[Mapping[str, Any]]]()
    for status in itertools.chain.from_iterable(statuses):
        by_name.setdefault(status["name"], []).append(status)
    return [_combine(each) for each in by_name.values()]


_SUMS = (
    "problems",
    "rows",
    "batches",
    "waiting",
    "answered",
    "answered_seconds",
    "refused",
    "refused_seconds",
    "scored",
    "queue_seconds",
    "compute_seconds",
    "nonfinite",
)


def _combine(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    behind = min(statuses, key=_progress)
    seconds = sorted(itertools.chain.from_iterable(status["seconds"] for status in statuses))
    caches = [status["cache"] for status in statuses if status["cache"] is not None]
    cache = None
    if caches:
        cache = {name: sum(counts[name] for counts in caches) for name in caches[0]}
    logs = [status["log"] for status in statuses if status["log"] is not None]
    log = None
    if logs:
        log = {name: sum(counts[name] for counts in logs) for name in logs[0]}
    return {
        **{name: value for name, value in behind.items() if name != "seconds"},
        **{name: sum(status[name] for status in statuses) for name in _SUMS},
        "reason": next((status["reason"] for status in statuses if status["reason"]), ""),
        "swaps": max(status["swaps"] for status in statuses),  # each process makes all of them
        "last_scored": max(status["last_scored"] for status in statuses),
        "cache": cache,
        "log": log,
        "routes": combine_routes([status["routes"] for status in statuses]),
        "p50": _quantile(seconds, 0.5),
        "p99": _quantile(seconds, 0.99),
    }


def _progress(status: Mapping[str, Any]) -> tuple[bool, float, float]:
    """The least of several is the process that is furthest behind."""
    return (status["state"] == "READY", status["published"] or 0, -(status["since"] or 0))


def _quantile(ordered: Sequence[float], part: float) -> float | None:
    if not ordered:
        return None
    return ordered[int(len(ordered) * part)]


Read: TypeAlias = "Callable[[MeasuredModel], float | None]"


def _cache(name: str) -> Read:
    return lambda model: None if model.caches is None else model.caches.status()[name]


def _hit_rate(model: MeasuredModel) -> float | None:
    if model.caches is None:
        return None
    counts = model.caches.status()
    return counts["hits"] / max(1, counts["hits"] + counts["misses"])


def _log(read: Callable[[MeasuredLog], float]) -> Read:
    return lambda model: None if model.log is None else read(model.log)


_BUCKETS = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.02,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
_DAMAGED = "Whether a file of the served version was found damaged, and is not mended yet"
_GAUGES: list[tuple[str, str, str, Read]] = [
    ("model_ready", "Gauge", "Whether the model answers", lambda model: float(model.ready)),
    (
        "model_swaps",
        "Counter",
        "Versions that took the place of another",
        lambda model: model.swaps,
    ),
    (
        "model_problems",
        "Counter",
        "Versions that could not be served, gaps and forks",
        lambda model: model.problems,
    ),
    (
        "model_damaged",
        "Gauge",
        _DAMAGED,
        lambda model: float(bool(model.damage or model.held_damage)),
    ),
    ("waiting_rows", "Gauge", "Candidates in the queue", lambda model: model.waiting_rows),
    ("batches", "Counter", "Batches that were scored", lambda model: model.batches),
    ("scored_rows", "Counter", "Candidates that were scored", lambda model: model.rows),
    (
        "nonfinite_scores",
        "Counter",
        "Scores that are NaN or infinite",
        lambda model: model.counts.nonfinite,
    ),
    ("logged_requests", "Counter", "Requests in the request log", _log(lambda log: log.logged)),
    (
        "log_dropped_requests",
        "Counter",
        "Requests that are not in the request log, since it was too slow or could not be written",
        _log(lambda log: log.dropped),
    ),
    ("scoring_seconds", "Counter", "Seconds spent scoring", lambda model: model.batch_seconds),
    ("cache_hits", "Counter", "Distinct ids of requests whose row the caches held", _cache("hits")),
    (
        "cache_misses",
        "Counter",
        "Distinct ids of requests whose row they did not hold",
        _cache("misses"),
    ),
    ("cache_late", "Counter", "Misses whose row came too late and read as default", _cache("late")),
    ("cache_hit_rate", "Gauge", "Share of hits since the start", _hit_rate),
    ("cache_rows", "Gauge", "Rows that the caches hold", _cache("rows")),
    ("cache_bytes", "Gauge", "Memory that they hold", _cache("bytes")),
    ("cache_fetches", "Counter", "How often the store was asked", _cache("fetches")),
    (
        "cache_fetch_seconds",
        "Counter",
        "Seconds that requests waited for the store",
        _cache("fetch_seconds"),
    ),
]
_VERSION_GAUGES: list[tuple[str, str, Callable[[ModelVersion, float | None], float | None]]] = [
    ("model_version", "The version that is served", lambda version, since: version.version),
    (
        "model_age_seconds",
        "How long ago what is served was published",
        lambda version, since: _between(version.published, time.time()),
    ),
    (
        "model_delay_seconds",
        "How long what is served took from published to served",
        lambda version, since: _between(version.published, since),
    ),
    (
        "model_freshness_seconds",
        "How long what is served took from its newest event to served",
        lambda version, since: _between(version.learned, since),
    ),
]


def _of_versions(
    families: Any, versions: Sequence[tuple[str, ModelVersion, float | None]]
) -> Iterator[Any]:
    """Yield the gauges of `versions`: name of the model, version, and since when it is served."""
    for name, text, read in _VERSION_GAUGES:
        family = families.GaugeMetricFamily(f"hotbed_{name}", text, labels=["model"])
        for model, version, since in versions:
            value = read(version, since)
            if value is not None:
                family.add_metric([model], value)
        yield family


def _of_memory(families: Any) -> Iterator[Any]:
    """Yield the limit of memory that holds for this process, and how much of it is in use."""
    for limit in memory_limits()[:1]:
        yield families.GaugeMetricFamily(
            "hotbed_memory_used_bytes", "Memory in use below the limit", limit.used_bytes
        )
        yield families.GaugeMetricFamily(
            "hotbed_memory_limit_bytes", "Above it the kernel ends processes", limit.limit_bytes
        )


def _between(start: float | None, end: float | None) -> float | None:
    if start is None or end is None:
        return None
    return max(0.0, end - start)


def _client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise MissingExtra(
            "serving needs prometheus-client, which is not installed. "
            "Run pip install hotbed[serve]."
        ) from error
    return prometheus_client
