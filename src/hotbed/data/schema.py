# SPDX-License-Identifier: Apache-2.0
"""Schema: the columns of a problem and their roles."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa

from hotbed import checks, config
from hotbed.connectors import times
from hotbed.connectors.prepared import check_maps, read_workflow
from hotbed.connectors.source import Source, not_endless
from hotbed.data.arrow_types import Shape, Type, is_list, is_type, joined, joined_shape
from hotbed.data.columns import RULES, Columns, ids_of, missing_as_null, transformed
from hotbed.data.fit import fit
from hotbed.data.fitted import FittedMap
from hotbed.data.transforms import Expression, FillMissing, TimeOfDay, Transform
from hotbed.errors import ConfigError, SchemaError
from hotbed.files import local_path

POOLINGS = ("sum", "mean", "max", "none")
"""In the order of the native core's numbers."""


class Column(ABC):
    """Base of the roles of raw columns.

    `name`: the name in the Batch. `column`: the name of the raw column, if it differs from `name`.
    """

    name: str
    column: str | None

    @property
    def source(self) -> str:
        """The raw column that is read."""
        return self.column or self.name

    @property
    def reads_numbers(self) -> bool:
        """Whether the raw column is read as numbers, also if it holds text."""
        return False


@dataclass(frozen=True)
class Label(Column):
    """A value to predict, float32.

    `threshold`: the label is 1 where the value is >= `threshold`, else 0; they are compared in the
    type of the column. `positive`: the label is 1 where the text equals `positive`, else 0.

    Examples: `Label("clicked")`, `Label("liked", column="rating", threshold=4)`, `Label("rich",
    column="income", positive="50000+.")`
    """

    name: str
    threshold: float | int | None = None
    column: str | None = None
    positive: str | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and self.positive is not None:
            raise ConfigError(
                f"label {self.name!r}: threshold and positive exclude each other, got "
                f"threshold={self.threshold} and positive={self.positive!r}. Give one of them."
            )

    @property
    def reads_numbers(self) -> bool:
        # text sources read numbers as float64, which has too few bits for a large threshold
        is_large = self.threshold is not None and abs(self.threshold) > 1 << 53
        return self.positive is None and not is_large


@dataclass(frozen=True)
class Time(Column):
    """The time of the event, int64 microseconds UTC in a Batch.

    `unit`: "s", "ms", "us", "ns", "iso" (text), or a strptime format. Arrow timestamps bring their
    own unit. Text without a time zone is UTC. `hotbed.connectors.times` parses them. A `TimeOfDay`
    of the same raw column takes this unit.
    """

    name: str
    unit: str = "s"
    column: str | None = None

    def __post_init__(self) -> None:
        times.check_unit(f"time {self.name!r}", self.unit)


@dataclass(frozen=True)
class Weight(Column):
    """The weight of a sample in loss and metrics, float32 >= 0."""

    name: str
    column: str | None = None

    @property
    def reads_numbers(self) -> bool:
        return True


@dataclass(frozen=True)
class DisplayPosition(Column):
    """The place at which an item was shown, for its effect on clicks.

    Training subtracts the effect: a network of `hb.models` predicts the label at the place where
    the item was shown. Without a place it predicts what it would predict for the first one, and so
    does a server, whatever a request brings. `predict` reads no places, as it reads no labels.

    Args:
        name: in the Batch, float32 [n] among the dense columns: 0 for the first place, 1 for the
            next one, and -1 where the place is missing.
        column: the raw column, whole numbers.
        form: "additive": each place has a number that is added to the logit. "factor": each place
            has a probability of being looked at, by which the probability of the label is
            multiplied. The first place has 0 and 1.
        first: the number of the first place.
        size: places that have an effect of their own; later ones have that of the last.

    Example: `DisplayPosition("position", form="factor")`. Source: of "additive", the shallow tower
    of Zhao et al., "Recommending What Video to Watch Next: A Multitask Ranking System", RecSys
    2019; of "factor", Guo et al., "PAL: A Position-bias Aware Learning Framework for CTR Prediction
    in Live Recommender Systems", RecSys 2019.
    """

    name: str
    column: str | None = None
    form: Literal["additive", "factor"] = "additive"
    first: int = 0
    size: int = 50

    def __post_init__(self) -> None:
        where = f"display position {self.name!r}"
        checks.one_of(f"{where}: form", self.form, ("additive", "factor"))
        checks.at_least(f"{where}: size", self.size, 2, "Give the number of places.")

    @property
    def reads_numbers(self) -> bool:
        return True


