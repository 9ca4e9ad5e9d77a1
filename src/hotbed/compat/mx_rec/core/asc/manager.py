# SPDX-License-Identifier: Apache-2.0
"""start_asc_pipeline: step 8 of the FeatureSpec mode."""

from __future__ import annotations

import logging

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.feature_spec import FeatureSpec
from hotbed.compat.mx_rec.tables import agreed, make_pipeline, make_tables, owners_of
from hotbed.parallel import at

__all__ = ["start_asc_pipeline"]

log = logging.getLogger("hotbed.compat.mx_rec")


@at("start_asc_pipeline")
def start_asc_pipeline() -> None:
    """Make the tables, and let insert functions map ids: step 8.

    Raises:
        CallError: tables, an optimizer or an insert function are missing.
        ConfigError: what was described does not fit together.
        StateError: it is called twice.
    """
    owner = framework.current()
    owner.check_not_started("start_asc_pipeline")
    owners = owners_of(owner)
    if not owner.inserts:
        raise CallError(
            "start_asc_pipeline: an insert function is needed, got none. Call get_asc_insert_func, "
            "or modify_graph_and_start_emb_cache if the model computes its ids."
        )
    features: list[FeatureSpec] = []
    for insert in owner.inserts:
        insert.check(owner.tables)
        features += insert.features
    thresholds = agreed((s.table, f"FeatureSpec {s.name!r}", s.thresholds) for s in features)
    idle = [name for name in owner.tables if name not in thresholds]
    if idle:
        log.warning("start_asc_pipeline: no feature looks up in the tables %s", ", ".join(idle))
    tables = make_tables(owner.tables, owners, thresholds, owner.shard.size)
    owner.pipeline = make_pipeline(owner, owners, tables)
