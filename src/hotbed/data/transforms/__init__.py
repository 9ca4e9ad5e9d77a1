# SPDX-License-Identifier: Apache-2.0
"""Transforms of one column, the same code in training and in serving.

All work on whole Arrow arrays; nulls stay nulls.

    base.py        the base of transforms
    expression.py  expressions over the raw columns of a row
    ids.py         transforms that give ids: hashes, combinations, places in a vocabulary
    keyed.py       transforms of keys into numbers that training rows of the same key gave
    numbers.py     transforms of numbers
    text.py        transforms of text
    times.py       transforms of times: parts such as the hour of the day
"""

from hotbed.data.context import Context
from hotbed.data.learners import Learner, Moments, Quantiles, ValueCounts
from hotbed.data.transforms.base import Transform
from hotbed.data.transforms.expression import Expression
from hotbed.data.transforms.ids import Cross, Hash, Map, Shift
from hotbed.data.transforms.keyed import JoinGroupby, TargetEncode
from hotbed.data.transforms.numbers import Bucketize, Clip, FillMissing, Log, Normalize
from hotbed.data.transforms.text import Extract, Split
from hotbed.data.transforms.times import TimeOfDay

__all__ = [
    "Bucketize",
    "Clip",
    "Context",
    "Cross",
    "Expression",
    "Extract",
    "FillMissing",
    "Hash",
    "JoinGroupby",
    "Learner",
    "Log",
    "Map",
    "Moments",
    "Normalize",
    "Quantiles",
    "Shift",
    "Split",
    "TargetEncode",
    "TimeOfDay",
    "Transform",
    "ValueCounts",
]


def __dir__() -> list[str]:
    return sorted(__all__)
