# SPDX-License-Identifier: Apache-2.0
"""The commands on request logs: score them again, measure them, replay them with another job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotbed.cli.arguments import assigned, read_job

MeasureSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Set one value of the file; may be repeated."),
]


def rescore(
    log: Annotated[str, typer.Argument(metavar="LOG", help="The folder of a model's request log.")],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An exported model, or a published version.")
    ],
) -> None:
    """Score logged requests again, and compare with the logged scores, by version.

    The exit code is 1 if MODEL scored some of them itself, and one of its scores differs.
    """
    from hotbed.cli import show
    from hotbed.serving.main import rescore_log

    versions, is_equal = rescore_log(log, model)
    show.print_rescored(versions)
    if not is_equal:
        raise typer.Exit(1)


def measure(
    file: Annotated[
        Path, typer.Argument(metavar="MEASURE.yaml", help="What to measure: YAML, or JSON.")
    ],
    assignments: MeasureSettings = None,
) -> None:
    """Measure the quality of what was served, by route, version and segment, with intervals.

    A log that ends is measured at once. Otherwise each window is measured once its outcomes are
    known; Ctrl-C saves, and the next call resumes. See docs/measure.md.
    """
    from hotbed.cli import show
    from hotbed.quality.measure import ServingQuality

    quality = ServingQuality.read(file, assigned(assignments, "measure"))
    show.print_quality(quality.measure(report=show.print_window))


def replay(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG|MEASURE.yaml",
            help="The folder of a model's request log, or a file for hotbed measure.",
        ),
    ],
    other: Annotated[Path, typer.Option("--job", help="The other job: YAML, or JSON.")],
    base: Annotated[
        Path | None, typer.Option(help="A job to compare with; default: the logged scores.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="A checkpoint that the other job begins with.")
    ] = None,
    place: Annotated[
        str | None, typer.Option(help="The column of places; default: shown by falling score.")
    ] = None,
    warm_up: Annotated[
        float | None,
        typer.Option(help="The share of rows that are learned, but do not count; default: 0.5."),
    ] = None,
    assignments: MeasureSettings = None,
) -> None:
    """Let another job learn last week again, and predict a test of it on users.

    It scores each logged request before it learns it. Called again, it resumes. With the folder of
    a log, the outcomes are those of the join that is the stream of the job. See docs/replay.md.
    """
    from hotbed.cli import show
    from hotbed.quality.replay import JobReplay, measure_of

    job = read_job(other, None)
    base_job = None if base is None else read_job(base, None)
    measure = measure_of(log, job, assigned(assignments, "measure"))
    replaying = JobReplay(measure, job, base_job, start, place, warm_up)
    replayed = replaying.replay(show.print_event, progress=True)
    show.print_replayed(replayed, replaying.output)
