# SPDX-License-Identifier: Apache-2.0
"""What the command line prints: columns, results, tables, checkpoints, the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module, metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from hotbed import config

if TYPE_CHECKING:
    from hotbed.embedding.table import Table
    from hotbed.job.job import Job
    from hotbed.training.model import RecModel
    from hotbed.training.watching.history import History

console = Console()


def print_columns(job: Job) -> None:
    """Print the job's columns: role, the raw column and its type, table, settings."""
    source = job.train or job.stream
    assert source is not None
    raw = source.schema()
    grid = Grid("column", "role", "reads", "table", "settings")
    for column in job.schema.columns:
        shown_elsewhere = ("kind", "name", "column", "table")
        settings = {
            key: value
            for key, value in config.describe(column).items()
            if key not in shown_elsewhere
        }
        kind = raw.field(column.source).type if column.source in raw.names else "[red]absent[/]"
        text = escape(json.dumps(settings, ensure_ascii=False)) if settings else ""
        table = str(getattr(column, "table", "") or "")
        grid.add_row(
            column.name, config.kind_of(type(column)), f"{column.source}: {kind}", table, text
        )
    console.print(grid)


def print_results(model: RecModel, histories: Mapping[str, History]) -> None:
    """Print metrics and tables after each part of a job."""
    console.rule("[bold]results", align="left")
    for part, history in histories.items():
        speed = history.epochs[-1]["samples_per_second"]
        kind = "progressive " if part == "stream" else ""
        values = {kind + name: value for name, value in history.metrics.items()}
        print_values(part, values, f"  {speed:,.0f} samples/s")
    print_tables(model.tables, histories)


def print_tables(tables: Mapping[str, Table], histories: Mapping[str, History]) -> None:
    """Print how tables grew: rows after each part, and the ids that were admitted, refused and
    evicted on the way.
    """
    grid = Grid(
        "table",
        *(f"rows after {part}" for part in histories),
        "admitted",
        "refused",
        "evicted",
        "MiB",
    )
    for name, stats in ((name, table.stats) for name, table in sorted(tables.items())):
        rows = [
            history.points[-1].tables[name]["rows"] if history.points else 0
            for history in histories.values()
        ]
        counts = [
            f"{count:,.0f}"
            for count in (*rows, stats["admitted"], stats["refused"], stats["evicted"])
        ]
        size = sum(value for key, value in stats.items() if "bytes" in key)
        grid.add_row(name, *counts, f"{size / 2**20:.1f}")
    console.print(grid)


def print_values(title: str, values: Mapping[str, float], more: str = "") -> None:
    """Print named numbers on one line."""
    same = [
        name
        for name in values
        if name.endswith("loss") and f"{name.removesuffix('loss')}log_loss" in values
    ]
    kept = {
        name.replace("valid.", "validation "): value
        for name, value in values.items()
        if name not in same
    }
    named = "  ".join(f"{name} {value:.4f}" for name, value in kept.items())
    console.print(f"{title}: {named}{more}", highlight=False, soft_wrap=True)


def print_checkpoint(found: Mapping[str, Any]) -> None:
    """Print what a checkpoint holds, as `hotbed.persist.chain.describe` tells it."""
    size = sum(found["bytes"]) / 2**20
    console.print(
        f"{found['folder']}: {found['kind']}, version {found['version']}, {size:,.1f} MiB",
        highlight=False,
    )
    for name in ("digest", "parent", "positions", "counters"):
        console.print(
            f"{name:9} {escape(json.dumps(found[name]))}", highlight=False, soft_wrap=True
        )
    for link in found["chain"]:
        console.print(
            f"rests on  {link['folder']} {link['digest']}", highlight=False, soft_wrap=True
        )
    console.print(
        f"dense     {found['dense']['parameters']:,} parameters in {found['dense']['tensors']} "
        "tensors"
    )
    grid = Grid(
        "table",
        "dim",
        "rows",
        "MiB",
        "here: changed",
        "removed",
        "waiting",
        "norms of rows",
        "counts",
    )
    for table in found["tables"]:
        counts = [f"{table[name]:,}" for name in ("changed", "removed", "candidates")]
        drawn = (_histogram(table["norms"]), _histogram(table["counts"]))
        mib = f"{table['bytes'] / 2**20:.1f}"
        grid.add_row(table["name"], str(table["dim"]), f"{table['rows']:,}", mib, *counts, *drawn)
    console.print(grid)


