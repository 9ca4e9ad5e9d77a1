# SPDX-License-Identifier: Apache-2.0
"""Ours and the peers in turn (A B A B …) on this machine; prints a Markdown table of ratios with
their spread.

Absolute times of a shared machine say little; a ratio of medians, taken in turn, holds. `--quick`
only proves that everything runs. Raw figures go to `--out` as JSON lines. A peer that is not
installed leaves its row empty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Line = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One row of the table: `peer` is (environment, command…), or ("ours", command…) for a figure
    of our own.
    """

    name: str
    ours: tuple[str, ...]
    peer: tuple[str, ...] = ()
    aim: str = ""
    gate: str = ""


STEP = "embedding.py"
COMPARISONS = [
    Comparison(
        "step, row-wise Adagrad, 26 M ids inserted first, vs FBGEMM",
        (STEP, "--rule", "rowwise_adagrad", "--prefill"),
        ("torch", "embedding_fbgemm.py", "--rule", "rowwise_adagrad"),
        "3x",
        "2x",
    ),
    Comparison(
        "the same, 200 new batches from an empty table, vs FBGEMM",
        (STEP, "--rule", "rowwise_adagrad", "--fresh", "--steps", "200"),
        ("torch", "embedding_fbgemm.py", "--rule", "rowwise_adagrad"),
        "3x",
        "2x",
    ),
    Comparison(
        "step, Adagrad, vs FBGEMM",
        (STEP, "--rule", "adagrad", "--prefill"),
        ("torch", "embedding_fbgemm.py", "--rule", "adagrad"),
        "5x",
    ),
    Comparison(
        "step, Adam, vs torch SparseAdam",
        (STEP, "--rule", "adam", "--prefill"),
        ("torch", "embedding_torch.py", "--rule", "adam"),
        "10x",
    ),
    Comparison(
        "step, Ftrl, vs our Adagrad",
        (STEP, "--rule", "ftrl", "--prefill"),
        ("ours", STEP, "--rule", "adagrad", "--prefill"),
        "0.77x",
    ),
    Comparison(
        "step, Adagrad, vs TFRA's dynamic table",
        (STEP, "--rule", "adagrad", "--prefill"),
        ("tfra", "embedding_tfra.py", "--rule", "adagrad"),
        "15x",
    ),
    Comparison(
        "forward only, vs a bare prefetched gather of like draws",
        (STEP, "--forward", "--steps", "100"),
        ("native", "bench_embedding", "gather"),
        "0.5x",
    ),
    Comparison("growth, 1 to 50 M new ids", ("growth.py",), (), "8 M ids/s"),
    Comparison(
        "DCNv2 on Frappe, fp32, vs FuxiCTR",
        ("train.py", "--epochs", "2", "--dense-steps", "0", "--data", "{data}"),
        ("torch", "train_fuxictr.py", "--epochs", "2", "--data", "{data}"),
        "2x",
    ),
    Comparison(
        "DCNv2 on Frappe, bf16, vs FuxiCTR",
        ("train.py", "--epochs", "2", "--dense-steps", "0", "--amp", "O3", "--data", "{data}"),
        ("torch", "train_fuxictr.py", "--epochs", "2", "--data", "{data}"),
        "3x",
    ),
    Comparison(
        "DCNv2 on Frappe, fp32, vs the dense network alone in torch",
        ("train.py", "--epochs", "2", "--dense-steps", "0", "--data", "{data}"),
        ("ours", "train.py", "--epochs", "0", "--data", "{data}"),
        "0.8x",
    ),
]
QUICK = {
    "embedding": ["--tables", "2", "--ids", "1000", "--batch", "128", "--steps", "4"],
    "growth": ["--ids", "200000", "--start", "50000", "--batch", "10000"],
    "train": ["--epochs", "1"],
    "bench": ["--quick"],
}


