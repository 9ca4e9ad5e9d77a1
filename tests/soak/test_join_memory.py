# SPDX-License-Identifier: Apache-2.0
"""Ten million open impressions under a memory budget of 500 MB: what they take, and their deltas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def test_ten_million_open_impressions_stay_within_their_budgets(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "join.py"
    command = [sys.executable, str(script), "--memory", "10000000", "--budget", str(500 << 20)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    answer = json.loads(output)
    print(answer)
    assert answer["open"] >= 10_000_000
    assert answer["counted_mb"] <= answer["budget_mb"]
    assert answer["disk_to_arrow"] <= 1.3
    assert answer["rss_anon_mb"] - answer["rss_start_mb"] <= answer["budget_mb"]
    arrow_of_delta = answer["arrow_mb"] * answer["delta_rows"] / answer["open"]
    assert answer["delta_mb"] <= 1.3 * arrow_of_delta
