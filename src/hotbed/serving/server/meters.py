# SPDX-License-Identifier: Apache-2.0
"""What a server tells Prometheus: requests by how they ended and how long they took, and the state of each model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from hotbed.errors import HotbedError, MissingExtra

if TYPE_CHECKING:
    from hotbed.serving.cache import EmbeddingCache
    from hotbed.serving.server.models import Current, Model, Models


class Meters:
    """What Prometheus is told. Needs prometheus-client."""

    def __init__(self, models: Models) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram, core, generate_latest
        except ImportError as error:
            raise MissingExtra(
                "serving needs prometheus-client — it is not installed — pip install hotbed[serve]"
            ) from error
        self._models, self._families, self._registry, self._text = models, core, CollectorRegistry(), generate_latest
        self._registry.register(self)
        labels = ["model", "protocol"]
        self._seconds = Histogram("hotbed_request_seconds", "Requests that were answered, by how long it took", labels,
                                  registry=self._registry, buckets=_BUCKETS)  # fmt: skip
        self._requests = Counter("hotbed_requests", "Requests for predictions, by how they ended", [*labels, "outcome"],
                                 registry=self._registry)  # fmt: skip
        self._children: dict[Any, Any] = {}

    def ended(self, name: str, protocol: str, started: float, error: BaseException | None = None) -> None:
        """One request for predictions ended, with an error or an answer; `started` by `time.perf_counter`."""
        model = self._models.find(name)
        name = "" if model is None else name  # names that nobody serves make no series
        if error is None:
            seconds = time.perf_counter() - started
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
            self.ended(name, protocol, started, asyncio.CancelledError() if done.cancelled() else done.exception())

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
            family = getattr(self._families, f"{kind}MetricFamily")(f"hotbed_{name}", text, labels=["model"])
            for model in self._models:
                value = read(model)
                if value is not None:
                    family.add_metric([model.name], value)
            yield family


def status_of(model: Model) -> dict[str, Any]:
    """What the page shows of a model: times in seconds, moments as Unix time; None where something is not known."""
    seconds, now, cache = sorted(model.seconds), model._current, model.cache
    middle, high = (seconds[int(len(seconds) * part)] for part in (0.5, 0.99)) if seconds else (None, None)
    found: dict[str, Any] = {"digest": "", "published": None, "learned": None, "since": None, "cache": None}
    if now is not None:
        version = now.version
        found |= {
            "digest": version.digest,
            "published": version.published,
            "learned": version.learned,
            "since": now.since,
        }
    if cache is not None:
        found["cache"] = {"hits": cache.hits, "misses": cache.misses, "late": cache.late, "rows": cache.num_rows,
                          "bytes": cache.num_bytes, "fetches": cache.fetches, "fetch_seconds": cache.fetch_seconds}  # fmt: skip
    return {**found, "swaps": model.swaps, "problems": model.problems, "rows": model.rows, "batches": model.batches,
            "now": time.time(), "waiting": model.waiting_rows, "p50": middle, "p99": high}  # fmt: skip


Read: TypeAlias = "Callable[[Model], float | None]"


def _between(start: str, end: Callable[[Current], float]) -> Read:
    """Seconds from a moment of the version that is served, where it is known."""

    def read(model: Model) -> float | None:
        now = model._current
        began = None if now is None else getattr(now.version, start)
        return None if now is None or began is None else max(0.0, end(now) - began)

    return read


def _cache(read: Callable[[EmbeddingCache], float]) -> Read:
    return lambda model: None if model.cache is None else read(model.cache)


_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_GAUGES: list[tuple[str, str, str, Read]] = [
    ("model_ready", "Gauge", "Whether the model answers", lambda model: float(model.ready)),
    ("model_version", "Gauge", "The version that is served",
     lambda model: None if model._current is None else model._current.version.version),
    ("model_age_seconds", "Gauge", "How long ago what is served was published", _between("published", lambda now: time.time())),
    ("model_delay_seconds", "Gauge", "How long what is served took from published to served",
     _between("published", lambda now: now.since)),
    ("model_freshness_seconds", "Gauge", "How long what is served took from its newest event to served",
     _between("learned", lambda now: now.since)),
    ("model_swaps", "Counter", "Versions that took the place of another", lambda model: model.swaps),
    ("model_problems", "Counter", "Versions that could not be served, gaps and forks", lambda model: model.problems),
    ("waiting_rows", "Gauge", "Candidates in the queue", lambda model: model.waiting_rows),
    ("batches", "Counter", "Batches that were scored", lambda model: model.batches),
    ("scored_rows", "Counter", "Candidates that were scored", lambda model: model.rows),
    ("scoring_seconds", "Counter", "Seconds spent scoring", lambda model: model.batch_seconds),
    ("cache_hits", "Counter", "Distinct ids of requests whose row the cache held", _cache(lambda cache: cache.hits)),
    ("cache_misses", "Counter", "Distinct ids of requests whose row it did not hold", _cache(lambda cache: cache.misses)),
    ("cache_late", "Counter", "Misses whose row came too late and read as default", _cache(lambda cache: cache.late)),
    ("cache_hit_rate", "Gauge", "Share of hits since the start", _cache(lambda cache: cache.hit_rate)),
    ("cache_rows", "Gauge", "Rows that the cache holds", _cache(lambda cache: cache.num_rows)),
    ("cache_bytes", "Gauge", "Memory that it holds", _cache(lambda cache: cache.num_bytes)),
    ("cache_fetches", "Counter", "How often the store was asked", _cache(lambda cache: cache.fetches)),
    ("cache_fetch_seconds", "Counter", "Seconds that requests waited for the store", _cache(lambda cache: cache.fetch_seconds)),
]  # fmt: skip
