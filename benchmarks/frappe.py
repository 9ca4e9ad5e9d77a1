# SPDX-License-Identifier: Apache-2.0
"""Frappe_x1r: a folder with train.csv and valid.csv, each with the columns `label` and FIELDS."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import hotbed as hb

FIELDS = [
    "user",
    "item",
    "daytime",
    "weekday",
    "isweekend",
    "homework",
    "cost",
    "weather",
    "country",
    "city",
]


def datasets(folder: Path, batch_size: int, seed: int) -> tuple[hb.Dataset, hb.Dataset]:
    """Return the training and the validation data."""
    train, [valid] = parts(folder, batch_size, seed, num_parts=1)
    return train, valid


def parts(
    folder: Path, batch_size: int, seed: int, *, num_parts: int
) -> tuple[hb.Dataset, list[hb.Dataset]]:
    """Return the training data, and parts of equal size of the validation file."""
    import hotbed as hb  # the environments of the peers read FIELDS, and have no Hotbed

    schema = hb.Schema([hb.Label("label"), *(hb.Id(name) for name in FIELDS)])
    train = hb.Dataset(
        hb.sources.Csv(folder / "train.csv"),
        schema,
        batch_size,
        shuffle=1 << 20,
        seed=seed,
        cache=True,
    )
    source = hb.sources.Csv(folder / "valid.csv")
    shares = [part / num_parts for part in range(num_parts + 1)]
    pieces = [source.slice(begin, end) for begin, end in itertools.pairwise(shares)]
    return train, [hb.Dataset(piece, schema, batch_size, cache=True) for piece in pieces]
