# SPDX-License-Identifier: Apache-2.0
"""get_asc_insert_func: maps the ids of a data set to rows, ahead of their lookups: step 4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.columns import SpecReader
from hotbed.compat.mx_rec.core.asc.feature_spec import FeatureSpec

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
    """
    owner = framework.current()
    specs = [tgt_key_specs] if isinstance(tgt_key_specs, FeatureSpec) else tgt_key_specs
    insert = Insert(specs or [], is_training=is_training)
    owner.inserts.append(insert)
    return insert
