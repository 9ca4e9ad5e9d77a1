# SPDX-License-Identifier: Apache-2.0
"""What `hotbed doctor` finds out of this machine, this install and the ranks, and prints."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import import_module, metadata, util
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape
from rich.table import Table as Grid

from hotbed.cli.show import console, print_line
from hotbed.memory_limit import memory_limits

if TYPE_CHECKING:
    from hotbed.parallel.probe import RankConnections

# package, module, the extra that installs it, what it is for
_PACKAGES = (
    ("torch", "torch", "train", "training, evaluation, prediction"),
    ("tensorboard", "tensorboard", "tensorboard", "the TensorBoard callback"),
    ("prometheus_client", "prometheus_client", "prometheus", "the Prometheus callback"),
    ("confluent_kafka", "confluent_kafka", "kafka", "events from Kafka"),
    ("fsspec", "fsspec", "object", "checkpoints and exported models in object stores"),
    ("onnxruntime", "onnxruntime", "serve", "serving"),
    ("uvicorn", "uvicorn", "serve", "a server's HTTP"),
    ("httptools", "httptools", "serve", "a server's HTTP"),
    ("grpcio", "grpc", "serve", "gRPC, and parameter servers elsewhere"),
    ("onnx", "onnx", "export", "exporting for serving"),
)


class Part(NamedTuple):
    """A part of the machine or the install: its name, what is there, what it is for."""

    name: str
    state: str
    purpose: str


def diagnose() -> list[Part]:
    """Return the parts of this machine and install, Hotbed itself first."""
    parts = [
        Part("hotbed", _version("hotbed", "hotbed"), ""),
        Part("python", _python(), ""),
        Part("processors", str(_num_processors()), ""),
        Part("memory", _memory(), "tables of the Ram tier"),
        Part("native core", _native_core(), "tables; without it nothing trains"),
    ]
    for package, module, extra, purpose in _PACKAGES:
        state = f"absent: pip install hotbed[{extra}]"
        if util.find_spec(module):
            state = _version(package, module)
        parts.append(Part(package, state, purpose))
    parts.append(Part("device", _device(), "the dense network; tables stay on the host"))
    return parts


def connection() -> RankConnections:
    """Return how the ranks of which this process is one reach each other.

    Raises:
        ConfigError: they do not.
    """
    from hotbed.parallel.probe import probe

    return probe()


def has_native_core() -> bool:
    """Return whether the native core is installed; without it nothing works."""
    return util.find_spec("hotbed._core") is not None


def _version(package: str, module: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(import_module(module), "__version__", "unknown version"))


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _num_processors() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory() -> str:
    """Return the memory of the machine, and what a container allows of it."""
    texts = [f"{limit.limit_bytes / 2**30:.1f} GiB of {limit.of}" for limit in memory_limits()]
    if texts:
        return ", ".join(texts)
    try:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{num_bytes / 2**30:.1f} GiB"


def _native_core() -> str:
    try:
        core = import_module("hotbed._core")
    except ImportError as error:
        return f"absent: {error}"
    return f"{core.isa_name()}, {core.num_threads()} threads"


def _device() -> str:
    if not util.find_spec("torch"):
        return "none without torch"
    from hotbed.training.devices import devices_here

    devices = devices_here()
    if len(devices) == 1:
        return f"cpu, {import_module('torch').get_num_threads()} threads"
    return f"{', '.join(devices[1:])}: check with hotbed doctor --device {devices[1]}"


def print_machine(parts: Iterable[Part]) -> None:
    """Print what this machine and this install can do."""
    grid = Grid("", "found", "what it is for", title="hotbed doctor", title_justify="left")
    for part in parts:
        grid.add_row(part.name, escape(part.state), part.purpose)
    console.print(grid)


def print_connection(connection: RankConnections) -> None:
    """Print how the ranks of a job reach each other."""
    hosts = len(set(connection.hosts))
    grid = Grid(
        "each rank sends to each other one",
        "a call takes",
        "each sends",
        title=f"{len(connection.hosts)} ranks on {hosts} host{'s' if hosts > 1 else ''}, over gloo",
        title_justify="left",
    )
    for num_bytes, seconds in connection.seconds.items():
        size = f"{num_bytes} B" if num_bytes < 1024 else f"{num_bytes // 1024:,} KiB"
        # of a few bytes the time of a call counts
        rate = "" if num_bytes < 1024 else f"{connection.bandwidth(num_bytes) / 2**20:,.1f} MiB/s"
        grid.add_row(size, f"{seconds * 1e6:,.0f} us", rate)
    console.print(grid)
    for problem in connection.problems:
        print_line(escape(problem))
