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
    Extract,
    FillMissing,
    Hash,
    Log,
    Map,
    Normalize,
    Split,
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
    "Extract",
    "FillMissing",
    "Hash",
    "Id",
    "Ids",
    "Label",
    "Log",
    "Map",
    "Normalize",
    "Schema",
    "Split",
    "Time",
    "TimeOfDay",
    "Transform",
    "Weight",
]
