# SPDX-License-Identifier: Apache-2.0
"""What a command reports while it works: values, given to a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotbed.files import Where

if TYPE_CHECKING:
    from hotbed.training.model import RecModel
    from hotbed.training.watching.history import History


@dataclass(frozen=True)
class MovedAside:
    """The states of an earlier stream were renamed to `folder`."""

    folder: Path


@dataclass(frozen=True)
class WarmStarted:
    """`table` begins with `num_rows` rows of the table `source` in the checkpoint at `path`."""

    table: str
    num_rows: int
    source: str
    path: Where


@dataclass(frozen=True)
class Began:
    """Learning `part` (`"train"` or `"stream"`) begins, with a model of kind `model`."""

    part: str
    model: str
    num_ids: int
    num_dense: int


@dataclass(frozen=True)
class Finished:
    """Learning ended, and neither the model nor the report is saved. `histories`: by part."""

    model: RecModel
    histories: Mapping[str, History]


@dataclass(frozen=True)
class Scored:
    """`num_rows` rows are scored; `total`: all rows, None where the source does not know."""

    num_rows: int
    total: int | None


Event = MovedAside | WarmStarted | Began | Finished | Scored
Report = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Report nothing."""
