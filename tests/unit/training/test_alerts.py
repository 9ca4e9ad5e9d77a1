# SPDX-License-Identifier: Apache-2.0
"""The rules and the dashboard in deploy/ name metrics that trainers and servers have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.serving.server.meters import Meters
from hotbed.testing import FakeStream
from hotbed.training.watching.readings import readings

from .conftest import SCHEMA, columns

ROOT = Path(__file__).parents[3]
RULES = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
DASHBOARD = json.loads((ROOT / "deploy/dashboard.json").read_text())
NAME = re.compile(r"hotbed_\w+")


def names_in(text: str) -> set[str]:
    """Families of metrics that an expression names."""
    return {name.removesuffix("_bucket") for name in NAME.findall(text)}


class NoModels:
    """A server without models still names its metrics."""

    def find(self, name: str) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names that a trainer and a server show."""
    folder = tmp_path_factory.mktemp("states")
    shown: set[str] = set()

    class Look:
        def on_step_end(self, run: Any) -> None:
            for reading in readings(run):
                shown.add(f"hotbed_{reading.name}" + "_total" * reading.total)

    tables = hb.make_tables(SCHEMA, 4)
    model = hb.RecModel(hb.models.LR(SCHEMA, tables), "bce", hb.Adam(), ["auc"])
    publisher = hb.PublishDirectory(folder / "published")
    callbacks = [
        hb.callbacks.Windows(samples=32),
        hb.callbacks.Checkpoint(
            folder / "states",
            every_steps=1,
            publish=publisher,
            wait=True,
            gate=hb.checkpoints.PublishGate(),
        ),
        Look(),
    ]
    stream = hb.Dataset(FakeStream(columns(320), then=64, ends=True), SCHEMA, 64)
    model.online_train(stream, callbacks, progress=False)
    text = Meters(NoModels()).text().decode()
    return {"up", *shown, *re.findall(r"^# HELP (hotbed_\w+) ", text, re.M)}


def test_rules_and_panels_name_metrics_that_there_are(metrics: set[str]) -> None:
    rules = [rule for group in RULES for rule in group["rules"]]
    expressions = [rule["expr"] for rule in rules]
    for panel in DASHBOARD["panels"]:
        expressions += [target["expr"] for target in panel["targets"]]
    assert all(names_in(text) or "up{" in text for text in expressions)
    assert set().union(*map(names_in, expressions)) - metrics == set()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 15
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_page_says_what_to_do_at_each_alert() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    alerts = {rule["alert"] for group in RULES for rule in group["rules"]}
    assert set(re.findall(r"^\| `(Hotbed\w+)` \|", page, re.M)) == alerts


def test_metrics_on_the_pages_are_metrics_that_there_are(metrics: set[str]) -> None:
    """Those of saves, versions, sources and memory, which alerts are made of."""
    page = (ROOT / "docs/watching.md").read_text()
    for name in sorted(metrics):
        if re.search(r"save|publication|reached|memory|gate", name):
            short = name.removeprefix("hotbed_last_save").removeprefix("hotbed_last_publication")
            assert f"`{name}`" in page or f"`…{short}`" in page, name
