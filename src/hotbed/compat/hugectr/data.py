# SPDX-License-Identifier: Apache-2.0
"""`hugectr.data`: file systems."""

from hotbed.compat.hugectr.clauses import DataSourceParams

__all__ = ["DataSourceParams"]
