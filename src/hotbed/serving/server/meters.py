# SPDX-License-Identifier: Apache-2.0
"""What servers tell Prometheus: requests by how they ended and how long they took, and the state of
each model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from hotbed.errors import ConfigError, HotbedError, MissingExtra

if TYPE_CHECKING:
    from hotbed.serving.cache import EmbeddingCache
    from hotbed.serving.server.models import Model, Models
    from hotbed.serving.stores.base import ModelVersion


class Meters:
    """What Prometheus is told. Needs prometheus-client."""

    def __init__(self, models: Models) -> None:
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
        self._children: dict[Any, Any] = {}

    def ended(
        self, name: str, protocol: str, started: float, error: BaseException | None = None
    ) -> None:
        """One request for predictions ended, with an error or an answer; `started` by
        `time.perf_counter`.
        """
        model = self._models.find(name)
        name = "" if model is None else name  # names that nobody serves make no series
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
        else:
            outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        self._child(self._requests, name, protocol, outcome).inc()

    def watch(self, name: str, protocol: str, started: float, future: asyncio.Future[Any]) -> None:
        """As `ended`, once the future is done."""

        def told(done: asyncio.Future[Any]) -> None:
            self.ended(
                name,
                protocol,
                started,
                asyncio.CancelledError() if done.cancelled() else done.exception(),
            )

        future.add_done_callback(told)

    def _child(self, family: Any, *labels: str) -> Any:
        """`family.labels(*labels)`, remembered."""
        key = (family, *labels)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = family.labels(*labels)
        return found

    def text(self) -> bytes:
        """All of it, in the text format of Prometheus."""
        return bytes(self._text(self._registry))

    def collect(self) -> Iterator[Any]:
        """Called by prometheus-client for each scrape."""
        for name, kind, text, read in _GAUGES:
            family = getattr(self._families, f"{kind}MetricFamily")(
                f"hotbed_{name}", text, labels=["model"]
            )
            for model in self._models:
                value = read(model)
                if value is not None:
                    family.add_metric([model.name], value)
            yield family
        found = [
            (model.name, now.version, now.since)
            for model in self._models
            if (now := model._current) is not None
        ]
        yield from _of_versions(self._families, found)


class CallMeters:
    """What Prometheus is told of a parameter server: calls, rows and versions. Needs
        prometheus-client.

    `newest`: the version of each model that there is, by name. `since`: when it was taken, in Unix
    seconds, where that is known.
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
        self.since = dict[str, float]()

    @contextlib.contextmanager
    def listening(self, host: str, port: int | None) -> Iterator[int | None]:
        """Answer scrapes at a port (0: a free one; None: none), and give its number. Raises
        ConfigError where it is taken.
        """
        if port is None:
            yield None
            return
        try:
            server, thread = self._start(port, host, self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics_port: cannot listen — received {host}:{port}, {error} — give a free "
                "port, or 0"
            ) from error
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    @contextlib.contextmanager
    def timed(self, call: str, context: Any) -> Iterator[None]:
        """Count a call, by what its `context` says once it has ended."""
        started = time.perf_counter()
        code = "OK"
        try:
            yield
        except BaseException:
            found = context.code()
            code = "CANCELLED" if found is None else found.name
            raise
        finally:
            self._seconds.labels(call).observe(time.perf_counter() - started)
            self._calls.labels(call, code).inc()

    def asked(self, model: str, rows: int) -> None:
        """Rows of a model were asked for."""
        self._rows.labels(model).inc(rows)

    def collect(self) -> Iterator[Any]:
        """Called by prometheus-client for each scrape."""
        found = [(name, version, self.since.get(name)) for name, version in self._newest().items()]
        yield from _of_versions(self._families, found)


