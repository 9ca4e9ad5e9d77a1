# SPDX-License-Identifier: Apache-2.0
"""When each file of tests runs, and what it costs: a plugin of pytest.

Files start in the order of their recorded seconds, the longest first, so that no long one is left
for the end. Those that mostly wait, for a broker, say, are spread over the run, so that others use
the processors meanwhile. `make durations` records them. A run says if it took 15 % more CPU time
than recorded.

Each worker collects all files, and begins at another one: pytest leaves each file that it compiles
for the others, so that in a fresh clone each compiles a part of them.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import cpu_seconds_of_forks

RECORD = Path(__file__).with_name("durations.json")
EXCESS = 1.15
START = "start of the workers"
"""The entry of the record for time outside tests: imports and the collection, of all workers."""

Costs = dict[str, list[float]]
"""Wall and CPU seconds by file, children included."""


def in_soak(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return cases for `parametrize`; only `make soak` runs those that are not quick."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.soak]) for case in cases]


def recorded() -> Costs:
    """Return the record of `make durations`."""
    costs: Costs = json.loads(RECORD.read_text())
    return costs


def cpu_seconds() -> float:
    """Return the CPU time of this process, of its children that have ended, and of the forks."""
    return sum(os.times()[:4]) + cpu_seconds_of_forks()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {RECORD.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costing(config), "costing")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """Let each worker begin a folder at another file."""
    if not hasattr(parent.config, "workerinput"):
        return None
    folder: pytest.Dir = Rotated.from_parent(parent, path=path)
    return folder


class Rotated(pytest.Dir):
    """A folder of which a worker collects the first files last, and each worker others."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        files = list(super().collect())
        name = self.config.workerinput["workerid"]
        first = len(files) * int(name.removeprefix("gw")) // self.config.workerinput["workercount"]
        return files[first:] + files[:first]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files by their starts; a file without a record counts as an average one that computes."""
    costs = recorded()
    average = sum(wall for wall, _ in costs.values()) / len(costs)
    files = {file_of(item) for item in items}
    starts = starts_of({name: costs.get(name, [average, average]) for name in files})
    items.sort(key=lambda item: (starts[file_of(item)], file_of(item)))


def starts_of(costs: Costs) -> dict[str, float]:
    """Return after which share of the files of its kind each file starts, by their wall seconds.

    The longest of a kind is first. Files of one kind use less than half of a processor.
    """
    starts = dict[str, float]()
    for mostly_waits in (True, False):
        kind = {
            name: wall for name, (wall, cpu) in costs.items() if (cpu < wall / 2) is mostly_waits
        }
        before = 0.0
        for name in sorted(kind, key=lambda name: (-kind[name], name)):
            starts[name] = before / (sum(kind.values()) or 1.0)
            before += kind[name]
    return starts


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Costing:
    """Measures each file. Workers send what they measured to the process that started them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._costs: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        wall = time.perf_counter()
        cpu = cpu_seconds()
        outcome = yield
        cost = self._costs[file_of(item)]
        cost[0] += time.perf_counter() - wall
        cost[1] += cpu_seconds() - cpu
        return outcome

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            tests = sum(cpu for _, cpu in self._costs.values())
            self._costs[START] = [0.0, cpu_seconds() - tests]
            self._config.workeroutput["costs"] = dict(self._costs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, (wall, cpu) in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self._costs[name][0] += wall
            self._costs[name][1] += cpu

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.option.record_durations:
            costs = {
                name: [round(seconds, 1) for seconds in self._costs[name]]
                for name in sorted(self._costs)
            }
            lines = [f"{json.dumps(name)}: {json.dumps(cost)}" for name, cost in costs.items()]
            RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        record = recorded()
        names = self._costs.keys() & record.keys()
        measured = sum(self._costs[name][1] for name in names)
        before = sum(record[name][1] for name in names)
        terminalreporter.write_line(f"CPU seconds: {measured:.0f}, recorded {before:.0f}")
        if measured > EXCESS * before + 10:
            slower = sorted(names, key=lambda name: record[name][1] - self._costs[name][1])[:5]
            terminalreporter.write_line(
                "The tests cost 15 % more than recorded. The most: "
                + ", ".join(
                    f"{name} +{self._costs[name][1] - record[name][1]:.0f}" for name in slower
                )
                + ". Find out why, or run make durations.",
                yellow=True,
            )
