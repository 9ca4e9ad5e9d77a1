# SPDX-License-Identifier: Apache-2.0
"""The stages of a preparation, one after another, and the folder that they write."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.read_plan import ReadPlan, Skips
from hotbed.connectors.text.delimited import Csv
from hotbed.data.columns import require_columns
from hotbed.data.schema import Dense, Id, Schema, Weight
from hotbed.data.transforms import JoinGroupby, TargetEncode
from hotbed.errors import ConfigError, DataError, PersistError
from hotbed.files import (
    MARK_FILE,
    HeldFolder,
    claim_folder,
    free_name,
    local_path,
    remove_all,
    sync_folder,
    writing,
)
from hotbed.prepare.engine import Engine
from hotbed.prepare.fit import Fitted, fit
from hotbed.prepare.inputs import Inputs, digest_of_input, files_of, fixed, states_of
from hotbed.prepare.output.files import write_workflow
from hotbed.prepare.output.layout import Layout
from hotbed.prepare.output.write import Writing
from hotbed.prepare.partitions import Chunk, partitions_of
from hotbed.prepare.preparation import Preparation
from hotbed.prepare.report import Profile, write_report
from hotbed.prepare.sampling.split import Holdout
from hotbed.prepare.stages import Report, Stage, Work, add_negatives, derive, num_buckets, split
from hotbed.prepare.view import View

REPORT_FILE = "report.html"
log = logging.getLogger("hotbed.prepare")


@contextlib.contextmanager
def new_output(output: str, *, restart: bool) -> Iterator[Path]:
    """Make a folder that gets its name when the block ends, and not at all after an error.

    Args:
        output: the path.
        restart: rename a folder that is there first.

    Raises:
        ConfigError: the folder exists and `restart` is not set, it is a link that leads nowhere, or
            Hotbed did not write what lies at the place of the unfinished folder.
        PersistError: another process writes it.
        NotWritten: the folder or a file in it cannot be written.
    """
    path = local_path(output, "prepare.output").absolute()
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"prepare.output: a link that leads nowhere, got {output!r}, a link to "
            f"{os.readlink(path)!r}. Remove the link, or make the folder's parent its target."
        )
    if path.exists() and not restart:
        raise ConfigError(
            f"prepare.output: the folder exists and is not overwritten, got {output!r}. Give "
            "another one, or move it aside with `hotbed prepare --restart`."
        )
    partial = path.with_name(path.name + ".partial")
    claim_folder(partial, "prepare.output")
    with _held(partial):
        remove_all(path for path in partial.iterdir() if path.name != MARK_FILE)
        try:
            with writing(partial):
                yield partial
        except BaseException:
            remove_all(partial.iterdir())  # a full disk gets its room back
            raise
        if path.exists():
            os.rename(path, free_name(path))
        os.rename(partial, path)
        (path / MARK_FILE).unlink()
        sync_folder(path)
        sync_folder(path.parent)


def _held(partial: Path) -> HeldFolder:
    try:
        return HeldFolder(partial)
    except BlockingIOError as error:
        raise PersistError(
            f"{partial}: another process prepares it, got {error}. Wait for it, or give this one "
            "another output."
        ) from error


def run(job: Preparation, engine: Engine, folder: Path, report: Report) -> None:
    """Fit the schema of a preparation, and write its rows into `folder`."""
    engine.check_folder(folder)
    with_columns = job.with_kept_as_columns()
    work = _work(with_columns, engine, folder, report)
    view = _arranged(with_columns, work)
    fitted = fit(with_columns.schema, work, view, folder)
    _write(job, work, fitted, folder)


def run_again(
    job: Preparation,
    fitted: Schema,
    before: Mapping[str, Any],
    engine: Engine,
    folder: Path,
    report: Report,
) -> None:
    """Write the rows of a preparation with a schema that was fitted before.

    Training rows get their own target encodings, from the rows of this source.

    Args:
        job: the preparation.
        fitted: its fitted schema over raw rows.
        before: the workflow of the preparation.
        engine: runs tasks.
        folder: the output.
        report: called when a task of a stage has ended.

    Raises:
        DataError: the source is not that of the preparation. For the workflow of an earlier version
            without a digest of the source, only the numbers of rows are compared, at the end.
    """
    engine.check_folder(folder)
    with_columns = job.with_kept_as_columns()
    work = _work(with_columns, engine, folder, report)
    if "source" in before:
        work.inputs.require(before["source"])
    schema = _without_encodings(fitted)
    view = _arranged(replace(with_columns, schema=schema), work)
    _copy_maps(fitted, folder)
    again = fit(schema, work, view, work.folder / "again")
    parts = _write(job, work, Fitted(_in_folder(fitted, folder), again.view), folder)
    expected = {part: facts["rows"] for part, facts in before["parts"].items()}
    if parts != expected:
        raise DataError(
            f"apply: training=True needs the source that was prepared, got {parts} rows instead "
            f"of {expected}. Give that source; or leave training out."
        )


def apply(job: Preparation, fitted: Schema, engine: Engine, folder: Path, report: Report) -> None:
    """Write all rows of the source with a schema that was fitted before, as the part `valid`."""
    engine.check_folder(folder)
    with_columns = job.with_kept_as_columns()
    work = _work(with_columns, engine, folder, report)
    every_row = replace(with_columns, schema=fitted, split=_Everything(), negatives=None)
    if job.down_sample is not None:
        every_row = replace(every_row, down_sample=replace(job.down_sample, keep=1.0))
    view = _arranged(every_row, work, all_positive=job.negatives is not None)
    _copy_maps(fitted, folder)
    _write(job, work, Fitted(_in_folder(fitted, folder), view), folder)


@dataclass(frozen=True)
class _Everything(Holdout):
    """All rows are in the part `valid`: a schema that was fitted before did not learn from them."""

    def inputs(self) -> Sequence[str]:
        return ()

    def valid_rows(self, chunk: Chunk, schema: Schema, seed: int) -> NDArray[np.bool_]:
        return np.ones(len(chunk), bool)


def _work(job: Preparation, engine: Engine, folder: Path, report: Report) -> Work:
    source = fixed(job.source)
    paths = files_of(source)
    states = states_of(paths)
    report(Stage("inputs", 0, len(paths)))
    digests = engine.map(
        digest_of_input, paths, lambda done: report(Stage("inputs", done, len(paths)))
    )
    inputs = Inputs(source, states, dict(zip(paths, digests, strict=True)))
    inputs.check()
    return Work(
        engine,
        inputs,
        partitions_of(source),
        folder / "work",
        num_buckets(job, engine.num_workers),
        job.memory_bytes,
        report,
    )


def _arranged(job: Preparation, work: Work, *, all_positive: bool = False) -> View:
    """Return the view after all stages before the fits.

    Args:
        job: what the stages do.
        work: what they share.
        all_positive: rows of a source without the label's column are positives.

    Raises:
        DataError: the source has no rows.
    """
    is_implicit = all_positive or job.negatives is not None
    view = View(
        _plan(job, is_implicit=is_implicit),
        job.schema,
        job.seed,
        memory=job.memory_bytes,
        skip_bad=job.on_error == "skip",
        all_positive=all_positive,
    )
    _first_rows(work, view)
    view = derive(job, work, view)
    view = split(job, work, view)
    view = add_negatives(job, work, view)
    return replace(view, down_sample=job.down_sample)


def _write(job: Preparation, work: Work, fitted: Fitted, folder: Path) -> dict[str, int]:
    """Write the rows of a view, the report, and last the workflow; return the rows of each part.

    Args:
        job: as it was given.
        work: what its stages share.
        fitted: the schema, and the rows.
        folder: the output.
    """
    with_columns = job.with_kept_as_columns()
    raw = replace(fitted.schema, derived=_descriptions(with_columns))
    layout = Layout.of(_with_weight(raw, job), _first_rows(work, fitted.view))
    profile = Profile(raw)
    files = []
    skipped: Counter[str] = Counter()
    for part in work.map("write", Writing(folder, fitted.view, layout), work.partitions):
        files.append(part.files)
        profile.merge(part.profile)
        skipped += part.skipped
        raw = raw.with_types(part.types, part.shapes)
    shutil.rmtree(work.folder, ignore_errors=True)
    plain = _described(job)
    about = {}
    for name in plain:
        if name not in ("schema", "output", "memory"):
            about[name] = json.dumps(plain[name], ensure_ascii=False)
    for name, count in work.counts.items():
        about[name.replace("_", " ")] = f"{count:,}"
    facts = {f"rows left out ({reason})": count for reason, count in skipped.items()}
    findings = profile.sample.findings(_feature_columns(raw), _histories(with_columns, raw))
    for finding in findings:
        log.warning("prepare: %s", finding)
    write_report(folder / REPORT_FILE, profile, raw, facts=facts, about=about, findings=findings)
    counts = {**work.counts, "skipped": dict(skipped)}
    source = work.inputs.to_json()
    work.inputs.check()
    write_workflow(folder, plain, layout.schema(), raw, source, files, counts)
    return {name: part.rows for name, part in profile.parts.items()}


def _feature_columns(raw: Schema) -> list[str]:
    """Return the raw columns that features are made of."""
    names: dict[str, None] = {}
    columns: list[Dense | Id] = [*raw.dense, *raw.ids]
    for column in columns:
        names[column.source] = None
        for transform in column.transforms:
            names.update(dict.fromkeys(transform.inputs()))
    return list(names)


def _histories(job: Preparation, raw: Schema) -> list[tuple[str, str]]:
    """Return pairs of columns of which one may hold lists of the values of the other."""
    pairs: dict[tuple[str, str], None] = {}
    for derivation in job.derive:
        for column in derivation.columns():
            pairs[derivation.name, column] = None
    for feature in raw.ids:
        for other in raw.ids:
            shares_table = (feature.table or feature.name) == (other.table or other.name)
            if feature.source != other.source and shares_table:
                pairs[feature.source, other.source] = None
    return list(pairs)


def _described(job: Preparation) -> dict[str, Any]:
    """Return a preparation as plain values; without a source that is in memory."""
    try:
        return job.to_json()
    except ConfigError:
        nothing = Csv("")
        plain = replace(job, source=nothing).to_json()
        del plain["source"]
        return plain


def _first_rows(work: Work, view: View) -> pa.RecordBatch:
    """Return the first rows, which show the types of the columns.

    Raises:
        DataError: the source has no rows.
    """
    for partition in work.partitions:
        for chunk in view.chunks(partition):
            return chunk.rows.slice(0, 1000)
    raise DataError(
        "prepare.source: it has no rows, got an empty source. Check its path, and which rows are "
        "left out."
    )


# --- raw columns ----------------------------------------------------------------------------------


def _plan(job: Preparation, *, is_implicit: bool) -> ReadPlan:
    """Return the raw columns to read, and their types; `is_implicit`: labels may be absent."""
    present = job.source.schema().names
    as_they_are = _keys_and_groups(job)
    added = {derivation.name for derivation in job.derive}
    repeated = sorted(added & set(present))
    if repeated:
        raise ConfigError(
            f"derive: the source has columns {repeated} already, got {present}. Give the derived "
            "columns other names."
        )
    if is_implicit:
        added |= {label.source for label in job.schema.labels} - set(present)
    names: dict[str, None] = {}
    for name in [*job.schema.raw_columns(), *_only_learned_from(job.schema), *as_they_are]:
        if name not in added:
            names[name] = None
    require_columns(list(names), present)
    types = {name: pa.float64() for name in _only_numbers_of(job.schema)}
    for name in as_they_are:
        types.pop(name, None)
    skips = None
    if job.on_error == "skip":
        skips = Skips()
    words = [name for name in _only_words(job.schema) if name not in as_they_are]
    return ReadPlan(tuple(names), types, skips, words=words)


def _keys_and_groups(job: Preparation) -> list[str]:
    """Return the raw columns that are read as they are: keys, times and items."""
    names: list[str] = []
    for derivation in job.derive:
        names += derivation.inputs()
    if job.split is not None:
        names += job.split.inputs()
    if job.negatives is not None:
        names += job.negatives.inputs()
    return names


def _only_words(schema: Schema) -> list[str]:
    """Return the raw columns that are only read word by word."""
    names: set[str] = set()
    others: set[str] = set()
    for column in schema.columns:
        is_words = False
        if isinstance(column, (Dense, Id)):
            is_words = bool(column.transforms) and column.transforms[0].by_value
            for transform in column.transforms:
                others.update(transform.inputs(), transform.learns_from())
        if is_words:
            names.add(column.source)
        else:
            others.add(column.source)
    return sorted(names - others)


def _only_learned_from(schema: Schema) -> list[str]:
    names: list[str] = []
    columns: list[Dense | Id] = [*schema.dense, *schema.ids]
    for column in columns:
        for transform in column.transforms:
            if transform.learner() is not None:
                names += transform.learns_from()
    return names


def _only_numbers_of(schema: Schema) -> list[str]:
    """Return the raw columns that are read only as numbers."""
    names = list(schema.number_types())
    of_schema = schema.raw_columns()
    columns: list[Dense | Id] = [*schema.dense, *schema.ids]
    for column in columns:
        for transform in column.transforms:
            if isinstance(transform, JoinGroupby) and transform.column not in of_schema:
                names.append(transform.column)
    return names


def _with_weight(schema: Schema, job: Preparation) -> Schema:
    """Return the schema with the weight that down-sampling computes, in the place of its own."""
    sample = job.down_sample
    if sample is None or sample.weight is None:
        return schema
    weight = Weight(sample.weight, column=sample.weight_column)
    if schema.weight is None:
        return replace(schema, columns=[*schema.columns, weight])
    columns = [weight if column is schema.weight else column for column in schema.columns]
    return replace(schema, columns=columns)


def _descriptions(job: Preparation) -> dict[str, str]:
    """Return for each derived column that servers need what it is."""
    needed = job.schema.raw_columns(labels=False)
    return {
        derivation.name: derivation.description
        for derivation in job.derive
        if derivation.name in needed
    }


# --- a schema that was fitted before --------------------------------------------------------------


def _without_encodings(schema: Schema) -> Schema:
    """Return a fitted schema whose target encodings are to be learned again."""
    columns: list[Dense | Id] = [*schema.dense, *schema.ids]
    for column in columns:
        transforms = []
        for transform in column.transforms:
            if isinstance(transform, TargetEncode):
                transform = replace(transform, prior=None, fitted=None)
            transforms.append(transform)
        schema = schema.with_transforms(column.name, transforms)
    return schema


def _copy_maps(schema: Schema, folder: Path) -> None:
    """Copy the fitted maps of a schema into an output, so that it is whole on its own."""
    for fitted in schema.maps:
        path = _map_path(fitted.path, folder)
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(fitted.path, path)


def _in_folder(schema: Schema, folder: Path) -> Schema:
    paths = {fitted.digest: _map_path(fitted.path, folder) for fitted in schema.maps}
    return schema.with_maps(paths)


def _map_path(path: Path, folder: Path) -> Path:
    return folder / "maps" / path.name
