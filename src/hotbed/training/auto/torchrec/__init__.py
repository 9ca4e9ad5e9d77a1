# SPDX-License-Identifier: Apache-2.0
"""What hb.auto knows of TorchRec, whose classes are known by their modules: it is not imported.

configs.py            the tables that TorchRec's collections of a model declare
fused.py              fused collections become plain ones
jagged.py             TorchRec's jagged tensors among the arguments of a model
managed_collision.py  managed collisions, whose raw ids pass
pipeline.py           training pipelines, whose traces end at lookups
plans.py              what plans and constraints mean for tables
"""
