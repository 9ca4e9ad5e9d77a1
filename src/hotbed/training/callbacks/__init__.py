# SPDX-License-Identifier: Apache-2.0
"""The callbacks of `hb.callbacks`: those that act on training, and those that only watch it.

    model.fit(train, valid, epochs=20, callbacks=[
        Validate(every_steps=500), ReducePlateau("auc", patience=1), EarlyStopping("auc",
        patience=3), BestWeights("auc"), ClipGradients(10.0), Evict(step_interval=1000)])

They run in the order given; validation runs first. Metrics of validation are named `valid.auc`. A
callback that watches `auc` looks for `valid.auc` first, then for `auc` (progressive training).

    best_weights.py    BestWeights: save the best state, and restore it when training ends
    clip_gradients.py  ClipGradients: gradients scaled down to a norm before the update
    early_stopping.py  EarlyStopping: end training when a metric makes no progress
    learning_rate.py   LearningRate: learning rates by a schedule
    reduce_plateau.py  ReducePlateau: lower learning rates when a metric makes no progress
    validation.py      Validate, and the base of callbacks that judge its results
"""

from hotbed.training.callbacks.best_weights import BestWeights
from hotbed.training.callbacks.clip_gradients import ClipGradients
from hotbed.training.callbacks.early_stopping import EarlyStopping
from hotbed.training.callbacks.learning_rate import LearningRate
from hotbed.training.callbacks.reduce_plateau import ReducePlateau
from hotbed.training.callbacks.validation import Validate
from hotbed.training.decisions.checkpoint import Checkpoint
from hotbed.training.decisions.eviction_schedule import Evict
from hotbed.training.watching.baselines import Baselines
from hotbed.training.watching.history import History
from hotbed.training.watching.progress import ProgressBar
from hotbed.training.watching.prometheus import Prometheus
from hotbed.training.watching.segments import BySegment
from hotbed.training.watching.status_file import StatusFile
from hotbed.training.watching.tensorboard import TensorBoard
from hotbed.training.watching.windows import Windows

__all__ = [
    "Baselines",
    "BestWeights",
    "Checkpoint",
    "ClipGradients",
    "EarlyStopping",
    "Evict",
    "History",
    "LearningRate",
    "ProgressBar",
    "Prometheus",
    "ReducePlateau",
    "BySegment",
    "StatusFile",
    "TensorBoard",
    "Validate",
    "Windows",
]


def __dir__() -> list[str]:
    return sorted(__all__)