def _histogram(bins: Sequence[Mapping[str, float]]) -> str:
    """Rows by powers of two, as one line: `0.0625 ▁▃█▂ 1`."""
    if not bins:
        return ""
    most = max(one["rows"] for one in bins)
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * one["rows"] / (most + 1)))] for one in bins)
    return f"{bins[0]['from']:g} {bars} {bins[-1]['to']:g}"


def print_difference(found: Mapping[str, Any]) -> None:
    """Print what differs between two checkpoints, as `hotbed.persist.chain.diff` tells it."""
    grid = Grid("table", "added", "removed", "changed", "largest difference")
    for name, table in found["tables"].items():
        numbers = (
            ["only in one"]
            if table is None
            else [f"{table[key]:,}" for key in ("added", "removed", "changed")]
        )
        grid.add_row(name, *numbers, *([] if table is None else [f"{table['largest']:.3g}"]))
    console.print(grid)
    for name, largest in found["dense"].items():
        console.print(
            f"{name}: {'other shape' if largest is None else f'{largest:.3g}'}", highlight=False
        )
    for name in ("positions", "counters"):
        if found[name][0] != found[name][1]:
            console.print(
                f"{name}: {found[name][0]}\n      now: {found[name][1]}",
                highlight=False,
                soft_wrap=True,
            )


def print_export(manifest: Mapping[str, Any], folder: str | Path) -> None:
    """Print what an export wrote: tables, rows, bytes, digest, and what to do with it."""
    files = manifest["files"]
    grid = Grid("table", "dim", "rows", "MiB")
    for table in manifest["tables"]:
        size = sum(files[part["file"]]["bytes"] for part in table["parts"])
        grid.add_row(
            escape(table["name"]),
            str(table["config"]["dim"]),
            f"{table['rows']:,}",
            f"{size / 2**20:.1f}",
        )
    console.print(grid)
    rows = sum(table["rows"] for table in manifest["tables"])
    size = sum(file["bytes"] for file in files.values())
    learned = f", learned until {_moment(manifest['learned'])}" if "learned" in manifest else ""
    console.print(
        f"version {manifest['version']}: {len(manifest['tables'])} tables, {rows:,} rows, "
        f"{size:,} bytes{learned}\n"
        f"digest {manifest['digest']}\nexported: {folder}\nserve it: hotbed serve {folder}",
        highlight=False,
        soft_wrap=True,
    )


def print_written(rows: int, path: str | Path) -> None:
    """Print where predictions went."""
    console.print(f"{rows:,} predictions, in the order of the source: {path}")


def print_machine() -> None:
    """Print what this machine and this install can do."""
    grid = Grid("", "found", "what it is for", title="hotbed doctor", title_justify="left")
    for name, found, purpose in diagnose():
        grid.add_row(name, escape(found), purpose)
    console.print(grid)


def diagnose() -> list[tuple[str, str, str]]:
    """(part, what was found, what it is for), of this machine and install."""
    rows = [
        ("hotbed", _version("hotbed"), ""),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", ""),
        (
            "processors",
            str(
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            ),
            "",
        ),
        ("memory", _memory(), "tables of the Ram tier"),
        ("native core", _native(), "tables; without it nothing trains"),
    ]
    for package, extra, purpose in (
        ("torch", "train", "training, evaluation, prediction"),
        ("tensorboard", "tensorboard", "the TensorBoard callback"),
        ("prometheus_client", "prometheus", "the Prometheus callback"),
        ("confluent_kafka", "kafka", "events from Kafka"),
        ("fsspec", "object", "checkpoints and exported models in object stores"),
        ("onnxruntime", "serve", "serving"),
        ("uvicorn", "serve", "a server's HTTP"),
        ("httptools", "serve", "a server's HTTP"),
        ("grpcio", "serve", "gRPC, and parameter servers elsewhere"),
        ("onnx", "export", "exporting for serving"),
    ):
        module = "grpc" if package == "grpcio" else package
        found = (
            _version(package) if util.find_spec(module) else f"absent: pip install hotbed[{extra}]"
        )
        rows.append((package, found, purpose))
    rows.append(("device", _device(), "the dense network; tables stay on the host"))
    return rows


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(__import__(package), "__version__", "unknown version"))


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _native() -> str:
    try:
        core = import_module("hotbed._core")
    except ImportError as error:
        return f"absent: {error}"
    return f"{core.isa_name()}, {core.num_threads()} threads"


def _device() -> str:
    if not util.find_spec("torch"):
        return "none without torch"
    torch = import_module("torch")
    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}"
    return "mps" if torch.backends.mps.is_available() else f"cpu, {torch.get_num_threads()} threads"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
