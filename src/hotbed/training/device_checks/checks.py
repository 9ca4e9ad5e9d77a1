# SPDX-License-Identifier: Apache-2.0
"""Checks of a device: what `hotbed doctor --device` asks of it before anybody trains on it.

Each check compares what the device does with what the CPU does, or with itself. Nothing here knows
which device it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from hotbed.embedding.device import Arrival, link_to, wait_for_current
from hotbed.errors import MissingExtra
from hotbed.training.load import load

from .trial import DeviceTrial, Trained

CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Of losses, weights and scores, between a device and the CPU."""
SCALE = 1024.0
"""A power of two: scaling by it changes no bit."""
_BUSY_SECONDS = 0.005
_ODD_SIZES = (1, 63, 4097)


@dataclass(frozen=True)
class Size:
    """How much is computed.

    Attributes:
        steps: of a training.
        samples: of a batch.
        rounds: of copies under load.
        copied_bytes: of the largest copy.
    """

    steps: int = 20
    samples: int = 512
    rounds: int = 50
    copied_bytes: int = 64 << 20


@dataclass(frozen=True)
class DeviceFinding:
    """What a check found. `text`: what was measured, or what is wrong."""

    check: str
    passed: bool
    text: str
    seconds: float


class Failed(Exception):
    """A device does not do what training needs of it."""


