# SPDX-License-Identifier: Apache-2.0
"""The run time of HugeCTR's high-level API: compile, fit, the verbs of a loop of your own.

model.py        Model: the high-level API
fitting.py      what `fit` does between two iterations
arguments.py    arguments of methods, by their names in all releases
batches.py      DataReader: the batches of a dataset one by one
schedule.py     LearningRateScheduler
callback.py     TrainingCallback
metrics.py      metrics of a solver as metrics of the engine
files.py        ModelFiles: which file contains which parts of a model
increments.py   rows that have changed
ranks.py        a model on several processes
predictions.py  predictions and labels as text
tensors.py      Tensors: values and gradients by names of the graph
summary.py      the printed summary
console.py      printed lines and headings
"""

from hotbed.compat.hugectr.model.batches import DataReader
from hotbed.compat.hugectr.model.callback import TrainingCallback
from hotbed.compat.hugectr.model.model import Model
from hotbed.compat.hugectr.model.schedule import LearningRateScheduler

__all__ = ["DataReader", "LearningRateScheduler", "Model", "ModelPerfExt", "TrainingCallback"]

ModelPerfExt = Model  # of v3.3 to v3.7, for MLPerf
