# SPDX-License-Identifier: Apache-2.0
"""What servers get of a model.

frozen.py    the rows, weights and schema of a state, frozen, with the graph after the lookups
versions.py  Publishing: the saved states of a run are handed to a publisher
"""

from .frozen import freeze, graph_of, has_graph
from .versions import Publishing

__all__ = ["Publishing", "freeze", "graph_of", "has_graph"]
