# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of planted worlds say of models holds: they are run here, smaller."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("one_thread")]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmark(name: str) -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_conversions_over_all_samples_have_not_the_bias_of_clicked_samples() -> None:
    selection = benchmark("selection")
    planted = selection["world"](1000, 200_000, 0)
    bias = {}
    for kind in ("DNN of clicks", "ESMM", "AITM"):
        rates = selection["rates_of"](kind, planted, 0)
        bias[kind] = rates.mean() / planted.buy_rate.mean() - 1
    assert bias["DNN of clicks"] > 0.15
    assert abs(bias["ESMM"]) < 0.06
    assert abs(bias["AITM"]) < 0.06


def test_with_places_clicks_teach_the_order_that_unbiased_labels_teach() -> None:
    positions = benchmark("positions")
    relevance, columns = positions["world"](30, 60, 400_000, 0)

    def served(label: str, *roles: Any) -> float:
        scores = positions["order_of"](label, roles, columns, relevance.shape)
        return float(positions["ndcg"](scores, relevance))

    unbiased = served("wanted")
    factor = served("click", hb.DisplayPosition("position", form="factor", size=10))
    assert factor > 0.99 * unbiased
    assert served("click") < 0.97 * unbiased
