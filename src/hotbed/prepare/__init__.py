# SPDX-License-Identifier: Apache-2.0
"""Raw files -> training files and a fitted workflow: out of core, on one machine or a cluster.

`hotbed prepare` is this package on the command line. docs/prepare.md is the guide, and
docs/design/0010-preparation.md gives the reasons.

    engine.py       engines: they run the tasks of a preparation; `Ray` is in `hotbed.prepare.ray`
    fit.py          fitting out of core
    inputs.py       the input files of a preparation, which must stay as they are while it runs
    partitions.py   partitions: the fixed pieces of a source that tasks read
    places.py       places of rows, and the hashes of places that folds and samples are drawn by
    preparation.py  Preparation: what `hotbed prepare` does, as one value
    ray.py          Ray: the tasks of a preparation on a cluster, through Ray Data
    run.py          the stages of a preparation, one after another, and the folder that they write
    shuffle.py      shuffle: all rows of a key to one task, through files; and `Side`, the way back
    stages.py       the stages that decide which rows there are
    view.py         View: the rows of a partition as every later stage sees them, chunk by chunk
    workflow.py     Workflow: what a preparation fitted, and how it is made and applied
    keyed/          operations on all rows of a key, after a shuffle by key
    output/         the output folder of a preparation
    report/         the report of a preparation
    sampling/       which rows are written
"""

from hotbed.prepare.engine import Engine, Local
from hotbed.prepare.keyed.derive import Derivation, Previous, Session, TimeDifference
from hotbed.prepare.preparation import Preparation
from hotbed.prepare.ray import Ray
from hotbed.prepare.sampling.down_sample import DownSample
from hotbed.prepare.sampling.negatives import Negatives
from hotbed.prepare.sampling.split import ByFold, ByGroup, ByTime, Holdout
from hotbed.prepare.stages import Stage
from hotbed.prepare.workflow import Workflow, prepare

__all__ = [
    "ByFold",
    "ByGroup",
    "ByTime",
    "Derivation",
    "DownSample",
    "Engine",
    "Holdout",
    "Local",
    "Negatives",
    "Preparation",
    "Previous",
    "Ray",
    "Session",
    "Stage",
    "TimeDifference",
    "Workflow",
    "prepare",
]
