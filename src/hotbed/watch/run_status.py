# SPDX-License-Identifier: Apache-2.0
"""What a run wrote about itself into `status.json`, checked: a torn or foreign file is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hotbed.errors import FormatError

STATUS_FILE = "status.json"
_YEAR_9999 = 253_370_764_800
Count = Annotated[int, Field(ge=0)]
Moment = Annotated[float, Field(ge=0, lt=_YEAR_9999)]
Series = list[float | None]


class RunMemory(TypedDict):
    """Memory of the process, and of the smallest limit that holds for it."""

    resident_bytes: Count
    used_bytes: NotRequired[Count]
    limit_bytes: NotRequired[Annotated[int, Field(gt=0)]]
    of: NotRequired[str]


class WriteCounts(TypedDict):
    """Saves or publications, with more members than these."""

    failures: Count
    last_seconds: Moment | None


class RunMoments(TypedDict):
    """The last moments, oldest first; None = unknown then."""

    time: list[Moment]
    samples: list[Count]
    lag_rows: Series
    freshness_seconds: Series
    resident_bytes: Series


class RunStatus(TypedDict):
    """What the page reads of the status of a run; it may have more members."""

    state: Literal["training", "waiting", "ended", "failed"]
    part: str
    written: Moment
    every_seconds: float
    began: Moment
    process: int
    host: str
    ranks: Count
    error: str
    reason: str
    step: Count
    samples: Count
    epoch: Count
    epoch_steps: Count | None
    metrics: dict[str, Any]
    window: dict[str, Any]
    observed: dict[str, float | bool]
    memory: RunMemory
    rows: dict[str, Count]
    saves: WriteCounts | None
    publications: WriteCounts | None
    moments: RunMoments


_STATUS = TypeAdapter(RunStatus)


def read_status(folder: Path) -> Mapping[str, Any]:
    """Return what a run wrote into its folder; {} if it wrote no status.

    Raises:
        FormatError: the file cannot be read, or is not the status of a run.
    """
    file = folder / STATUS_FILE
    try:
        status: Mapping[str, Any] = json.loads(file.read_bytes())
        moments = _STATUS.validate_python(status, strict=True)["moments"]
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        member = ".".join(map(str, first["loc"])) or "the whole"
        raise FormatError(
            f"{file}: not the status of a run, got {member}: {first['msg']}. Watch a run with the "
            "version of Hotbed that trains it."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{file}: cannot be read, got {error}.") from error
    lengths = {name: len(values) for name, values in moments.items() if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        raise FormatError(f"{file}: moments must have one length, got {lengths}.")
    return status
