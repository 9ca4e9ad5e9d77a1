# SPDX-License-Identifier: Apache-2.0
"""get_asc_insert_func: maps the ids of a data set to rows, ahead of their lookups: step 4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.columns import SpecReader
from hotbed.compat.mx_rec.core.asc.feature_spec import FeatureSpec
from hotbed.compat.mx_rec.errors import CallError, StateError

__all__ = ["Insert", "get_asc_insert_func"]


class Insert:
    """The insert function of a data set: `dataset.map(insert)` maps its batches ahead.

    Attributes:
        specs: the features whose ids are mapped.
        is_training: whether tables may change.
    """

    def __init__(self, specs: Sequence[FeatureSpec], *, is_training: bool) -> None:
        self.specs = tuple(specs)
        self.is_training = is_training
        self.reader = SpecReader(self.specs, is_training=is_training)

    def over(self, dataset: Iterable[Any]) -> Inserted:
        """Return the batches of a data set; `Dataset.map` calls it."""
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
    is_training: bool = True,
    dump_graph: bool = False,
) -> Insert:
    """Return the function for `dataset.map` that maps ids to rows: step 4.

    Args:
        tgt_key_specs: the features, or
        args_index_list: where the ids lie in a batch that is a tuple, with
        table_names: the table of each.
        is_training: whether tables may change; False for evaluation.
        dump_graph: not needed.

    Raises:
        CallError: there is no source of keys, or more than one.
        StateError: several features are timestamps, in training.
    """
    owner = framework.current()
    if tgt_key_specs is None:
        specs = _specs_at(args_index_list, table_names)
    elif args_index_list is None and table_names is None:
        specs = [tgt_key_specs] if isinstance(tgt_key_specs, FeatureSpec) else list(tgt_key_specs)
    else:
        specs = []
    if not specs:
        raise CallError(
            "get_asc_insert_func: one source of keys is needed, got "
            f"tgt_key_specs={tgt_key_specs!r}, args_index_list={args_index_list!r} and "
            f"table_names={table_names!r}. Give features alone, or as many indexes as names."
        )
    clocks = [spec.name for spec in specs if spec.is_timestamp]
    if is_training and len(clocks) > 1:
        raise StateError(
            "get_asc_insert_func: a batch has one timestamp in training, got the features "
            f"{' and '.join(map(repr, clocks))}. Keep one."
        )
    insert = Insert(specs, is_training=is_training)
    owner.inserts.append(insert)
    return insert


def _specs_at(
    args_index_list: Sequence[int] | None,
    table_names: Sequence[str] | None,
) -> list[FeatureSpec]:
    """Return features of tables at indexes of a batch; none if the two do not fit."""
    indexes = args_index_list or ()
    names = table_names or ()
    if len(indexes) != len(names):
        return []
    return [
        FeatureSpec(name, table_name=name, index_key=index)
        for index, name in zip(indexes, names, strict=True)
    ]
