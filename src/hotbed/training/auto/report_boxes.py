# SPDX-License-Identifier: Apache-2.0
"""The boxes that the pictures of all reports share."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.pictures.boxes import Box, text_lines
from hotbed.training.auto.tracing.sources import IdSource


def input_box(name: str) -> Box:
    """Return the box of an argument of a model."""
    return Box(f"input {name}", "input", [("name", name), ("kind", "input")], [])


def add_ids(ids: dict[str, Box], source: IdSource, text: str) -> list[str]:
    """Return the names of the boxes that ids come from; add one for what computes them, if any.

    Args:
        ids: boxes of what computes ids, by name.
        source: where the ids come from.
        text: how they are computed.
    """
    inputs = [input_box(name).name for name in source.leaves]
    if text in [repr(name) for name in source.leaves]:
        return inputs
    name = f"ids {text}"
    ids[name] = Box(name, "plain", [("kind", "ids"), *text_lines("shape", text)], inputs, text)
    return [name]


def dense_box(model: str, num_dense: int, sources: Sequence[str]) -> Box:
    """Return the box of the dense part of a model."""
    shape = f"{num_dense:,} parameters"
    lines = [("name", model), ("kind", "dense part"), ("shape", shape)]
    return Box("dense", "output", lines, sources)
