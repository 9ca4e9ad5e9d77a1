# SPDX-License-Identifier: Apache-2.0
"""The report: one file, no network, every plot of what happened."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.metrics.chart import ticks
from hotbed.training.report import write_report
from hotbed.training.watch import History


def test_the_report_shows_loss_stream_tables_and_flows_and_fetches_nothing(
    tmp_path: Path, dataset: Any, network: Any
) -> None:
    model = hb.RecModel(network(admit=hb.MinCount(2), evict=hb.Ttl(seconds=300)), "bce", "adam", ["auc"])
    evict = hb.callbacks.Evict(step_interval=4)
    histories = {"train": model.fit(dataset(2048), dataset(256), 2, evict, progress=False)}
    histories["stream"] = model.fit(dataset(4096, 1), callbacks=evict, progressive=True, progress=False)
    page = write_report(tmp_path / "report.html", histories, title="A <title>", facts={"films": 9742},
                        summary=model.summary()).read_text()  # fmt: skip
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert {"Loss, train", "Loss, stream", "Validation auc", "AUC over event time", "Rows", "user", "item"} <= set(
        titles
    )
    assert "A &lt;title&gt;" in page
    assert "9,742" in page
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", page)
    charts = [json.loads(unescape(text)) for text in re.findall(r'data-chart="(.*?)"', page)]
    flows = {series["name"] for chart in charts for series in chart["series"]}
    assert {"admitted", "refused", "evicted"} <= flows
    assert all(len(series["x"]) == len(series["y"]) > 0 for chart in charts for series in chart["series"])


def test_a_history_without_anything_is_still_a_page(tmp_path: Path) -> None:
    assert "</html>" in write_report(tmp_path / "report.html", {"train": History()}).read_text()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.7, 0.7), (0.0, 0.0), (-3.0, 12345.0), (0.6931, 0.6932)])
def test_ticks_are_few_and_enclose_the_values(low: float, high: float) -> None:
    steps = ticks(low, high)
    assert steps[0] <= low <= high <= steps[-1]
    assert 2 <= len(steps) <= 8
