# SPDX-License-Identifier: Apache-2.0
"""Raw columns -> Batch: the same code in training and in serving.

arrays.py          Arrow arrays as NumPy arrays, and the lengths and offsets of lists
arrow_types.py     which Arrow types a raw column may have, and what they are to Hotbed
bad_rows.py        rows that are not as they should be
batch.py           Batch, which a Dataset yields and a network takes, and Ids, the only jagged type
schema_changes.py  what a declared schema says otherwise than the fitted one of a model
columns.py         Raw Arrow columns: their ids, hashes, and transforms of them
context.py         what transforms and learners may use of the encoder
dataset.py         Dataset: batches of a source, optionally shuffled, prefetched
encode.py          Encoder: raw Arrow columns -> Batch, by the same code in training and in serving
fit.py             fitting: transforms learn from the training range, in passes over its rows
fitted.py          fitted maps: files of what transforms learned for each key
grains.py          grains: the runs of samples of each batch, and which rows belong to which grain
histories/         histories and counts that a model keeps: what is declared, the rule of time
learners.py        learners: what transforms learn from a column, part by part
numbers.py         columns of numbers as NumPy arrays: dense values, labels, weights and times
order.py           the order of an epoch: encoded chunks in their order, or buffers of them permuted
places.py          positions of a dataset, and whether reading may resume from them
previews.py        what a join says of the samples of a batch, and the impressions with it
schema.py          Schema: the columns of a problem and their roles
source_rows.py     SourceRows: the rows of one reading of a source, and its status
stream.py          how the rows of an endless source become batches
transforms/        transforms of one column, the same code in training and in serving
"""

from hotbed.data.batch import Batch, Ids
from hotbed.data.dataset import Dataset
from hotbed.data.encode import Encoder
from hotbed.data.histories import Count, History
from hotbed.data.schema import Column, Dense, DisplayPosition, Id, Label, Schema, Time, Weight
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
    "Count",
    "Cross",
    "Dataset",
    "Dense",
    "DisplayPosition",
    "Encoder",
    "Expression",
    "Extract",
    "FillMissing",
    "Hash",
    "History",
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