@dataclass(frozen=True)
class Dense(Column):
    """A number (`width` 1) or a list of `width` numbers, float32.

    Missing values need the transform `FillMissing`.
    """

    name: str
    transforms: Sequence[Transform] = ()
    column: str | None = None
    width: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        object.__setattr__(self, "column", _read_column(self))
        where = f"dense {self.name!r}: width"
        checks.at_least(where, self.width, 1, "Give the length of its lists.")
        for place, transform in enumerate(self.transforms):
            later = self.transforms[place + 1 :]
            if transform.gives_nulls and not any(isinstance(fill, FillMissing) for fill in later):
                raise ConfigError(
                    f"dense {self.name!r}: keys that training did not have would be missing, got "
                    f"{config.kind_of(type(transform))} without fill_missing. Add fill_missing "
                    "after it."
                )

    @property
    def reads_numbers(self) -> bool:
        return not (self.transforms and self.transforms[0].reads_text)


@dataclass(frozen=True)
class Id(Column):
    """One or more ids per sample: integers unchanged, strings hashed, lists as bags.

    `table`: the embedding table (default: `name`); several features may share a table. `pooling`:
    sum, mean, max, or none (a sequence). `padding`: an id that means "nothing here". `max_length`:
    longer bags keep their last (newest) ids. `weights`: a raw list column with one number per id.

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
        object.__setattr__(self, "column", _read_column(self))
        object.__setattr__(self, "table", self.table or self.name)
        checks.one_of(f"id {self.name!r}: pooling", self.pooling, POOLINGS)
        advice = "Give a length, or None for no limit."
        checks.at_least(f"id {self.name!r}: max_length", self.max_length, 1, advice)


class KeptColumn(Column):
    """Base of columns whose values the model keeps: rows do not bring them.

    `by`: the id column whose value is the key under which they are kept.
    """

    by: str
    column: str | None = None

    @abstractmethod
    def ids_in(self, schema: Schema) -> tuple[Id, ...]:
        """Return the id features that it gives a network, in order."""

    @abstractmethod
    def dense_in(self, schema: Schema) -> tuple[Dense, ...]:
        """Return the dense columns that it gives a network, in order."""

    @abstractmethod
    def check_in(self, schema: Schema) -> None:
        """Raise ConfigError if it does not fit the other columns of a schema."""


def _read_column(column: Dense | Id) -> str | None:
    """Return the raw column to read: an expression that stands first names its columns itself."""
    transforms = column.transforms
    if column.column is None and transforms and isinstance(transforms[0], Expression):
        return transforms[0].inputs()[0]
    return column.column


@dataclass(frozen=True)
class Schema:
    """The columns of a problem and their roles.

    A schema is a value: compare it, save it (`to_json`), build a table set and models from it.

    `types`: the type of each raw column in training, as `hotbed.data.arrow_types.Type` lists them,
    such as "text", "integer" or "timestamp[us]". `shapes`: whether a row of each raw column held
    one "value" or a "list". Training fills in both. From then on, text for numbers, numbers for
    text, booleans for integer ids, and lists for single values are rejected. `raw`: of a schema
    over prepared files, the fitted schema over raw rows, which servers apply. `derived`: the raw
    columns that depend on other rows, so that a request must bring them, each with a description.
    `rules`: which rules hold for what is missing, see `hotbed.data.columns.RULES`; states and
    exports keep theirs.
    Raises ConfigError for two columns of one name, more than one Time, Weight or DisplayPosition,
    or two units of one column.

    Example:
        >>> hb.Schema([hb.Label("clicked"), hb.Time("time"), hb.Id("user"), hb.Dense("price")])
    """

    columns: Sequence[Column]
    types: Mapping[str, Type] = field(default_factory=dict, compare=False)
    shapes: Mapping[str, Shape] = field(default_factory=dict, compare=False)
    raw: Schema | None = None
    derived: Mapping[str, str] = field(default_factory=dict, compare=False)
    rules: int = field(default=RULES, compare=False)

    def __post_init__(self) -> None:
        checks.whole_number("schema.rules", self.rules, 1, RULES)
        object.__setattr__(self, "columns", tuple(self.columns))
        for column in self.columns:
            if not isinstance(column, Column):
                raise ConfigError(
                    f"schema: expected columns, got {column!r}. Use Label, Time, Weight, "
                    "DisplayPosition, Dense or Id."
                )
        names = [column.name for column in self.columns]
        repeated = {name for name in names if names.count(name) > 1}
        twice = sorted(repeated)
        if twice:
            raise ConfigError(
                f"schema: names {twice} appear twice, got {names}. Rename one and point `column` "
                "at the raw column."
            )
        for role in (Time, Weight, DisplayPosition):
            columns = [column for column in self.columns if isinstance(column, role)]
            if len(columns) > 1:
                raise ConfigError(
                    f"schema: more than one {role.__name__}, got columns {names}. Keep one."
                )
        if self.time is not None and self.rules > 1:
            in_unit = [_in_unit_of(self.time, column) for column in self.columns]
            object.__setattr__(self, "columns", tuple(in_unit))
        for column in self.kept:
            column.check_in(self)
            self._check_features_of(column)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        names = [column.name for column in self.columns]
        raise SchemaError(
            f"schema: unknown column, got {name!r}. {config.did_you_mean(name, names)}"
        )

    def _check_features_of(self, kept: KeptColumn) -> None:
        """Raise ConfigError if a feature of a kept column has the name of something else."""
        owners: dict[str, str] = {}
        for column in self.columns:
            if not isinstance(column, KeptColumn):
                if isinstance(column, (Dense, Id)):
                    owners[column.source] = f"the raw column of {column.name!r}"
                owners[column.name] = f"the column {column.name!r}"
            elif column is not kept:
                for feature in (*column.ids_in(self), *column.dense_in(self)):
                    owners[feature.name] = f"a feature of {column.name!r}"
        for feature in (*kept.ids_in(self), *kept.dense_in(self)):
            if feature.name in owners:
                raise ConfigError(
                    f"{config.kind_of(type(kept))} {kept.name!r}: it gives a feature "
                    f"{feature.name!r}, got {owners[feature.name]} of the same name. Rename one."
                )

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels, in order."""
        return tuple(column for column in self.columns if isinstance(column, Label))

    @property
    def dense(self) -> tuple[Dense, ...]:
        """The dense columns in order, with those that the model keeps."""
        columns: list[Dense] = []
        for column in self.columns:
            if isinstance(column, Dense):
                columns.append(column)
            elif isinstance(column, KeptColumn):
                columns += column.dense_in(self)
        return tuple(columns)

    @property
    def ids(self) -> tuple[Id, ...]:
        """The id features in order, with those that the model keeps."""
        columns: list[Id] = []
        for column in self.columns:
            if isinstance(column, Id):
                columns.append(column)
            elif isinstance(column, KeptColumn):
                columns += column.ids_in(self)
        return tuple(columns)

    @property
    def kept(self) -> tuple[KeptColumn, ...]:
        """The columns whose values the model keeps, in order."""
        return tuple(column for column in self.columns if isinstance(column, KeptColumn))

    @property
    def kept_features(self) -> tuple[Id | Dense, ...]:
        """The features that the columns give which the model keeps; a request may bring them."""
        features: list[Id | Dense] = []
        for column in self.kept:
            features += [*column.ids_in(self), *column.dense_in(self)]
        return tuple(features)

    @property
    def time(self) -> Time | None:
        """The time column, if there is one."""
        return next((column for column in self.columns if isinstance(column, Time)), None)

    @property
    def weight(self) -> Weight | None:
        """The weight column, if there is one."""
        return next((column for column in self.columns if isinstance(column, Weight)), None)

    @property
    def display_position(self) -> DisplayPosition | None:
        """The column of places at which items were shown, if there is one."""
        columns = (column for column in self.columns if isinstance(column, DisplayPosition))
        return next(columns, None)

    @property
    def tables(self) -> dict[str, tuple[Id, ...]]:
        """The id features of each table, by table name, in schema order."""
        features: dict[str, tuple[Id, ...]] = {}
        for column in self.ids:
            assert column.table is not None
            before = features.get(column.table, ())
            features[column.table] = (*before, column)
        return features

    @property
    def dense_width(self) -> int:
        """The sum of the widths of all dense columns."""
        width = 0
        for column in self.dense:
            width += column.width
        return width

    def raw_columns(self, labels: bool = True, features: bool = True) -> list[str]:
        """Return the raw columns that encoding reads, each once.

        Without `labels`, return those that serving needs: no label, weight, time or place. Without
        `features`, return these alone.
        """
        names: dict[str, None] = {}
        for column in self.columns:
            is_feature = isinstance(column, (Id, Dense))
            if isinstance(column, KeptColumn) or not (features if is_feature else labels):
                continue
            names[column.source] = None
            for transform in getattr(column, "transforms", ()):
                names.update(dict.fromkeys(transform.inputs()))
            if isinstance(column, Id) and column.weights:
                names[column.weights] = None
        return list(names)

    def number_types(self) -> dict[str, pa.DataType]:
        """Return float64 for each raw column that is read only as numbers.

        Text sources parse these columns as floats, regardless of their first rows.
        """
        numbers: dict[str, bool] = {}
        for column in self.columns:
            if isinstance(column, KeptColumn):
                continue
            before = numbers.get(column.source, True)
            numbers[column.source] = before and column.reads_numbers
            for transform in getattr(column, "transforms", ()):
                numbers.update(dict.fromkeys(transform.inputs(), False))
        return {name: pa.float64() for name, is_number in numbers.items() if is_number}

    def ids_of(self, feature: str, values: Any) -> np.ndarray:
        """Return the ids under which tables know values of an id feature, int64 [m].

        Args:
            feature: its name.
            values: raw values as in training: text, integers, or lists of them. Missing values and
                empty text have no id.

        Raises:
            SchemaError: the feature is not an id, or needs more raw columns than its own.

        Example: `model.tables["user"].remove(model.schema.ids_of("user", ["ann"]))`
        """
        schema = self.raw or self
        column = schema[feature]
        others: list[str] = []
        for transform in getattr(column, "transforms", ()):
            others.extend(transform.inputs())
        if not isinstance(column, Id) or set(others) - {column.source}:
            raise SchemaError(
                f"schema.ids_of: {feature!r} must be an id that is made of one raw column, got "
                f"{type(column).__name__} with {others}. Encode whole rows with a Dataset."
            )
        rows = pa.record_batch({column.source: pa.array(values)})
        encoded = missing_as_null(transformed(column.source, column.transforms, Columns(rows)))
        if pa.types.is_dictionary(encoded.type):
            encoded = encoded.dictionary_decode()
        while is_list(encoded.type):
            encoded = encoded.flatten()
        encoded = encoded.drop_null()
        return ids_of(encoded, feature)

    def fit(self, source: Source) -> Schema:
        """Return a schema with fitted transforms: means, quantiles, vocabularies.

        Args:
            source: the training range only. It must not be endless.
        """
        not_endless(source, "fitting a schema")
        return fit(self, source)

    def with_transforms(self, name: str, transforms: Sequence[Transform]) -> Schema:
        """Return this schema with other transforms on the column `name`."""
        columns: list[Column] = []
        for column in self.columns:
            if isinstance(column, (Dense, Id)) and column.name == name:
                columns.append(replace(column, transforms=tuple(transforms)))
            else:
                columns.append(column)
        return replace(self, columns=columns)

    @property
    def maps(self) -> list[FittedMap]:
        """The files of what its transforms learned, each once."""
        maps: dict[str, FittedMap] = {}
        for column in self.columns:
            for transform in getattr(column, "transforms", ()):
                if transform.fitted is not None:
                    maps.setdefault(transform.fitted.digest, transform.fitted)
        return list(maps.values())

    def with_maps(self, paths: Mapping[str, Path]) -> Schema:
        """Return this schema, and `raw`, with the files of `maps` at other paths, by digest."""
        columns: list[Column] = []
        for column in self.columns:
            if isinstance(column, (Dense, Id)):
                transforms = [_with_map(transform, paths) for transform in column.transforms]
                columns.append(replace(column, transforms=transforms))
            else:
                columns.append(column)
        raw = None if self.raw is None else self.raw.with_maps(paths)
        return replace(self, columns=columns, raw=raw)

    def with_types(self, types: Mapping[str, Type], shapes: Mapping[str, Shape]) -> Schema:
        """Return this schema with `types` and `shapes` of raw columns added to its own."""
        all_types = dict(self.types)
        for name, kind in types.items():
            all_types[name] = joined(all_types.get(name), kind)
        all_shapes = dict(self.shapes)
        for name, shape in shapes.items():
            all_shapes[name] = joined_shape(all_shapes.get(name), shape)
        return replace(self, types=all_types, shapes=all_shapes)

    def with_rules(self, rules: int) -> Schema:
        """Return this schema with other rules, such as those of an earlier state."""
        return replace(self, rules=rules)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, including learned numbers."""
        columns = [config.describe(column) for column in self.columns]
        spec: dict[str, Any] = {"columns": columns}
        if self.types:
            spec["types"] = dict(self.types)
        if self.shapes:
            spec["shapes"] = dict(self.shapes)
        if self.raw is not None:
            spec["raw"] = self.raw.to_json()
        if self.derived:
            spec["derived"] = dict(self.derived)
        if self.rules > 1:
            spec["rules"] = self.rules
        text = json.dumps(spec)
        value: dict[str, Any] = json.loads(text)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str, folder: Path | None = None) -> Schema:
        """Return the schema that `to_json` described; takes the object or its text.

        `folder`: where files of fitted maps lie whose paths are relative. Raises ConfigError with
        the path of a wrong key.
        """
        if isinstance(value, str):
            try:
                value = cast(Mapping[str, Any], config.parse_json(value))
            except ValueError as error:
                raise ConfigError(
                    f"schema: not JSON, got {error}. Pass what Schema.to_json() returned."
                ) from error
        columns = config.build(value["columns"], Sequence[Column], "schema.columns")
        types = value.get("types", {})
        types = config.build(types, Mapping[str, Type], "schema.types")
        for name, kind in types.items():
            if not is_type(kind):
                raise ConfigError(
                    f"schema.types.{name}: unknown type, got {kind!r}. Use text, bytes, boolean, "
                    "integer, uint64, float32, number, mixed or an Arrow type of times or decimals."
                )
        shapes = value.get("shapes", {})
        shapes = config.build(shapes, Mapping[str, Shape], "schema.shapes")
        raw = value.get("raw")
        if raw is not None:
            raw = cls.from_json(raw, folder)
        derived = value.get("derived", {})
        derived = config.build(derived, Mapping[str, str], "schema.derived")
        rules = config.build(value.get("rules", 1), int, "schema.rules")
        schema = cls(columns, types, shapes, raw, derived, rules)
        if folder is None:
            return schema
        return schema.with_maps({fitted.digest: folder / fitted.path for fitted in schema.maps})

    @classmethod
    def of_prepared(cls, path: str | Path, rows: Literal["prepared", "raw"] = "prepared") -> Schema:
        """Return the schema of the rows that `hotbed prepare` wrote.

        Args:
            path: the output folder of the preparation.
            rows: "raw": return the fitted schema over raw rows instead, such as those of a stream.

        Raises:
            DataError: the folder does not hold a whole preparation, or a fitted map changed.
        """
        workflow = read_workflow(path)
        folder = local_path(path, "prepared.path").resolve()
        check_maps(folder, workflow)
        raw = cls.from_json(workflow["raw"], folder)
        if rows == "raw":
            return raw
        return replace(cls.from_json(workflow["schema"]), raw=raw)


def _in_unit_of(time: Time, column: Column) -> Column:
    """Return a column whose parts of the same raw times are read in the unit of `time`.

    Raises:
        ConfigError: it gives them another unit.
    """
    if not isinstance(column, (Dense, Id)) or column.source != time.source:
        return column
    transforms: list[Transform] = []
    for transform in column.transforms:
        if transform.reads_text:  # what follows reads other values
            break
        if isinstance(transform, TimeOfDay):
            transform = transform.in_unit(time.unit, f"{column.name!r} of column {time.source!r}")
        transforms.append(transform)
    return replace(column, transforms=(*transforms, *column.transforms[len(transforms) :]))


def _with_map(transform: Transform, paths: Mapping[str, Path]) -> Transform:
    if transform.fitted is None or transform.fitted.digest not in paths:
        return transform
    digest = transform.fitted.digest
    moved = FittedMap(paths[digest], digest)
    # a transform with a map is a dataclass with the field `fitted`
    return replace(transform, fitted=moved)  # type: ignore[type-var]


def check_schema(schema: Any) -> None:
    """Raise ConfigError for anything but a Schema."""
    if not isinstance(schema, Schema):
        kind = type(schema).__name__
        raise ConfigError(f"dataset.schema: expected a Schema, got {kind}. Give hb.Schema([…]).")
