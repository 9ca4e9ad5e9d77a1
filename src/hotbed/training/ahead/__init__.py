# SPDX-License-Identifier: Apache-2.0
"""The ids of coming batches are mapped to rows while earlier batches train.

data.py         Ahead: the ids of coming batches are mapped to rows while earlier batches train
fetcher.py      Fetcher: tables on a disk begin to read the rows of batches that come later
insert.py       Insert: maps a batch right before its step, or the batches of a Dataset ahead
mapper.py       Mapper: maps the ids of a network's batches before its forward pass, or ahead
one_pass.py     which models are scored by the forward pass that learns
planner.py      Planner: maps the ids of batches for the collections of a network
rank_mapper.py  RankMapper: asks for the ids of coming batches whose rows lie on several ranks
stage.py        the map stage: decides how far ids are mapped, and lets a thread map them
"""

from hotbed.training.decisions.cores import Cores

from .data import Ahead, depth_for, unwrap
from .fetcher import Fetcher
from .insert import Insert
from .mapper import Mapper, mapper_of
from .one_pass import obstacle_to_one_pass
from .stage import Barrier, MapStage

__all__ = [
    "Ahead",
    "Barrier",
    "Cores",
    "Fetcher",
    "Insert",
    "MapStage",
    "Mapper",
    "depth_for",
    "mapper_of",
    "obstacle_to_one_pass",
    "unwrap",
]
