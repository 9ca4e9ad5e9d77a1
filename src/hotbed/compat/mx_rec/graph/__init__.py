# SPDX-License-Identifier: Apache-2.0
"""Automatic graph modification.

modifier.py   step 8 where ids are computed inside the model
hooks.py      hooks that have no effect here
merge_lookup.py  do_merge_lookup, which has nothing to do here
"""

from hotbed.compat.mx_rec.graph.modifier import GraphModifierHook, modify_graph_and_start_emb_cache

__all__ = ["GraphModifierHook", "modify_graph_and_start_emb_cache"]
