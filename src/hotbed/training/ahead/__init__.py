# SPDX-License-Identifier: Apache-2.0
"""The ids of coming batches are mapped to rows while earlier batches train."""

from hotbed.training.decisions.cores import Cores

from .data import Ahead, depth_for, unwrap
from .insert import Insert
from .mapper import Mapper, mapper_of
from .one_pass import obstacle_to_one_pass
from .stage import Barrier, MapStage

__all__ = [
    "Ahead",
    "Barrier",
    "Cores",
    "Insert",
    "MapStage",
    "Mapper",
    "depth_for",
    "mapper_of",
    "obstacle_to_one_pass",
    "unwrap",
]
