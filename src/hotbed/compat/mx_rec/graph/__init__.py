# SPDX-License-Identifier: Apache-2.0
"""Automatic graph modification.

automatic: the lookups of a model, from step 8 on.
hooks: hooks that have no effect here.
modifier: step 8 where ids are computed inside the model.
"""

from hotbed.compat.mx_rec.graph.modifier import GraphModifierHook, modify_graph_and_start_emb_cache

__all__ = ["GraphModifierHook", "modify_graph_and_start_emb_cache"]
