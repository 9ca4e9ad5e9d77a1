# SPDX-License-Identifier: Apache-2.0
"""The metrics of several processes are one text, each sample with the process that it is of."""

from __future__ import annotations

from pathlib import Path

from hotbed.serving.workers.metrics import merge_metrics

GOLDEN = Path(__file__).parents[2] / "golden" / "worker_metrics"


def read(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_metrics_of_workers_are_merged_into_the_golden_text() -> None:
    texts = {name: read(name) for name in ("parent", "1", "2")}
    assert merge_metrics(texts, {"1": 1, "2": 3}) == read("merged")


def test_a_worker_that_does_not_answer_is_down_and_has_no_other_samples() -> None:
    text = merge_metrics({"parent": read("parent"), "1": read("1")}, {"1": 1, "2": 4})
    lines = [line for line in text.splitlines() if 'worker="2"' in line]
    assert lines == [
        'hotbed_worker_starts_total{worker="2"} 4.0',
        'hotbed_worker_up{worker="2"} 0.0',
    ]


def test_labels_with_quotes_and_newlines_survive_a_merge() -> None:
    text = '# HELP a_b A "b"\\n\n# TYPE a_b gauge\na_b{model="x\\"y\\\\z\\n,worker=1"} 1.0\n'
    merged = merge_metrics({"1": text}, {})
    assert 'a_b{model="x\\"y\\\\z\\n,worker=1",worker="1"} 1.0\n' in merged
