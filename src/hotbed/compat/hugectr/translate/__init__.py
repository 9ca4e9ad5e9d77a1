# SPDX-License-Identifier: Apache-2.0
"""From clauses to values of the engine: schema, tables, the network and its losses.

translation.py  Translation: what a graph is in the engine
graph.py        translate: the whole graph
inputs.py       the input and its embeddings
network.py      the description of the network while it grows
layers.py       dense layers
losses.py       loss layers
rules.py        optimizers as rules
tiers.py        the tables of an embedding training cache whose rows lie on a disk
"""

from hotbed.compat.hugectr.reader import named_columns
from hotbed.compat.hugectr.translate.graph import translate
from hotbed.compat.hugectr.translate.translation import DenseWeight, EmbeddingOf, Translation

__all__ = ["DenseWeight", "EmbeddingOf", "Translation", "named_columns", "translate"]
