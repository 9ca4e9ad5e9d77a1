# SPDX-License-Identifier: Apache-2.0
"""The run time of HugeCTR's high-level API: compile, fit, the verbs of a loop of your own."""

from hotbed.compat.hugectr.model.batches import DataReader
from hotbed.compat.hugectr.model.callback import TrainingCallback
from hotbed.compat.hugectr.model.model import Model
from hotbed.compat.hugectr.model.schedule import LearningRateScheduler

__all__ = ["DataReader", "LearningRateScheduler", "Model", "ModelPerfExt", "TrainingCallback"]

ModelPerfExt = Model  # of v3.3 to v3.7, for MLPerf
