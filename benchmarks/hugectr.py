# SPDX-License-Identifier: Apache-2.0
"""What the HugeCTR door costs: samples/s of three pipelines by the door and by the engine's own face.

Both train the same network on the same prepared files, in turn, in one process: the door by `fit`
or by the low-level loop, the engine by `hb.RecModel`. A pair is a turn of each; the cost is the
median over the pairs. The files are those of `make examples`.

    python benchmarks/hugectr.py --steps 200 --repeats 7
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import hotbed as hb
import hotbed.compat.hugectr as hugectr

Turn = Callable[[int], float]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: its graph in the folder of its results, and how it is trained."""

    name: str
    graph: str
    loop: bool = False
    batch: int = 2048  # HugeCTR's default


PIPELINES = (
    Pipeline("criteo", "dcn.json"),
    Pipeline("rees46", "dlrm.json", loop=True),
    Pipeline("mind", "dlrm.json"),
)


def compiled(pipeline: Pipeline, runs: Path) -> hugectr.Model:
    """Return the pipeline's model by the door."""
    prepared = runs / pipeline.name / "prepared"
    metadata = json.loads((prepared / "train/_metadata.json").read_text())
    slots = [metadata["sizes"][column["col_name"]] for column in metadata["cats"]]
    solver = hugectr.CreateSolver(
        seed=1,
        batchsize=pipeline.batch,
        batchsize_eval=pipeline.batch,
        i64_input_key=True,
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=str(prepared / "train/_file_list.txt"),
        eval_source=str(prepared / "train/_file_list.txt"),
        check_type=hugectr.Check_t.Non,
        slot_size_array=[] if pipeline.name == "mind" else slots,
    )
    optimizer = hugectr.CreateOptimizer(update_type=hugectr.Update_t.Local)
    model = hugectr.Model(solver, reader, optimizer)
    model.construct_from_json(str(runs / pipeline.name / pipeline.graph), True)
    model.compile()
    return model


def door(pipeline: Pipeline, runs: Path) -> Turn:
    """Return a turn of the door: so many steps, in seconds."""
    model = compiled(pipeline, runs)

    def by_fit(steps: int) -> float:
        began = time.perf_counter()
        model.fit(max_iter=steps, display=steps + 1, eval_interval=0, snapshot=steps + 1)
        return time.perf_counter() - began

    def by_loop(steps: int) -> float:
        rates = model.get_learning_rate_scheduler()
        began = time.perf_counter()
        for _ in range(steps):
            model.set_learning_rate(rates.get_next())
            model.train()
        return time.perf_counter() - began

    model.start_data_reading()
    return by_loop if pipeline.loop else by_fit


def engine(pipeline: Pipeline, runs: Path) -> Turn:
    """Return a turn of the same network by `hb.RecModel`."""
    values = compiled(pipeline, runs).translation
    network = hb.models.Graph(values.schema, values.tables, values.description)
    model = hb.RecModel(network, values.loss, values.rule)
    source = hb.sources.Prepared(str(runs / pipeline.name / "prepared"))
    data = hb.Dataset(source, values.schema, pipeline.batch, drop_last=True)
    batches = repeated(data)

    def by_fit(steps: int) -> float:
        began = time.perf_counter()
        model.fit(data, epochs=steps, max_steps=steps, progress=False)
        return time.perf_counter() - began

    def by_loop(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            model.step(next(batches))
        return time.perf_counter() - began

    return by_loop if pipeline.loop else by_fit


def repeated(data: hb.Dataset) -> Iterator[hb.Batch]:
    """Yield the batches of the data, over and over."""
    while True:
        yield from data


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--runs", type=Path, default=Path("runs/hugectr"))
    p.add_argument("--only", choices=[pipeline.name for pipeline in PIPELINES])
    p.add_argument("--batch", type=int, default=2048)
    p.add_argument("--steps", type=int, default=200, help="of a turn")
    p.add_argument("--repeats", type=int, default=7, help="pairs of turns")
    p.add_argument("--threads", type=int, default=1)
    arguments = p.parse_args()
    torch.set_num_threads(arguments.threads)
    for pipeline in PIPELINES:
        if arguments.only in (None, pipeline.name):
            measure(replace(pipeline, batch=arguments.batch), arguments)


def measure(pipeline: Pipeline, arguments: argparse.Namespace) -> None:
    """Print one JSON line of a pipeline."""
    seconds: dict[str, list[float]] = {"door": [], "engine": []}
    with contextlib.redirect_stdout(io.StringIO()):  # what HugeCTR's users expect to see
        turns = {
            "door": door(pipeline, arguments.runs),
            "engine": engine(pipeline, arguments.runs),
        }
        for turn in turns.values():
            turn(arguments.steps)
        for repeat in range(arguments.repeats):
            for face in sorted(turns, reverse=bool(repeat % 2)):
                seconds[face].append(turns[face](arguments.steps))
    costs = [
        door / engine - 1 for door, engine in zip(seconds["door"], seconds["engine"], strict=True)
    ]
    samples = arguments.steps * pipeline.batch
    line = {
        "pipeline": pipeline.name,
        "face": "train()" if pipeline.loop else "fit()",
        "batch": pipeline.batch,
        "door_samples_per_s": round(samples / statistics.median(seconds["door"])),
        "engine_samples_per_s": round(samples / statistics.median(seconds["engine"])),
        "door_costs": f"{statistics.median(costs):.1%}",
        "spread": f"{min(costs):.1%} to {max(costs):.1%}",
        "threads": arguments.threads,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
