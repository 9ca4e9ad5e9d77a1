# SPDX-License-Identifier: Apache-2.0
"""Metrics and state of the versions of a model: the rule in force, and what each answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from hotbed.serving.server.traffic import BUCKETS, ShadowCounts, VersionTraffic
from hotbed.serving.stores.base import ModelVersion, RoutesInForce

_COUNTS = (
    ("requests", "Requests that the version scored"),
    ("rows", "Candidates that the version scored"),
    ("errors", "Requests that the version could not score"),
)
_SHADOW_COUNTS = (
    ("requests", "Answered requests that the shadow scored, too"),
    ("rows", "Candidates that the shadow scored"),
    (
        "dropped",
        "Requests of the sample that the shadow did not score: too many, or its rule had ended",
    ),
    ("errors", "Requests that the shadow could not score"),
    ("different", "Candidates whose score by the shadow differs by more than 1e-6"),
    ("difference_sum", "Sum of the absolute differences of their scores"),
)


class RoutedVersion(Protocol):
    """A version of a role."""

    @property
    def version(self) -> ModelVersion: ...


class RoutedTraffic(Protocol):
    """What answers the requests of a model."""

    @property
    def roles(self) -> Mapping[str, RoutedVersion]: ...
    @property
    def in_force(self) -> RoutesInForce | None: ...


class RoutedModel(Protocol):
    """What is read of a model; see `scoring.model.Model`."""

    name: str
    traffic: VersionTraffic
    unsplit: int
    shadow_counts: ShadowCounts
    routes_problem: str
    routing_problem: str

    @property
    def routing(self) -> RoutedTraffic: ...


def routes_status(model: RoutedModel) -> dict[str, Any]:
    """Return the rule of a model, its versions by role, and its counts, as plain values."""
    routing = model.routing
    in_force = routing.in_force
    roles = {
        role: {
            "version": served.version.version,
            "digest": served.version.digest,
            "published": served.version.published,
        }
        for role, served in routing.roles.items()
    }
    return {
        "revision": None if in_force is None else in_force.revision,
        "rule": {} if in_force is None else in_force.rule,
        "problem": " ".join(filter(None, (model.routing_problem, model.routes_problem))),
        "roles": roles,
        "traffic": model.traffic.status(),
        "unsplit": model.unsplit,
        "shadow": asdict(model.shadow_counts),
    }


def combine_routes(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state over all processes: counts are sums, the rule is the oldest in force."""
    oldest = min(statuses, key=_revision)
    traffic = dict[tuple[int, str], dict[str, Any]]()
    for status in statuses:
        for counts in status["traffic"]:
            key = (counts["version"], counts["route"])
            traffic[key] = _sum(traffic[key], counts) if key in traffic else dict(counts)
    shadow = dict(statuses[0]["shadow"])
    for status in statuses[1:]:
        most = max(shadow["difference_most"], status["shadow"]["difference_most"])
        shadow = {name: shadow[name] + count for name, count in status["shadow"].items()}
        shadow["difference_most"] = most
    return {
        **oldest,
        "problem": next((each["problem"] for each in statuses if each["problem"]), ""),
        "traffic": list(traffic.values()),
        "unsplit": sum(status["unsplit"] for status in statuses),
        "shadow": shadow,
    }


def _revision(status: Mapping[str, Any]) -> int:
    """Return the revision in force, -1 without one."""
    revision: int | None = status["revision"]
    return -1 if revision is None else revision


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a version in two processes together."""
    total = dict(one)
    for name, count in other.items():
        if name == "buckets":
            total[name] = [a + b for a, b in zip(one[name], count, strict=True)]
        elif name not in ("version", "route"):
            total[name] = one[name] + count
    return total


def route_families(families: Any, models: Sequence[RoutedModel]) -> Iterator[Any]:
    """Yield the families of metrics by model, version and route."""
    traffic = [(model, model.traffic.status()) for model in models]
    labels = ["model", "version", "route"]
    for name, text in _COUNTS:
        counter = families.CounterMetricFamily(f"hotbed_version_{name}", text, labels=labels)
        for model, entries in traffic:
            for entry in entries:
                counter.add_metric(_labels(model, entry), entry[name])
        yield counter
    seconds = families.HistogramMetricFamily(
        "hotbed_version_seconds", "Requests, by the time from decoded to scored", labels=labels
    )
    means = families.GaugeMetricFamily(
        "hotbed_version_mean_score", "Mean of the first output over candidates", labels=labels
    )
    shares = families.GaugeMetricFamily(
        "hotbed_version_share", "Share of the requests of its model that it scored", labels=labels
    )
    for model, entries in traffic:
        total = sum(entry["requests"] for entry in entries)
        for entry in entries:
            seconds.add_metric(_labels(model, entry), _buckets(entry["buckets"]), entry["seconds"])
            if entry["scores"]:
                means.add_metric(_labels(model, entry), entry["score_sum"] / entry["scores"])
            if total:
                shares.add_metric(_labels(model, entry), entry["requests"] / total)
    yield from (seconds, means, shares)
    yield from _of_rules(families, models)


def _of_rules(families: Any, models: Sequence[RoutedModel]) -> Iterator[Any]:
    revisions = families.GaugeMetricFamily(
        "hotbed_routes_revision", "Revision of the rule in force", labels=["model"]
    )
    problems = families.GaugeMetricFamily(
        "hotbed_routes_problem", "Whether the newest rule is not in force", labels=["model"]
    )
    unsplit = families.CounterMetricFamily(
        "hotbed_unsplit_requests",
        "Requests that a canary could not answer: they name no user",
        labels=["model"],
    )
    for model in models:
        status = routes_status(model)
        if status["revision"] is not None:
            revisions.add_metric([model.name], status["revision"])
        problems.add_metric([model.name], float(bool(status["problem"])))
        unsplit.add_metric([model.name], model.unsplit)
    yield from (revisions, problems, unsplit)
    for name, text in _SHADOW_COUNTS:
        counter = families.CounterMetricFamily(f"hotbed_shadow_{name}", text, labels=["model"])
        for model in models:
            counter.add_metric([model.name], getattr(model.shadow_counts, name))
        yield counter


def _labels(model: RoutedModel, entry: Mapping[str, Any]) -> list[str]:
    return [model.name, str(entry["version"]), entry["route"]]


def _buckets(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Return the bounds of a histogram, each with the number of requests up to it."""
    bounds = [*map(str, BUCKETS), "+Inf"]
    buckets = []
    total = 0
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
