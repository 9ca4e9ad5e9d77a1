# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan: one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotbed.files import Where
from hotbed.job.planning import JobPlan
from hotbed.persist.container.store import write_text
from hotbed.pictures.bars import Bar, bars_figure
from hotbed.pictures.numbers import number_text
from hotbed.pictures.page import grid, page_of, section, side_by_side

if TYPE_CHECKING:
    from hotbed.parallel.forecast.ranks import RanksPlan

MOST_BARS = 32
"""Ranks that are drawn one by one."""
TOO_MUCH = 1
"""The colour of what does not fit."""
RANKS_TEXT = (
    "Predicted from a sample of the data, and from a few steps on one process and on two. Memory "
    "and bytes: the largest rank. docs/ranks.md has the formulas."
)
TABLES_TEXT = "Rows and memory of all ranks together. Ids of a step: distinct in a whole batch."
BESIDE_TEXT = (
    "What takes most of a step. Rows on the disk of a rank, and about how many a step reads from "
    "there. The time to score a batch, and the samples of a stream that scores each batch before "
    "it learns it. A full state of all ranks, and the time to save it."
)
BY_RANK_TEXT = (
    "What each rank owns and does. Ids: distinct ones that all ranks ask it for in a step."
)


def size_text(num_bytes: float) -> str:
    """Return a number of bytes as people write it: 1.5 GB, 20 MB, 3 kB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            whole_digits = len(str(int(num_bytes / unit)))
            return f"{num_bytes / unit:,.{max(0, 3 - whole_digits)}f} {name}"
    return f"{num_bytes:.0f} B"


def write_plan(path: Where, plan: JobPlan, title: str) -> None:
    """Write the page of a plan to a file or URL."""
    work = plan.work
    cards: dict[str, Any] = {
        "rows in all tables": round(sum(float(table.rows.sum()) for table in work.tables)),
        "a process without rows": size_text(work.process_bytes),
        "dense values": size_text(work.dense_bytes),
        "ms a step of one process": round(1e3 * plan.plans[0].seconds, 1),
    }
    if len(plan.plans) > 1:
        cards["us a message"] = round(1e6 * work.link.latency)
        cards["between ranks, a second"] = size_text(work.link.bandwidth)
    if plan.ram is not None:
        cards["ranks that fit"] = plan.needed or "none"
    sections = [
        section("By number of ranks", _figures(plan), RANKS_TEXT),
        section("", grid(HEAD, [row_of(plan, of_ranks) for of_ranks in plan.plans])),
        section(
            "Beside training",
            grid(HEAD_BESIDE, [beside_training(plan, of_ranks) for of_ranks in plan.plans]),
            BESIDE_TEXT,
        ),
        _by_rank(plan.plans[-1]) if len(plan.plans) == 2 else "",
        _tables(plan),
        section("What to know", grid(["", ""], [["", note] for note in plan.notes], text=True))
        if plan.notes
        else "",
    ]
    write_text(path, page_of(title, "The plan of a job on several ranks", cards, sections))


HEAD = (
    "ranks",
    "memory",
    "rows",
    "balance",
    "sent a step",
    "messages",
    "ms a step",
    "samples/s",
    "speed",
)
"""Of a line for each number of ranks: memory, rows and bytes are those of the largest rank."""


def row_of(plan: JobPlan, of_ranks: RanksPlan) -> list[str]:
    """Return the cells of a line."""
    samples = plan.work.batch_size / of_ranks.seconds
    speed = plan.plans[0].seconds / of_ranks.seconds
    memory = size_text(of_ranks.most_memory)
    if plan.ram is not None and of_ranks.most_memory > plan.ram:
        memory += " > ram"
    return [
        str(of_ranks.ranks),
        memory,
        number_text_of(of_ranks.rows.max()),
        f"{of_ranks.balance(of_ranks.rows):.2f}",
        size_text(of_ranks.sent_bytes.max()),
        number_text_of(of_ranks.messages),
        f"{1e3 * of_ranks.seconds:.1f}",
        f"{samples:,.0f}",
        f"{speed:.2f}x",
    ]


HEAD_BESIDE = (
    "ranks",
    "most of a step",
    "on the disk",
    "read a step",
    "ms to score",
    "scored samples/s",
    "a full state",
    "s to save",
)
"""Of a line for each number of ranks: what a job takes beside training."""


def beside_training(plan: JobPlan, of_ranks: RanksPlan) -> list[str]:
    """Return the cells of a line; "" is what the job does not have, or was not measured."""
    state = of_ranks.state_bytes
    save = of_ranks.save_seconds
    scored_step = of_ranks.seconds + of_ranks.scored_seconds
    share = of_ranks.times[of_ranks.limit] / of_ranks.seconds
    disk = float(of_ranks.disk.max())
    return [
        str(of_ranks.ranks),
        f"{of_ranks.limit} {share:.0%}",
        size_text(disk) if disk else "",
        number_text_of(of_ranks.reads) if disk else "",
        f"{1e3 * of_ranks.evaluated_seconds:.1f}",
        f"{plan.work.batch_size / scored_step:,.0f}",
        "" if state is None else size_text(state),
        "" if save is None else f"{save:,.1f}",
    ]


def _figures(plan: JobPlan) -> str:
    def too_much(of_ranks: RanksPlan) -> int:
        return TOO_MUCH if plan.ram is not None and of_ranks.most_memory > plan.ram else 0

    def time_text(of_ranks: RanksPlan) -> str:
        return f"{1e3 * of_ranks.seconds:.1f} ms, {1e3 * of_ranks.link_seconds:.1f} in messages"

    figures = [
        _bars(
            plan.plans,
            "Memory of the largest rank",
            lambda of_ranks: of_ranks.most_memory,
            lambda of_ranks: size_text(of_ranks.most_memory),
            too_much,
        ),
        _bars(
            plan.plans,
            "Bytes that a rank sends in a step",
            lambda of_ranks: float(of_ranks.sent_bytes.max()),
            lambda of_ranks: size_text(of_ranks.sent_bytes.max()),
        ),
        _bars(plan.plans, "Time of a step", lambda of_ranks: of_ranks.seconds, time_text),
        _bars(
            plan.plans,
            "Balance of the ids of a step: most beside mean",
            lambda of_ranks: of_ranks.balance(of_ranks.asked),
            lambda of_ranks: f"{of_ranks.balance(of_ranks.asked):.2f}",
        ),
    ]
    return side_by_side(figures)


def _bars(
    plans: Sequence[RanksPlan],
    title: str,
    value: Callable[[RanksPlan], float],
    text: Callable[[RanksPlan], str],
    color: Callable[[RanksPlan], int] = lambda of_ranks: 0,
) -> str:
    bars = []
    for of_ranks in plans:
        name = f"{of_ranks.ranks} rank{'s' if of_ranks.ranks > 1 else ''}"
        bars.append(Bar(name, value(of_ranks), text(of_ranks), color(of_ranks)))
    return bars_figure(title, bars)


def _by_rank(of_ranks: RanksPlan) -> str:
    """Return the section with each rank of a plan; the largest, if there are many."""
    largest = sorted(of_ranks.rows.argsort()[::-1][:MOST_BARS].tolist())
    values: Mapping[str, tuple[Any, Callable[[float], str]]] = {
        "Rows": (of_ranks.rows, number_text_of),
        "Memory": (of_ranks.memory, size_text),
        "Ids asked for in a step": (of_ranks.asked, number_text_of),
        "Bytes sent in a step": (of_ranks.sent_bytes, size_text),
    }
    figures = []
    for title, (by_rank, text) in values.items():
        bars = [Bar(f"rank {rank}", by_rank[rank], text(by_rank[rank])) for rank in largest]
        figures.append(bars_figure(title, bars))
    name = f"Each of {of_ranks.ranks} ranks"
    if len(largest) < of_ranks.ranks:
        name = f"The {len(largest)} ranks with most rows, of {of_ranks.ranks}"
    return section(name, side_by_side(figures), BY_RANK_TEXT)


def number_text_of(value: float) -> str:
    """Return a whole number as people write it."""
    return number_text(round(value))


def _tables(plan: JobPlan) -> str:
    rows = []
    for number, table in enumerate(plan.work.tables):
        batches = plan.work.batches
        num_ids = sum(len(batch.tables[number].partitions) for batch in batches) / len(batches)
        rows.append(
            [
                table.name,
                number_text_of(float(table.rows.sum())),
                size_text(table.memory_of_all()),
                str(table.dim),
                str(table.row_bytes),
                number_text_of(num_ids),
            ]
        )
    head = ["table", "rows", "memory", "dim", "bytes of a row", "ids of a step"]
    return section("Tables", grid(head, rows), TABLES_TEXT)
