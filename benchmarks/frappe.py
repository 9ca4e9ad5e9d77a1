# SPDX-License-Identifier: Apache-2.0
"""Frappe_x1r: a folder with train.csv and valid.csv, each with the columns `label` and FIELDS."""

from __future__ import annotations

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
    valid = hb.Dataset(hb.sources.Csv(folder / "valid.csv"), schema, batch_size, cache=True)
    return train, valid
