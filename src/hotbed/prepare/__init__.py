# SPDX-License-Identifier: Apache-2.0
"""Raw files -> training files and a fitted workflow: out of core, on one machine or a cluster.

`hotbed prepare` is this package on the command line. docs/prepare.md is the guide, and
docs/design/0010-preparation.md gives the reasons.
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
