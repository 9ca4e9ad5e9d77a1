# SPDX-License-Identifier: Apache-2.0
"""MindSpore Recommender's names: `from hotbed.compat.mindspore_rec import RecModel`.

Calls become values of the engine, which does the work. docs/migrate/mindspore.md shows both side by
side.

rec_model.py      RecModel: train, fit, eval, predict
map_parameter.py  MapParameter: a table from integer keys to values
embedding.py      HashEmbeddingLookup
evaluation.py     eval_indexes
boost.py          boost_level and boost_config_dict
callback.py       callbacks: their events, and how the engine calls them
checkpoint.py     ModelCheckpoint and CheckpointConfig
rates.py          the learning rate of rows
metrics.py        metrics: their names, and the base of a program's own
tensor.py         Tensor: a torch tensor with `asnumpy`
no_effect.py      arguments without effect, with their reasons
"""

from hotbed.compat.mindspore_rec.callback import Callback, LossMonitor, RunContext, TimeMonitor
from hotbed.compat.mindspore_rec.checkpoint import CheckpointConfig, ModelCheckpoint
from hotbed.compat.mindspore_rec.embedding import HashEmbeddingLookup
from hotbed.compat.mindspore_rec.map_parameter import MapParameter
from hotbed.compat.mindspore_rec.metrics import Metric, TopKCategoricalAccuracy, rearrange_inputs
from hotbed.compat.mindspore_rec.rec_model import RecModel

__all__ = [
    "Callback",
    "CheckpointConfig",
    "HashEmbeddingLookup",
    "LossMonitor",
    "MapParameter",
    "Metric",
    "ModelCheckpoint",
    "RecModel",
    "RunContext",
    "TimeMonitor",
    "TopKCategoricalAccuracy",
    "rearrange_inputs",
]
