# SPDX-License-Identifier: Apache-2.0
"""The metrics of all processes of a server, as one text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merge_metrics(texts: Mapping[str, str], starts: Mapping[str, int]) -> str:
    """Return the metrics of several processes, each sample with the label `worker`.

    Args:
        texts: the text of each process that answered: "parent", or the number of a worker.
        starts: how often each worker was started, by its number.
    """
    processes = _Processes(texts, starts)
    return generate_latest(processes).decode()


class _Processes(Collector):
    def __init__(self, texts: Mapping[str, str], starts: Mapping[str, int]) -> None:
        self._texts = texts
        self._starts = starts

    def collect(self) -> Iterator[Metric]:
        merged = dict[str, Metric]()
        for process, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                metric = merged.get(family.name)
                if metric is None:
                    metric = Metric(family.name, family.documentation, family.type)
                    merged[family.name] = metric
                for sample in family.samples:
                    labels = {"worker": process, **sample.labels}
                    metric.add_sample(sample.name, labels, sample.value)
        yield from merged.values()
        starts = CounterMetricFamily(
            "hotbed_worker_starts", "How often a worker was started", labels=["worker"]
        )
        is_up = GaugeMetricFamily("hotbed_worker_up", "Whether a worker answers", labels=["worker"])
        for worker, count in self._starts.items():
            starts.add_metric([worker], count)
            answers = worker in self._texts
            is_up.add_metric([worker], int(answers))
        yield starts
        yield is_up
