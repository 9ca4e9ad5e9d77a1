# SPDX-License-Identifier: Apache-2.0
"""What a join says of the samples of a batch, and the impressions that come with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from hotbed.data.batch import Batch, changed
from hotbed.data.encode import Encoder
from hotbed.data.schema import Schema


def encoded_preview(schema: Schema, raw: pa.RecordBatch) -> Batch:
    """Encode impressions of a join that have no labels yet.

    Bad rows are left out: they are counted, or raise, when they are samples.
    """
    return Encoder(schema, "skip")(raw.replace_schema_metadata(None), labels=False)


def with_previews(rows: Batch, previews: list[Batch]) -> Batch:
    """Return the same rows with the impressions that came before them, and empty their list."""
    if not previews:
        return rows
    together = Batch.concat(previews)
    previews.clear()
    return changed(rows, {"previews": together})


def mapped_batch(batch: Batch, functions: Sequence[Callable[[Batch], Batch]]) -> Batch:
    """Return what functions make of a batch, and of the impressions that come with it."""
    read = {"counted": batch.counted, "impressions": batch.impressions, "segments": batch.segments}
    previews = batch.previews
    num_samples = batch.num_samples
    for function in functions:
        batch = function(batch)
        if previews is not None:
            previews = function(previews)
    if batch.num_samples == num_samples:  # a function may make a batch of its own
        batch = changed(batch, read)
    return changed(batch, {"previews": previews})
