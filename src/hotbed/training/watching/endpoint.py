# SPDX-License-Identifier: Apache-2.0
"""Endpoint: readings at an HTTP address, for Prometheus, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotbed.errors import ConfigError, MissingExtra


@dataclass(frozen=True)
class Reading:
    """One number to watch.

    Attributes:
        name: in the form of Prometheus, without `hotbed_`.
        value: the number.
        labels: what distinguishes readings of the same name, such as the table.
        total: True for a counter, which only rises while a process lives.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    total: bool = False


class Endpoint:
    """Serves the newest `readings` at http://host:port/metrics, from a thread of its own.

    `port` 0 takes a free port; `self.port` is the port in use. Raises MissingExtra without
    prometheus-client, and ConfigError if the port is taken.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        try:
            from prometheus_client import CollectorRegistry, core, start_http_server
        except ImportError as error:
            raise MissingExtra(
                "Prometheus: prometheus-client is not installed. "
                "Run `pip install hotbed[prometheus]`."
            ) from error
        self._families = core
        self._readings = tuple[Reading, ...]()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"Prometheus.port: cannot listen, got {host}:{port}, {error.strerror}. "
                "Give a free port, or 0."
            ) from error
        self.port: int = self._server.server_port

    def show(self, readings: Iterable[Reading]) -> None:
        """Replace the readings that a scrape returns."""
        self._readings = tuple(readings)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; prometheus-client calls it for each scrape, on its thread."""
        families: dict[str, Any] = {}
        for reading in self._readings:
            labels = list(reading.labels)
            if reading.name not in families:
                kind = "CounterMetricFamily" if reading.total else "GaugeMetricFamily"
                text = reading.name.replace("_", " ")
                families[reading.name] = getattr(self._families, kind)(
                    f"hotbed_{reading.name}", text, labels=labels
                )
            families[reading.name].add_metric(
                [reading.labels[label] for label in labels], reading.value
            )
        yield from families.values()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
