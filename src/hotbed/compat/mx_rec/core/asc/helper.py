# SPDX-License-Identifier: Apache-2.0
"""get_asc_insert_func: maps the ids of a data set to rows, ahead of their lookups: step 4."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.checks import boolean
from hotbed.compat.mx_rec.columns import SpecReader
from hotbed.compat.mx_rec.errors import CallError, StateError
from hotbed.compat.mx_rec.feature_spec import FeatureSpec
from hotbed.compat.mx_rec.no_effect import ARGUMENTS
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError

__all__ = ["FeatureSpec", "Insert", "get_asc_insert_func"]


class Insert:
    """The insert function of a data set: `dataset.map(insert)` maps its batches ahead.

    Attributes:
        specs: the features whose ids are mapped.
        is_training: whether tables may change.
        datasets: the data sets that it was applied to.
    """

    def __init__(self, specs: Sequence[FeatureSpec], *, is_training: bool) -> None:
        self.specs = tuple(specs)
        self.is_training = is_training
        self.datasets: list[Any] = []
        self.reader = SpecReader(self.specs, is_training=is_training)

    @property
    def features(self) -> list[FeatureSpec]:
        """The specs that have ids."""
        return [spec for spec in self.specs if not spec.is_timestamp]

    @property
    def timestamp(self) -> str | int | None:
        """Where the times of a batch lie; None = they are not read."""
        return next((spec.key for spec in self.specs if spec.is_timestamp), None)

    def check(self, tables: Container[str]) -> None:
        """Raise ConfigError if a table is missing, or the times that an eviction needs."""
        for spec in self.features:
            if spec.table not in tables:
                raise ConfigError(
                    f"FeatureSpec {spec.name!r}: no table has the name of its table, got "
                    f"{spec.table!r}. Call create_table(name={spec.table!r}, ...), or correct "
                    "table_name."
                )
        clock = next((spec for spec in self.specs if spec.is_timestamp), None)
        evicting = [spec for spec in self.features if spec.thresholds.evicts]
        if self.is_training and evicting and clock is None:
            raise ConfigError(
                f"FeatureSpec {evicting[0].name!r}: eviction_threshold needs the times of the "
                f"data, got {evicting[0].eviction_threshold} and no timestamp. Give "
                'get_asc_insert_func a FeatureSpec("timestamp", is_timestamp=True), too.'
            )
        for dataset in self.datasets:
            if clock is not None and isinstance(dataset, Dataset) and dataset.schema.time is None:
                raise ConfigError(
                    f"FeatureSpec {clock.name!r}: a timestamp is the Time column of the schema, "
                    f"got {dataset!r} without one. Add hb.Time to the schema."
                )

    def over(self, dataset: Iterable[Any]) -> Inserted:
        """Return the batches of a data set; `Dataset.map` calls it."""
        self.datasets.append(dataset)
        return Inserted(dataset, self)

    def __call__(self, batch: Any) -> Any:
        """Return one batch, mapped now."""
        return framework.current().started("insert").insert(batch, self.reader)


class Inserted:
    """The batches of a data set as tensors, whose ids are mapped ahead once step 8 has run."""

    def __init__(self, dataset: Iterable[Any], insert: Insert) -> None:
        self.dataset = dataset
        self.insert = insert

    def __iter__(self) -> Iterator[Any]:
        pipeline = framework.current().started("dataset.map(insert)")
        return pipeline.batches(self.dataset, self.insert.reader)


def get_asc_insert_func(
    tgt_key_specs: Sequence[FeatureSpec] | FeatureSpec | None = None,
    args_index_list: Sequence[int] | None = None,
    table_names: Sequence[str] | None = None,
    is_training: bool | str = True,
    dump_graph: bool | str = False,
) -> Insert:
    """Return the function for `dataset.map` that maps ids to rows: step 4.

    Give `tgt_key_specs`, or `args_index_list` with `table_names`. For data without `map`, such as
    a DataLoader, call `insert.over(loader)`. Batches are `hb.Batch` of a Dataset, or dicts and
    tuples of arrays or tensors; the loop gets them as tensors, with their labels.

    Args:
        tgt_key_specs: the features, with at most one timestamp.
        args_index_list: where the ids lie in a batch that is a tuple.
        table_names: the table of each of them.
        is_training: whether tables may change; False for evaluation.
        dump_graph: not needed.

    Raises:
        CallError: not exactly one source of keys is given.
        ConfigError: a value is wrong, or no feature has ids.
        StateError: several features are timestamps, in training.
    """
    owner = framework.current()
    training = boolean("get_asc_insert_func: is_training", is_training)
    dumps = boolean("get_asc_insert_func: dump_graph", dump_graph)
    ARGUMENTS.log_no_effect("insert.dump_graph", when=dumps)
    if tgt_key_specs is None:
        specs = _specs_at(args_index_list, table_names)
    elif args_index_list is None and table_names is None:
        features: Any = tgt_key_specs
        specs = list(features) if isinstance(features, (list, tuple)) else [features]
    else:
        specs = []
    if not specs:
        raise CallError(
            "get_asc_insert_func: one source of keys is needed, got "
            f"tgt_key_specs={tgt_key_specs!r}, args_index_list={args_index_list!r} and "
            f"table_names={table_names!r}. Give features alone, or as many indexes as names."
        )
    _check_specs(specs)
    clocks = [spec.name for spec in specs if spec.is_timestamp]
    if training and len(clocks) > 1:
        raise StateError(
            "get_asc_insert_func: a batch has one timestamp in training, got the features "
            f"{' and '.join(map(repr, clocks))}. Keep one."
        )
    insert = Insert(specs, is_training=training)
    if owner.pipeline is not None:
        insert.check(owner.tables)
    owner.inserts.append(insert)
    return insert


def _check_specs(specs: Sequence[Any]) -> None:
    """Raise ConfigError unless all are features, and one has ids."""
    for spec in specs:
        if not isinstance(spec, FeatureSpec):
            raise ConfigError(
                f"get_asc_insert_func: tgt_key_specs holds FeatureSpecs, got {spec!r}. Give "
                "FeatureSpec(name, ...)."
            )
    if all(spec.is_timestamp for spec in specs):
        raise ConfigError(
            "get_asc_insert_func: a feature with ids is needed, got timestamps only. Give the "
            "features of the tables, too."
        )


def _specs_at(
    args_index_list: Sequence[int] | None, table_names: Sequence[str] | None
) -> list[FeatureSpec]:
    """Return features of tables at indexes of a batch; none if the two do not fit."""
    if isinstance(table_names, str):
        raise ConfigError(
            f"get_asc_insert_func.table_names: a list of names is needed, got {table_names!r}. "
            f"Give [{table_names!r}]."
        )
    indexes = args_index_list or ()
    names = table_names or ()
    if len(indexes) != len(names):
        return []
    return [
        FeatureSpec(name, table_name=name, index_key=index)
        for index, name in zip(indexes, names, strict=True)
    ]