def command(parts: tuple[str, ...], env: str, a: argparse.Namespace) -> list[str]:
    """The command line of one side; raises FileNotFoundError where it is not installed."""
    if env == "native":
        program = a.native / parts[0]
        words = [str(program)]
    else:
        python = Path(sys.executable) if env == "ours" else a.env / env / "bin" / "python"
        program = (HERE if env == "ours" else a.peers) / parts[0]
        words = [str(python), str(program)]
        if not python.exists():
            raise FileNotFoundError(python)
    if not program.exists():
        raise FileNotFoundError(program)
    words += [part.format(data=a.data) for part in parts[1:]]
    if a.quick and not (env == "ours" and "0" in parts):
        words += next(extra for kind, extra in QUICK.items() if parts[0].startswith(kind))
    return words


def measure(words: list[str], log: Path) -> Line:
    """Runs it and returns its last JSON line."""
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(
            f"{' '.join(words)} failed with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    with log.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    return lines[-1]


def speed(line: Line) -> float:
    """Work per second of one run: larger is better."""
    if "mega_ids_per_s" in line:
        return 1.0 / float(line["median_ms"])
    return float(line["samples_per_s"] if "samples_per_s" in line else line["ids_per_s"])


def figure(line: Line) -> str:
    if "median_ms" in line and "mega_ids_per_s" in line:
        return f"{line['median_ms']:.2f} ms"
    if "samples_per_s" in line:
        auc = {k.lower(): v for k, v in line.get("valid", {}).items()}.get("auc")
        return f"{line['samples_per_s']:,} samples/s" + (f", AUC {auc:.4f}" if auc else "")
    return (
        f"{line['ids_per_s'] / 1e6:.1f} M ids/s, worst batch {line['worst_over_median']}x the "
        "median, "
        f"{line['index_bytes_per_id']} bytes an id (peak {line['index_bytes_per_id_peak']})"
    )


def compare(c: Comparison, a: argparse.Namespace) -> str:
    """One row of the Markdown table."""
    theirs: list[Line] = []
    ours: list[Line] = []
    for _ in range(a.repeats):
        if c.peer:
            try:
                theirs.append(measure(command(c.peer[1:], c.peer[0], a), a.out))
            except FileNotFoundError as missing:
                print(f"skipping the peer of {c.name!r}: {missing} is absent", file=sys.stderr)
        ours.append(measure(command(c.ours, "ours", a), a.out))
        print(
            f"  {c.name}: {[round(speed(x), 2) for x in theirs]} "
            f"{[round(speed(x), 2) for x in ours]}",
            file=sys.stderr,
        )
    own = figure(sorted(ours, key=speed)[len(ours) // 2])
    aim = c.aim + (f" ({c.gate})" if c.gate else "")
    if not theirs:
        return f"| {c.name} | {own} | – | – | {aim} |"
    other = figure(sorted(theirs, key=speed)[len(theirs) // 2])
    ratio = statistics.median(map(speed, ours)) / statistics.median(map(speed, theirs))
    pairs = [speed(x) / speed(y) for x, y in zip(ours, theirs, strict=True)]
    return f"| {c.name} | {own} | {other} | **{ratio:.2f}x** ({min(pairs):.2f} to {max(pairs):.2f}) | {aim} |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument(
        "--peers",
        type=Path,
        default=HERE.parent.parent / "shared" / "peers",
        help="folder of the peers' scripts",
    )
    p.add_argument(
        "--env",
        type=Path,
        default=Path.home() / ".cache" / "hotbed-peers",
        help="folder of their environments",
    )
    p.add_argument(
        "--native",
        type=Path,
        default=HERE.parent / "build" / "bench",
        help="folder of the native benchmarks",
    )
    p.add_argument(
        "--data", type=Path, default=HERE.parent.parent / "shared" / "data" / "frappe_x1r"
    )
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--only", default="", help="rows whose name contains this")
    p.add_argument("--out", type=Path, default=HERE.parent / "reports" / "bench.jsonl")
    p.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: proves that everything runs, measures nothing",
    )
    a = p.parse_args()
    a.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [compare(c, a) for c in COMPARISONS if a.only in c.name]
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {a.repeats} runs each "
        "in turn, medians\n"
    )
    print("| what | Hotbed | peer | ratio (spread) | aim (gate) |\n|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
