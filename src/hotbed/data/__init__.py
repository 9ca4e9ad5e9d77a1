# SPDX-License-Identifier: Apache-2.0
"""Raw columns -> Batch: the same code in training and in serving."""

from hotbed.data.batch import Batch, Ids
from hotbed.data.dataset import Dataset
from hotbed.data.encode import Encoder
from hotbed.data.schema import Column, Dense, Id, Label, Schema, Time, Weight
from hotbed.data.transforms import (
    Bucketize,
    Clip,
    Cross,
    Expression,
    Extract,
    FillMissing,
    Hash,
    JoinGroupby,
    Log,
    Map,
    Normalize,
    Shift,
    Split,
    TargetEncode,
    TimeOfDay,
    Transform,
)

__all__ = [
    "Batch",
    "Bucketize",
    "Clip",
    "Column",
    "Cross",
    "Dataset",
    "Dense",
    "Encoder",
    "Expression",
    "Extract",
    "FillMissing",
    "Hash",
    "Id",
    "Ids",
    "JoinGroupby",
    "Label",
    "Log",
    "Map",
    "Normalize",
    "Schema",
    "Shift",
    "Split",
    "TargetEncode",
    "Time",
    "TimeOfDay",
    "Transform",
    "Weight",
]
