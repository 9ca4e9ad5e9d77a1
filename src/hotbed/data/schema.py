# SPDX-License-Identifier: Apache-2.0
"""Schema: which columns there are and what each is for."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from hotbed import config
from hotbed.connectors import times
from hotbed.connectors.base import Source, not_endless
from hotbed.data.transforms import Extract, Map, Transform
from hotbed.errors import ConfigError, SchemaError

Type = Literal["text", "integer", "number", "mixed"]
Shape = Literal["value", "list", "mixed"]
POOLINGS = ("sum", "mean", "max", "none")


class Column(ABC):
    """A role that a raw column plays. `name` names it in the Batch; `column` is the raw column
    where that differs.
    """

    name: str
    column: str | None

    @property
    def source(self) -> str:
        """The raw column that it reads."""
        return self.column or self.name


@dataclass(frozen=True)
class Label(Column):
    """What is predicted, float32. `threshold`: 1 where the value is >= it, else 0. `positive`: 1
    where the text equals it.

    Examples: `Label("clicked")`, `Label("liked", column="rating", threshold=4)`, `Label("rich",
    column="income", positive="50000+.")`
    """

    name: str
    threshold: float | None = None
    column: str | None = None
    positive: str | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and self.positive is not None:
            raise ConfigError(
                f"label {self.name!r}: both threshold and positive — received {self.threshold}, "
                f"{self.positive!r} — "
                "give one of them"
            )


@dataclass(frozen=True)
class Time(Column):
    """When the event happened. `unit`: "s", "ms", "us", "ns", "iso" (text), or a strptime format;
    Arrow timestamps know theirs. Int64 microseconds UTC inside; text without a zone is UTC.
    """

    name: str
    unit: str = "s"
    column: str | None = None

    def __post_init__(self) -> None:
        if self.unit not in (*times.UNITS, "ns", "iso") and "%" not in self.unit:
            raise ConfigError(
                f"time {self.name!r}: unknown unit — received {self.unit!r} — use s, ms, us, ns, "
                "iso or a format "
                "such as '%y%m%d%H'"
            )


@dataclass(frozen=True)
class Weight(Column):
    """How much a sample counts in loss and metrics, float32 >= 0."""

    name: str
    column: str | None = None


@dataclass(frozen=True)
class Dense(Column):
    """A number (`width` 1) or a list of `width` numbers, float32. Missing values need
    `FillMissing`.
    """

    name: str
    transforms: Sequence[Transform] = ()
    column: str | None = None
    width: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.width < 1:
            raise ConfigError(
                f"dense {self.name!r}: width is at least 1 — received {self.width} — give the "
                "length of its lists"
            )


@dataclass(frozen=True)
class Id(Column):
    """One or many ids a sample: integers as they are, strings by hash, lists as bags. `table`: the
    embedding table (default: `name`); several features may share one.

    `pooling`: sum, mean, max, or none (a sequence). `padding`: an id that means "nothing here".
    `max_length`: of longer bags the last (newest) ids are kept. `weights`: a raw list column with
    one number an id.

    Example: `Id("genres", transforms=[Split("|")], pooling="mean")`
    """

    name: str
    table: str | None = None
    transforms: Sequence[Transform] = ()
    pooling: str = "sum"
    column: str | None = None
    padding: int | None = None
    max_length: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        object.__setattr__(self, "table", self.table or self.name)
        if self.pooling not in POOLINGS:
            raise ConfigError(
                f"id {self.name!r}: unknown pooling — received {self.pooling!r} — use one of "
                f"{', '.join(POOLINGS)}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(
                f"id {self.name!r}: max_length is at least 1 or None — received {self.max_length} "
                "— correct it"
            )


@dataclass(frozen=True)
class Schema:
    """The columns of a problem and their roles. A value: compare it, save it (`to_json`), build a
    table set and models from it.

    `types`: what raw columns held in training, "text", "integer", "number", or "mixed" where it was
    several; training fills it in, and from then on text for a number, or a number for text, is
    refused. `shapes`: whether a row of a raw column held one "value" or a "list"; training fills it
    in as well, and from then on lists for single values are refused. Raises ConfigError for two
    columns of one name, or more than one Time or Weight.

    Example:
        >>> hb.Schema([hb.Label("clicked"), hb.Time("time"), hb.Id("user"), hb.Id("item"), hb.Dense("price")])
    """

    columns: Sequence[Column]
    types: Mapping[str, Type] = field(default_factory=dict, compare=False)
    shapes: Mapping[str, Shape] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        for column in self.columns:
            if not isinstance(column, Column):
                raise ConfigError(
                    f"schema: {column!r} is no column — use Label, Time, Weight, Dense or Id"
                )
        names = [column.name for column in self.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"schema: names {twice} appear twice — received {names} — rename one and point "
                "`column` at the raw "
                "column"
            )
        for role in (Time, Weight):
            if sum(isinstance(column, role) for column in self.columns) > 1:
                raise ConfigError(
                    f"schema: more than one {role.__name__} — received {names} — keep one"
                )

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise SchemaError(
            f"schema: no column {name!r} — "
            f"{config.nearest(name, [column.name for column in self.columns])}"
        )

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels, in order."""
        return tuple(column for column in self.columns if isinstance(column, Label))

    @property
    def dense(self) -> tuple[Dense, ...]:
        """The dense columns, in order."""
        return tuple(column for column in self.columns if isinstance(column, Dense))

    @property
    def ids(self) -> tuple[Id, ...]:
        """The id features, in order."""
        return tuple(column for column in self.columns if isinstance(column, Id))

    @property
    def time(self) -> Time | None:
        """The time column, if there is one."""
        return next((column for column in self.columns if isinstance(column, Time)), None)

    @property
    def weight(self) -> Weight | None:
        """The weight column, if there is one."""
        return next((column for column in self.columns if isinstance(column, Weight)), None)

    @property
    def tables(self) -> dict[str, tuple[Id, ...]]:
        """Table name -> the id features that read it, in schema order."""
        found: dict[str, tuple[Id, ...]] = {}
        for column in self.ids:
            assert column.table is not None
            found[column.table] = (*found.get(column.table, ()), column)
        return found

    @property
    def dense_width(self) -> int:
        """Numbers in all dense columns of a sample together."""
        return sum(column.width for column in self.dense)

    def raw_columns(self, labels: bool = True) -> list[str]:
        """Raw columns that encoding reads, each once; without `labels` those that serving needs (no
        label, weight or time).
        """
        found: dict[str, None] = {}
        for column in self.columns:
            if not labels and isinstance(column, (Label, Time, Weight)):
                continue
            found[column.source] = None
            for transform in getattr(column, "transforms", ()):
                found.update(dict.fromkeys(transform.inputs()))
            if isinstance(column, Id) and column.weights:
                found[column.weights] = None
        return list(found)

    def number_types(self) -> dict[str, pa.DataType]:
        """Raw columns that are read only as numbers: text sources parse them as floats whatever the
        first rows look like.
        """
        numbers: dict[str, bool] = {}
        for column in self.columns:
            text = isinstance(column, Label) and column.positive is not None
            text = text or (
                isinstance(column, Dense)
                and bool(column.transforms)
                and isinstance(column.transforms[0], (Extract, Map))
            )
            fits = isinstance(column, (Label, Weight, Dense)) and not text
            numbers[column.source] = fits and numbers.get(column.source, True)
            for transform in getattr(column, "transforms", ()):
                numbers.update(dict.fromkeys(transform.inputs(), False))
        return {name: pa.float64() for name, fits in numbers.items() if fits}

    def fit(self, source: Source) -> Schema:
        """A schema whose transforms have learned (means, quantiles, vocabularies) from `source`:
        the training range only.
        """
        from hotbed.data.fit import fit

        not_endless(source, "fitting a schema")
        return fit(self, source)

    def with_transforms(self, name: str, transforms: Sequence[Transform]) -> Schema:
        """This schema with other transforms on one column."""
        changed = [
            replace(column, transforms=tuple(transforms))
            if isinstance(column, (Dense, Id)) and column.name == name
            else column
            for column in self.columns
        ]
        return Schema(changed, self.types, self.shapes)

    def with_types(self, types: Mapping[str, Type], shapes: Mapping[str, Shape]) -> Schema:
        """This schema, knowing also that raw columns held `types`, in `shapes`."""
        all_types = dict(self.types)
        for name, kind in types.items():
            all_types[name] = joined(all_types.get(name), kind)
        all_shapes = dict(self.shapes)
        for name, shape in shapes.items():
            all_shapes[name] = joined_shape(all_shapes.get(name), shape)
        return Schema(self.columns, all_types, all_shapes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, learned numbers included."""
        columns = [config.describe(column) for column in self.columns]
        learned = {"types": dict(self.types), "shapes": dict(self.shapes)}
        learned = {name: entries for name, entries in learned.items() if entries}
        value: dict[str, Any] = json.loads(json.dumps({"columns": columns, **learned}))
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> Schema:
        """Inverse of `to_json`; takes the object or its text. Raises ConfigError with the path of a
        wrong key.
        """
        spec = json.loads(value) if isinstance(value, str) else value
        columns: list[Column] = config.build(spec["columns"], Sequence[Column], "schema.columns")
        types = config.build(spec.get("types", {}), Mapping[str, Type], "schema.types")
        shapes = config.build(spec.get("shapes", {}), Mapping[str, Shape], "schema.shapes")
        return cls(columns, types, shapes)


def type_of(kind: pa.DataType) -> Type | None:
    """What a raw column of an Arrow type holds, or its lists do; None for what is neither text nor
    numbers.
    """
    while pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    text: Any = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
    )
    return "text" if any(one(kind) for one in text) else None


def shape_of(kind: pa.DataType) -> Shape | None:
    """Whether a row of an Arrow type is one value or a list; None where that is not known."""
    if pa.types.is_null(kind):
        return None
    return "list" if pa.types.is_nested(kind) else "value"


def joined_shape(one: Shape | None, other: Shape) -> Shape:
    """The shape of a column that had both."""
    return other if one is None or one == other else "mixed"


def joined(one: Type | None, other: Type) -> Type:
    """What a column holds that held both."""
    if one is None or one == other:
        return other
    return "number" if {one, other} == {"integer", "number"} else "mixed"


def check_schema(schema: Any) -> None:
    """Raise ConfigError for anything but a Schema."""
    if not isinstance(schema, Schema):
        kind = type(schema).__name__
        raise ConfigError(f"dataset.schema: not a Schema — received {kind} — give hb.Schema([…])")
