# SPDX-License-Identifier: Apache-2.0
"""start_asc_pipeline: step 8 of the FeatureSpec mode."""

from __future__ import annotations

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.pipeline import Pipeline
from hotbed.compat.mx_rec.tables import agreed, make_tables, owners_of

__all__ = ["start_asc_pipeline"]


def start_asc_pipeline() -> None:
    """Make the tables, and let insert functions map ids: step 8.

    Raises:
        CallError: there are no tables.
        ConfigError: what was described does not fit together.
    """
    owner = framework.current()
    owner.check_not_started("start_asc_pipeline")
    specs = [spec for insert in owner.inserts for spec in insert.specs if not spec.is_timestamp]
    thresholds = agreed((s.table, f"FeatureSpec {s.name!r}", s.thresholds) for s in specs)
    tables = make_tables(owner, thresholds, owner.tables)
    owner.pipeline = Pipeline(owner, tables, owners_of(owner))
