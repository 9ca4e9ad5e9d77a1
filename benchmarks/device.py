# SPDX-License-Identifier: Apache-2.0
"""All that we want to know of a real device, in at most ten minutes. Prints one JSON document.

Each section runs in a process of its own, so that a crash or a hang ends that section alone:

doctor      the checks of `hotbed doctor --device`
waits       removes each line that waits, while the device is busy; counts the runs that then fail
sanitizer   some of the checks under torch's sanitizer of streams (CUDA alone)
no_caching  the same checks without the cache of torch's allocator (CUDA alone)
memory      a training after the device was out of memory
speed       DCNv2 on drawn rows on the CPU and the device, whole and by grains: samples a second,
            and where the time of a step went
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch

import hotbed as hb
from hotbed.embedding.device import link
from hotbed.training.device_checks.checks import DeviceChecks, Size
from hotbed.training.devices import find_device

SHORT = Size(steps=3, samples=16, rounds=6, copied_bytes=1 << 14)
TRIES = 5  # runs without a wait, since a fault does not show each time
LIMITS = {
    "doctor": 120,
    "waits": 120,
    "sanitizer": 60,
    "no_caching": 60,
    "memory": 30,
    "speed": 180,
}
"""Seconds after which a section is ended."""
ENVIRONMENTS = {
    "sanitizer": {"TORCH_CUDA_SANITIZER": "1"},
    "no_caching": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}


def doctor(device: torch.device, size: Size) -> Any:
    return [vars(finding) for finding in DeviceChecks(device, size).run()]


def some_checks(device: torch.device, size: Size) -> Any:
    """Return what some checks find, which together reach each wait and each kind of copy."""
    checks = DeviceChecks(device, size)
    return {
        "waits": checks.check_waits(),
        "rows": checks.check_rows(),
        "repeats": checks.check_repeats(),
    }


class RemovableEvent:
    """An event of a link; what one line of link.py waits for can be removed.

    Attributes:
        removed: the number of that line in link.py; None = all wait.
        lines: how often each line has asked for a wait.
    """

    removed: int | None = None
    lines: ClassVar[Counter[int]] = Counter()

    def __init__(self, event: Any) -> None:
        self._event = event

    def record(self, stream: Any = None) -> None:
        self._event.record(stream)

    def elapsed_time(self, later: RemovableEvent) -> float:
        return float(self._event.elapsed_time(later._event))

    def wait(self, stream: Any) -> None:
        if not self._is_removed():
            self._event.wait(stream)

    def synchronize(self) -> None:
        if not self._is_removed():
            self._event.synchronize()

    def _is_removed(self) -> bool:
        line = sys._getframe(2).f_lineno
        self.lines[line] += 1
        return line == self.removed


def waits(device: torch.device, size: Size) -> Any:
    """Return, for each line of link.py that waits, how many of `TRIES` runs fail without it."""
    new_event = link.new_event
    with patch.object(link, "new_event", lambda device: RemovableEvent(new_event(device))):
        return _waits_found(DeviceChecks(device, size))


def _waits_found(checks: DeviceChecks) -> dict[str, Any]:
    checks.check_waits()
    found = {}
    for line in sorted(RemovableEvent.lines):
        RemovableEvent.removed = line
        failures = 0
        for _ in range(TRIES):
            try:
                checks.check_waits()
            except Exception:
                failures += 1
        RemovableEvent.removed = None
        found[f"link.py:{line}"] = failures
    checks.check_waits()  # with all of them, it passes again
    return {"tries": TRIES, "found": found}


def memory(device: torch.device, size: Size) -> Any:
    """Return the error of a device that is out of memory, and whether a model trains on after it."""
    checks = DeviceChecks(device, size)
    before = checks.check_rows()
    held = []
    error = "none: the device gave all that was asked for"
    try:
        for _ in range(64):
            held.append(torch.empty(1 << 36, dtype=torch.uint8, device=device))
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    held.clear()
    return {
        "error": error[:300],
        "before": before,
        "after": DeviceChecks(device, size).check_rows(),
    }


def speed(device: torch.device, size: Size) -> Any:
    """Return samples a second and the parts of a step, by size of the batch."""
    is_short = size is SHORT
    results = []
    for batch_size in (64,) if is_short else (4_096, 16_384, 65_536):
        for place, grains in (("cpu", 1), (str(device), 1), (str(device), 4)):
            steps = 6 if is_short or place == "cpu" else 30
            results.append(trained(batch_size, steps, place, grains))
    return results


def trained(batch_size: int, steps: int, place: str, grains: int) -> dict[str, Any]:
    names = [f"id_{number}" for number in range(26)]
    schema = hb.Schema([hb.Label("y"), *(hb.Id(name) for name in names)])
    draw = np.random.default_rng(0)
    rows: dict[str, Any] = {name: draw.zipf(1.05, batch_size) % 1_000_000 for name in names}
    rows["y"] = (draw.random(batch_size) < 0.3).astype(np.float32)
    torch.manual_seed(0)
    network = hb.models.DCNv2(schema, hb.make_tables(schema, dim=16))
    model = hb.RecModel(network, "bce", "sgd", grains=grains, device=place)
    (batch,) = hb.Dataset(hb.sources.Memory(rows), schema, batch_size=batch_size)
    begin = time.perf_counter()
    history = model.fit([batch] * steps, progress=False)
    seconds = (time.perf_counter() - begin) / steps
    result = {"batch": batch_size, "device": place, "grains": grains}
    parts = history.step_times
    if parts is None:
        return {**result, "samples_per_second": batch_size / seconds}
    return {**result, "samples_per_second": batch_size / parts.step, "step": str(parts)}


SECTIONS: dict[str, Callable[[torch.device, Size], Any]] = {
    "doctor": doctor,
    "waits": waits,
    "sanitizer": some_checks,
    "no_caching": some_checks,
    "memory": memory,
    "speed": speed,
}


def in_processes(names: list[str], arguments: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield what each section returned, or why it did not."""
    for name in names:
        command = [sys.executable, __file__, "--run", name, *arguments]
        environment = {**os.environ, **ENVIRONMENTS.get(name, {})}
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMITS[name]
            )
            lines = done.stdout.splitlines()
            result = (
                json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-900:]}
            )
        except subprocess.TimeoutExpired:
            result = {"error": f"it took more than {LIMITS[name]} seconds"}
        yield name, {"seconds": round(time.perf_counter() - begin, 1), "result": result}


def about(device: torch.device) -> dict[str, Any]:
    return {
        "device": DeviceChecks(device).device_name,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cuda")
    p.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    p.add_argument("--short", action="store_true", help="small sizes, to try this file itself")
    p.add_argument("--setup", help="module:function to call first, such as one that adds a device")
    p.add_argument("--run", choices=list(SECTIONS), help="this section alone, in this process")
    a = p.parse_args()
    if a.setup:
        module, _, function = a.setup.partition(":")
        getattr(importlib.import_module(module), function)()
    device = find_device("--device", a.device)
    if a.run:
        result = SECTIONS[a.run](device, SHORT if a.short else Size())
        print(json.dumps(result, default=str))
        return
    arguments = ["--device", a.device]
    arguments += ["--short"] if a.short else []
    arguments += ["--setup", a.setup] if a.setup else []
    results = dict(in_processes(a.sections, arguments))
    print(json.dumps({**about(device), "sections": results}, indent=1))


if __name__ == "__main__":
    main()
