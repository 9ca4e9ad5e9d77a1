# SPDX-License-Identifier: Apache-2.0
"""From clauses to values of the engine: schema, tables, the network and its losses."""

from hotbed.compat.hugectr.reader import named_columns
from hotbed.compat.hugectr.translate.graph import translate
from hotbed.compat.hugectr.translate.translation import DenseWeight, EmbeddingOf, Translation

__all__ = ["DenseWeight", "EmbeddingOf", "Translation", "named_columns", "translate"]
