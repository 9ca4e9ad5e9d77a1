# SPDX-License-Identifier: Apache-2.0
"""The table of docs/types.md: what a column of each type can be used as.

Each cell is tried: the use gives what it gives for a plain column of the same values, or it is
refused with the name of the column. After a change, write the table anew:
`PYTHONPATH=src python tests/unit/data/test_column_types.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotbed.connectors import Memory
from hotbed.data import Batch, Dataset, Dense, Id, Label, Schema, Time, Weight, transforms
from hotbed.errors import SchemaError

pytestmark = pytest.mark.core

PAGE = Path(__file__).parents[3] / "docs" / "types.md"
BEGIN = "<!-- tests/unit/data/test_column_types.py writes this table -->\n"
END = "<!-- end of the table -->\n"

TEXT = pa.string()
WHOLE = pa.int64()
MOMENT = datetime(2024, 1, 2, 3, 4, 5)
UNITS = ("s", "ms", "us", "ns")


@dataclass(frozen=True)
class Kind:
    """Types of one kind, each with the same two values.

    `ids`, `numbers`, `texts`, `times`: these values in a plain column; None where they are no ids,
    numbers, texts or times.
    """

    arrays: Sequence[pa.Array]
    ids: pa.Array | None = None
    numbers: pa.Array | None = None
    texts: pa.Array | None = None
    times: pa.Array | None = None


def of_types(values: Sequence[Any], *kinds: pa.DataType) -> list[pa.Array]:
    return [pa.array(values, kind) for kind in kinds]


def words(values: pa.Array, index: pa.DataType, kind: pa.DataType) -> pa.Array:
    """Return a dictionary, as Categorical and Enum columns of data frames are."""
    encoded = values.dictionary_encode()
    indices = encoded.indices.cast(index)
    return pa.DictionaryArray.from_arrays(indices, encoded.dictionary.cast(kind))


SMALL = pa.array([1, 7])
FLOATS = pa.array([1.5, 7.0])
DIGITS = pa.array(["1", "7"])
AS_FLOATS = SMALL.cast(pa.float64())
SECONDS = SMALL.cast(pa.timestamp("s"))
DAYS = [MOMENT.date(), date(2024, 1, 3)]
MOMENTS = [MOMENT, MOMENT + timedelta(days=1)]
BITS = (8, 16, 32, 64)
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), DIGITS)

KINDS = {
    "`bool`": Kind(
        of_types([True, False], pa.bool_()),
        pa.array([1, 0]),
        pa.array([1.0, 0.0]),
        pa.array(["true", "false"]),
    ),
    "integers, signed and unsigned": Kind(
        of_types([1, 7], *(getattr(pa, f"{u}int{bits}")() for u in ("", "u") for bits in BITS)),
        SMALL,
        AS_FLOATS,
        DIGITS,
        SECONDS,
    ),
    "floats": Kind(
        [pa.array(np.array([1.5, 7.0], np.float16)), FLOATS.cast(pa.float32()), FLOATS],
        numbers=FLOATS,
        times=FLOATS,
    ),
    "`decimal`": Kind(
        of_types([Decimal("1.5"), Decimal("7")], pa.decimal128(10, 2), pa.decimal256(50, 2)),
        numbers=FLOATS,
        times=FLOATS,
    ),
    "`string`, also large and view": Kind(
        of_types(["1", "7"], TEXT, pa.large_string(), pa.string_view()),
        DIGITS,
        AS_FLOATS,
        DIGITS,
        SECONDS,
    ),
    "`binary`, also large, view and of fixed size": Kind(
        of_types([b"1", b"7"], pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)),
        DIGITS,
        AS_FLOATS,
        DIGITS,
        SECONDS,
    ),
    "dictionary of text (Categorical, Enum)": Kind(
        [words(DIGITS, pa.int8(), TEXT), words(DIGITS, pa.uint32(), pa.string_view()), RUNS],
        DIGITS,
        AS_FLOATS,
        DIGITS,
        SECONDS,
    ),
    "dictionary of integers": Kind(
        [words(SMALL, pa.int8(), WHOLE)], SMALL, AS_FLOATS, DIGITS, SECONDS
    ),
    "`date`": Kind(
        of_types(DAYS, pa.date32(), pa.date64()),
        texts=pa.array(["2024-01-02", "2024-01-03"]),
        times=pa.array(DAYS),
    ),
    "`timestamp`": Kind(
        of_types(MOMENTS, *(pa.timestamp(unit, zone) for unit in UNITS for zone in (None, "UTC"))),
        times=pa.array(MOMENTS),
    ),
    "`time`, `duration`": Kind(
        [
            *of_types([time(1), time(2)], pa.time32("s"), pa.time64("us")),
            *of_types([timedelta(1), timedelta(2)], pa.duration("us")),
        ]
    ),
    "`struct`, `map`, interval": Kind(
        [
            pa.array([(1, 2, 3), (4, 5, 6)], pa.month_day_nano_interval()),
            *of_types([{"f": 1}, {"f": 7}], pa.struct([("f", WHOLE)])),
            *of_types([[("f", 1)], [("f", 7)]], pa.map_(TEXT, WHOLE)),
        ]
    ),
}


def rows_of(values: pa.Array) -> Memory:
    """Return rows of the column `x`, and of others that stand beside it."""
    return Memory(pa.table({"x": values, "y": pa.array([1, 0]), "other": SMALL}))


def encoded(values: pa.Array, column: Any, *, fit: bool = False) -> Batch:
    """Return two rows, encoded by a schema that went through a file."""
    rows = rows_of(values)
    schema = Schema([Label("y"), column])
    if fit:
        schema = schema.fit(rows)
    schema = Schema.from_json(json.dumps(schema.to_json()))
    return next(iter(Dataset(rows, schema, 2, prefetch=0)))


def lists(values: pa.Array) -> pa.Array:
    """Return lists with one value each."""
    return pa.LargeListArray.from_arrays(pa.array([0, 1, 2]), values)


def ids(values: pa.Array, column: Id, *, fit: bool = False) -> Any:
    bag = encoded(values, column, fit=fit).ids[column.name]
    return bag.values.tolist(), bag.lengths().tolist()


def by_id(*steps: Any, fit: bool = False) -> Callable[[pa.Array], Any]:
    return lambda values: ids(values, Id("x", transforms=steps), fit=fit)


def dense(*steps: Any, fit: bool = False) -> Callable[[pa.Array], Any]:
    return lambda values: encoded(values, Dense("x", steps), fit=fit).dense["x"].tolist()


def label(**options: Any) -> Callable[[pa.Array], Any]:
    return lambda values: encoded(values, Label("x", **options)).labels["x"].tolist()


def of_time(values: pa.Array) -> Any:
    return encoded(values, Time("x")).time.tolist()


def id_weights(values: pa.Array) -> Any:
    return encoded(values, Id("other", weights="x")).ids["other"].weights.tolist()


def joined(values: pa.Array) -> Any:
    side = Memory(pa.table({"x": values.slice(1), "found": [5]}))
    (batch,) = (batch for batch, _ in rows_of(values).join(side, on="x").read())
    return batch.column("found").to_pylist()


def in_order(values: pa.Array) -> Any:
    (batch,) = (batch for batch, _ in rows_of(values).sort("x").read())
    return batch.column("other").to_pylist()


# name of a column of the table -> the plain column that each of its uses is held to, and the uses
USES: dict[str, tuple[str, list[Callable[[pa.Array], Any]]]] = {
    "`Id`": ("ids", [by_id(), lambda values: ids(lists(values), Id("x"))]),
    "`Hash`, `Cross`": (
        "ids",
        [
            by_id(transforms.Hash()),
            by_id(transforms.Cross(["other"])),
            lambda values: ids(values, Id("other", transforms=[transforms.Cross(["x"])])),
        ],
    ),
    "`Map`": ("ids", [by_id(transforms.Map(), fit=True)]),
    "`Shift`": ("ids", [by_id(transforms.Shift(2))]),
    "`Label`, `Dense`, weights": (
        "numbers",
        [
            label(),
            label(threshold=2),
            dense(),
            lambda values: encoded(lists(values), Dense("x")).dense["x"].tolist(),
            lambda values: encoded(values, Weight("x")).weight.tolist(),
            id_weights,
        ],
    ),
    "`Bucketize`, `Clip`, `Log`, `Normalize`": (
        "numbers",
        [
            by_id(transforms.Bucketize([2.0])),
            by_id(transforms.Bucketize(bins=2), fit=True),
            dense(transforms.Clip(0, 2)),
            dense(transforms.Log()),
            dense(transforms.Normalize(), fit=True),
        ],
    ),
    "`Label(positive=)`, `Extract`": (
        "texts",
        [label(positive="7"), by_id(transforms.Extract("(.*)"))],
    ),
    "`Split`": ("texts", [by_id(transforms.Split("|"))]),
    "`Time`, `TimeOfDay`": ("times", [of_time, by_id(transforms.TimeOfDay())]),
    "key of a join": ("same", [joined]),
    "order of a sort": ("same", [in_order]),
}


def attempt(use: Callable[[pa.Array], Any], values: pa.Array) -> tuple[Any, str]:
    """Return what a use gives, and the message with which it refuses the values; "" = none."""
    try:
        return use(values), ""
    except SchemaError as error:
        return None, str(error)


def accepts(kind: Kind, reference: str, uses: Sequence[Callable[[pa.Array], Any]]) -> bool:
    """Return whether all uses take all types of a kind, and are right; else all must refuse it."""
    taken: set[bool] = set()
    for values in kind.arrays:
        for use in uses:
            result, refusal = attempt(use, values)
            taken.add(not refusal)
            if refusal:
                assert "'x'" in refusal or "'other'" in refusal, refusal
                continue
            if reference == "same":
                expected = [None, 5] if use is joined else in_order(SMALL.take(order_of(values)))
            else:
                expected = use(getattr(kind, reference))
            assert result == expected, (values.type, result, expected)
    assert len(taken) == 1, (kind.arrays[0].type, reference)
    return taken.pop()


def order_of(values: pa.Array) -> pa.Array:
    """Return the places of the rows in ascending order of their Python values."""
    whole = values.to_pylist()
    return pa.array(sorted(range(len(whole)), key=whole.__getitem__))


def table() -> str:
    lines = ["| | " + " | ".join(USES) + " |", "|---|" + "---|" * len(USES)]
    for name, kind in KINDS.items():
        cells = ["yes" if accepts(kind, *use) else "–" for use in USES.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_page_of_types_says_what_each_type_is_used_as() -> None:
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0] == table()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