class DeviceChecks:
    """The checks of one device.

    Args:
        device: with its number.
        size: of the work.

    Example:
        >>> for finding in DeviceChecks(find_device("--device", "cuda")).run():
        ...     print(finding)
    """

    def __init__(self, device: torch.device, size: Size | None = None) -> None:
        self.device = device
        self.size = size or Size()
        self._trial = DeviceTrial(self.size.steps, self.size.samples)

    def run(self) -> Iterator[DeviceFinding]:
        """Yield what each check finds; an error of the device is a finding, too."""
        checks: dict[str, Callable[[], str]] = {
            "copies": self.check_copies,
            "waits under load": self.check_waits,
            "rows": self.check_rows,
            "losses": self.check_losses,
            "twice the same": self.check_repeats,
            "loss scaling": self.check_scaling,
            "states and export": self.check_states,
            "bandwidth": self.measure_bandwidth,
        }
        for name, check in checks.items():
            begin = time.perf_counter()
            passed = True
            try:
                text = check()
            except Failed as failed:
                passed = False
                text = str(failed)
            except Exception as error:  # of torch or the driver: the device is not usable
                passed = False
                text = f"{type(error).__name__}: {error}"
            yield DeviceFinding(name, passed, text, time.perf_counter() - begin)

    @property
    def device_name(self) -> str:
        """The name of the device, and that of its model where torch tells it."""
        named = getattr(torch.get_device_module(self.device), "get_device_name", None)
        return f"{self.device} ({named(self.device)})" if callable(named) else str(self.device)

    @cached_property
    def _trained(self) -> Trained:
        return self._trial.train(self.device)

    def check_copies(self) -> str:
        """Copy bytes up and down, and compare each of them."""
        draw = torch.Generator().manual_seed(0)
        sizes = (*_ODD_SIZES, self.size.copied_bytes)
        for num_bytes in sizes:
            values = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=draw)
            back = values.to(self.device).cpu()
            if not torch.equal(values, back):
                raise Failed(
                    f"{_differing(values, back):,} of {num_bytes:,} bytes came back as others"
                )
        return f"{len(sizes)} sizes up to {self.size.copied_bytes / 2**20:,.0f} MiB"

    def check_waits(self) -> str:
        """Send values up and results down while the device is busy; read each as soon as it may.

        So each line that waits is reached while what it waits for is not done.
        """
        link = link_to(self.device)
        draw = torch.Generator().manual_seed(0)
        busy = self._busy()
        coming: list[tuple[int, Tensor, Arrival]] = []
        for number in range(self.size.rounds):
            values = torch.rand(257, 33, generator=draw)
            slot = link.slot()
            (rows,) = slot.rows([(257, 33)])
            rows.copy_(values)
            busy()
            (up,) = link.send(slot, [rows])
            doubled = up * 2
            busy()
            coming.append((number, values * 2, link.bring([doubled.add_(up * 0)])))
            del up, doubled  # their memory may be used again
            if number % 3 == 0:
                self._compare(coming)
        self._compare(coming)
        return f"{self.size.rounds} copies up and down while the device was busy"

    def _compare(self, coming: list[tuple[int, Tensor, Arrival]]) -> None:
        """Raise Failed if values that came down are not those that were expected."""
        for number, expected, arrival in coming:
            (arrived,) = arrival.read(
                lambda parts: [part.clone() for part in parts if part is not None]
            )
            if not torch.equal(arrived, expected):
                raise Failed(
                    f"{_differing(expected, arrived):,} values of copy {number} are others: they "
                    "were read or overwritten too early"
                )
        coming.clear()

    def _busy(self) -> Callable[[], None]:
        """Return a function that gives the device work for some milliseconds."""
        matrix = torch.rand(512, 512).to(self.device)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(matrix, matrix)

        multiply(1)
        wait_for_current(self.device)
        begin = time.perf_counter()
        multiply(4)
        wait_for_current(self.device)
        times = 4 * _BUSY_SECONDS / (time.perf_counter() - begin)
        return lambda: multiply(min(max(round(times), 1), 200))

    def check_rows(self) -> str:
        """Give the gradients of the device to tables of a process without it."""
        trained = self._trained
        if trained.digest != self._trial.digest_of(trained.lookups):
            raise Failed(
                "tables that learned on the device differ from tables that learned its gradients "
                "on the CPU: a gradient changed on its way"
            )
        return f"{self.size.steps} steps: tables have the digest {trained.digest[:12]}"

    def check_losses(self) -> str:
        """Compare losses and dense weights with those of the CPU."""
        trained = self._trained
        expected = self._trial.train(CPU)
        losses = _most([(torch.tensor(trained.losses), torch.tensor(expected.losses))])
        weights = _most(zip(trained.weights, expected.weights, strict=True))
        if not max(losses, weights) <= TOLERANCE:
            raise Failed(
                f"they are not those of the CPU: losses differ by {losses:.1e}, weights by "
                f"{weights:.1e}, at most {TOLERANCE:.0e} is rounding"
            )
        return f"losses differ from the CPU's by {losses:.1e}, weights by {weights:.1e}"

    def check_repeats(self) -> str:
        """Train again while the device is busy: an order that is not fixed would show."""
        again = self._trial.train(self.device, self._busy())
        if again.losses != self._trained.losses or again.digest != self._trained.digest:
            raise Failed(
                "two trainings have other bits: a wait is missing, or the device computes in "
                "another order each time"
            )
        return "a training while the device is busy has the bits of the first one"

    def check_scaling(self) -> str:
        """Scale the loss in a plain loop, one of whose steps overflows."""
        plain, _ = self._trial.scaled(self.device, None)
        scaled, scale = self._trial.scaled(self.device, SCALE)
        difference = _most(zip(plain, scaled, strict=True))
        if not difference <= TOLERANCE:
            raise Failed(f"with GradScaler weights and rows differ by {difference:.1e}")
        if scale != SCALE / 2:
            raise Failed(f"an overflow must halve the scale {SCALE:.0f}, got {scale:.0f}")
        return f"GradScaler changes weights and rows by {difference:.1e}, and skips an overflow"

    def check_states(self) -> str:
        """Save on the device, load on the CPU and on the device, compare scores, export."""
        data = self._trial.data()
        model = self._trial.model(self.device)
        model.step(next(iter(data)))
        scores = model.predict(data)
        with TemporaryDirectory() as folder:
            model.save(folder)
            differences = [
                float(np.abs(load(folder, device=device).predict(data) - scores).max())
                for device in (CPU, self.device)
            ]
        if not max(differences) <= TOLERANCE:
            raise Failed(f"a loaded model has other scores: they differ by {max(differences):.1e}")
        try:
            model.graph()
        except MissingExtra:
            return f"scores differ by {max(differences):.1e}; no export without hotbed[export]"
        return f"scores on the CPU differ by {differences[0]:.1e}; the graph is exported"

    def measure_bandwidth(self) -> str:
        """Copy up and down, by pinned and by pageable memory."""
        link = link_to(self.device)
        num_rows = max(self.size.copied_bytes // 4096, 1)
        gigabytes = num_rows * 4096 / 1e9

        def up() -> Tensor:
            slot = link.slot()
            (values,) = link.send(slot, slot.rows([(num_rows, 1024)]))
            return values

        on_device = up()
        pageable = torch.zeros(num_rows, 1024)
        ways: dict[str, Callable[[], object]] = {
            "up": up,
            "down": lambda: link.bring([on_device]).read(lambda parts: None),
            "pageable up": lambda: pageable.to(self.device),
            "pageable down": on_device.cpu,
        }
        speeds = [f"{way} {gigabytes / self._seconds(copy):.1f}" for way, copy in ways.items()]
        return f"{', '.join(speeds)} GB/s"

    def _seconds(self, copy: Callable[[], object], rounds: int = 5) -> float:
        """Return the seconds of a copy, the median of some."""
        seconds = []
        for _ in range(rounds):
            wait_for_current(self.device)
            begin = time.perf_counter()
            copy()
            wait_for_current(self.device)
            seconds.append(time.perf_counter() - begin)
        return max(sorted(seconds)[rounds // 2], 1e-9)


def _differing(first: Tensor, second: Tensor) -> int:
    return int((first != second).sum())


def _most(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference between two tensors of a pair; NaN if there is one."""
    differences = [(first - second).abs().max() for first, second in pairs]
    return float(torch.stack(differences).max())
