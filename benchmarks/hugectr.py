# SPDX-License-Identifier: Apache-2.0
"""What the HugeCTR door costs: samples/s of three pipelines by the door and by the engine's own face.

Both train the same network on the same prepared files, in turn, in one process: the door by `fit`
or by the low-level loop, the engine by `hb.RecModel`. A pair is a turn of each; the cost is the
median over the pairs, by the clock and by the time of the processor. On a busy machine, the ratio of
the least times of the processor says most. The files are those of `make examples`.

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
from typing import Any, NamedTuple

import torch

import hotbed as hb
import hotbed.compat.hugectr as hugectr

Turn = Callable[[int], None]


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
        seed=1, batchsize=pipeline.batch, batchsize_eval=pipeline.batch, i64_input_key=True
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
    """Return a turn of the door: so many steps."""
    model = compiled(pipeline, runs)

    def by_fit(steps: int) -> None:
        model.fit(max_iter=steps, display=steps + 1, eval_interval=0, snapshot=steps + 1)

    def by_loop(steps: int) -> None:
        rates = model.get_learning_rate_scheduler()
        for _ in range(steps):
            model.set_learning_rate(rates.get_next())
            model.train()

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

    def by_fit(steps: int) -> None:
        model.fit(data, epochs=steps, max_steps=steps, progress=False)

    def by_loop(steps: int) -> None:
        for _ in range(steps):
            model.step(next(batches))

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


class Seconds(NamedTuple):
    """What a turn took: time, and time of the processor, which other processes disturb less."""

    wall: float
    cpu: float


def timed(turn: Turn, steps: int) -> Seconds:
    began = time.perf_counter(), time.process_time()
    turn(steps)
    return Seconds(time.perf_counter() - began[0], time.process_time() - began[1])


def measure(pipeline: Pipeline, arguments: argparse.Namespace) -> None:
    """Print one JSON line of a pipeline."""
    turns: dict[str, list[Seconds]] = {"door": [], "engine": []}
    with contextlib.redirect_stdout(io.StringIO()):  # what HugeCTR's users expect to see
        faces = {"door": door(pipeline, arguments.runs), "engine": engine(pipeline, arguments.runs)}
        for turn in faces.values():
            turn(arguments.steps)
        for repeat in range(arguments.repeats):
            for face in sorted(faces, reverse=bool(repeat % 2)):
                turns[face].append(timed(faces[face], arguments.steps))
    samples = arguments.steps * pipeline.batch
    line: dict[str, Any] = {"pipeline": pipeline.name, "batch": pipeline.batch}
    line["face"] = "train()" if pipeline.loop else "fit()"
    for face, seconds in turns.items():
        median = statistics.median(turn.wall for turn in seconds)
        line[f"{face}_samples_per_s"] = round(samples / median)
    for clock in Seconds._fields:
        pairs = zip(turns["door"], turns["engine"], strict=True)
        costs = [getattr(door, clock) / getattr(engine, clock) - 1 for door, engine in pairs]
        spread = f"{min(costs):.1%} to {max(costs):.1%}"
        line[f"door_costs_{clock}"] = f"{statistics.median(costs):.1%} ({spread})"
    least = {face: min(turn.cpu for turn in seconds) for face, seconds in turns.items()}
    line["door_costs_least_cpu"] = f"{least['door'] / least['engine'] - 1:.1%}"
    print(json.dumps(line | {"threads": arguments.threads}), flush=True)


if __name__ == "__main__":
    main()