def status_of(model: Model) -> dict[str, Any]:
    """What this process tells of a model: times in seconds, moments as Unix time; None where
    something is not known.
    """
    now = model._current
    cache = model.cache
    found: dict[str, Any] = {
        "digest": "",
        "published": None,
        "learned": None,
        "since": None,
        "cache": None,
    }
    if now is not None:
        version = now.version
        found |= {
            "digest": version.digest,
            "published": version.published,
            "learned": version.learned,
            "since": now.since,
        }
    if cache is not None:
        found["cache"] = {
            "hits": cache.hits,
            "misses": cache.misses,
            "late": cache.late,
            "rows": cache.num_rows,
            "bytes": cache.num_bytes,
            "fetches": cache.fetches,
            "fetch_seconds": cache.fetch_seconds,
        }
    return {
        **found,
        "swaps": model.swaps,
        "problems": model.problems,
        "rows": model.rows,
        "batches": model.batches,
        **asdict(model.counts),
        "now": time.time(),
        "waiting": model.waiting_rows,
        "seconds": list(model.seconds),
    }


def together(found: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What the page shows of each model, from what every process tells of its own
    (`Models.status`): counts in sum, latencies of the requests of all, and the version of the
    process that is furthest behind.
    """
    by_name = dict[str, list[Mapping[str, Any]]]()
    for one in itertools.chain.from_iterable(found):
        by_name.setdefault(one["name"], []).append(one)
    return [_together(each) for each in by_name.values()]


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
)


def _together(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    behind = min(
        each, key=lambda one: (one["state"] == "READY", one["published"] or 0, -(one["since"] or 0))
    )
    seconds = sorted(itertools.chain.from_iterable(one["seconds"] for one in each))
    middle, high = (
        (seconds[int(len(seconds) * part)] for part in (0.5, 0.99)) if seconds else (None, None)
    )
    caches = [one["cache"] for one in each if one["cache"] is not None]
    return {
        **{name: value for name, value in behind.items() if name != "seconds"},
        **{name: sum(one[name] for one in each) for name in _SUMS},
        "reason": next((one["reason"] for one in each if one["reason"]), ""),
        "swaps": max(one["swaps"] for one in each),  # each process makes them all
        "last_scored": max(one["last_scored"] for one in each),
        "cache": {name: sum(one[name] for one in caches) for name in caches[0]} if caches else None,
        "p50": middle,
        "p99": high,
    }


Read: TypeAlias = "Callable[[Model], float | None]"


def _cache(read: Callable[[EmbeddingCache], float]) -> Read:
    return lambda model: None if model.cache is None else read(model.cache)


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
    ("waiting_rows", "Gauge", "Candidates in the queue", lambda model: model.waiting_rows),
    ("batches", "Counter", "Batches that were scored", lambda model: model.batches),
    ("scored_rows", "Counter", "Candidates that were scored", lambda model: model.rows),
    ("scoring_seconds", "Counter", "Seconds spent scoring", lambda model: model.batch_seconds),
    (
        "cache_hits",
        "Counter",
        "Distinct ids of requests whose row the cache held",
        _cache(lambda cache: cache.hits),
    ),
    (
        "cache_misses",
        "Counter",
        "Distinct ids of requests whose row it did not hold",
        _cache(lambda cache: cache.misses),
    ),
    (
        "cache_late",
        "Counter",
        "Misses whose row came too late and read as default",
        _cache(lambda cache: cache.late),
    ),
    (
        "cache_hit_rate",
        "Gauge",
        "Share of hits since the start",
        _cache(lambda cache: cache.hit_rate),
    ),
    ("cache_rows", "Gauge", "Rows that the cache holds", _cache(lambda cache: cache.num_rows)),
    ("cache_bytes", "Gauge", "Memory that it holds", _cache(lambda cache: cache.num_bytes)),
    (
        "cache_fetches",
        "Counter",
        "How often the store was asked",
        _cache(lambda cache: cache.fetches),
    ),
    (
        "cache_fetch_seconds",
        "Counter",
        "Seconds that requests waited for the store",
        _cache(lambda cache: cache.fetch_seconds),
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
    families: Any, found: Sequence[tuple[str, ModelVersion, float | None]]
) -> Iterator[Any]:
    """Of models by name: the version, and since when it is served."""
    for name, text, read in _VERSION_GAUGES:
        family = families.GaugeMetricFamily(f"hotbed_{name}", text, labels=["model"])
        for model, version, since in found:
            value = read(version, since)
            if value is not None:
                family.add_metric([model], value)
        yield family


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise MissingExtra(
            "serving needs prometheus-client — it is not installed — pip install hotbed[serve]"
        ) from error
    return prometheus_client
