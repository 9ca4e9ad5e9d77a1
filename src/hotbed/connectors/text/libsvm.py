# SPDX-License-Identifier: Apache-2.0
"""Files of `label index:value index:value ...`, one sample per line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.files import Endings
from hotbed.connectors.paths import Paths
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.text.lines import LineSource


@dataclass(frozen=True)
class Libsvm(LineSource):
    """Lines of `label index:value index:value ...`.

    The columns are `label` float64, `indices` list<int64> and `values` list<float32>. Text after
    `#` is ignored, and so are lines of comment only. A schema names the features with
    `Id("features", column="indices", weights="values")`.

    Args:
        path: a file, a glob or a list of both.
        binary: labels are classes: 0/1, or -1/1, of which -1 is read as 0; any other label is an
            error. If False, labels are numbers.

    Raises:
        DecodeError: a line is bad (file, line).

    Format: https://www.csie.ntu.edu.tw/~cjlin/libsvm/
    """

    endings: ClassVar[Endings] = {".svm": {}, ".libsvm": {}}
    comment: ClassVar[bytes] = b"#"
    path: Paths
    binary: bool = True

    def infer(self) -> pa.Schema:
        return pa.schema(
            [
                ("label", pa.float64()),
                ("indices", pa.list_(pa.int64())),
                ("values", pa.list_(pa.float32())),
            ]
        )

    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        labels, indices, values = _parse_libsvm(lines)
        arrays = {"label": pa.array(self._labels(labels)), "indices": indices, "values": values}
        names = plan.wanted(arrays)
        return pa.RecordBatch.from_arrays([arrays[name] for name in names], names=names)

    def _labels(self, labels: np.ndarray) -> np.ndarray:
        if not self.binary:
            return labels
        wrong = ~np.isin(labels, (-1.0, 0.0, 1.0))
        if wrong.any():
            raise ValueError(
                f"label {labels[wrong][0]:g} is not -1, 0 or 1 (numbers need binary=False)"
            )
        return np.asarray(np.maximum(labels, 0.0))


def _parse_libsvm(lines: list[bytes]) -> tuple[np.ndarray, pa.Array, pa.Array]:
    """Return labels, indices and values of all lines."""
    if any(b"#" in line for line in lines):
        lines = [line.partition(b"#")[0] for line in lines]
    text = pa.array(lines, pa.binary()).cast(pa.string())
    fields = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(text))
    counts = pc.list_value_length(fields).to_numpy(zero_copy_only=False)
    flat = fields.flatten()
    is_pair = np.ones(len(flat), dtype=bool)
    starts = np.cumsum(counts) - counts
    is_pair[starts] = False
    labels = flat.filter(pa.array(~is_pair))
    labels = labels.cast(pa.float64())
    pairs = flat.filter(pa.array(is_pair))
    has_one_colon = pc.equal(pc.count_substring(pairs, ":"), 1)
    if not pc.all(has_one_colon, min_count=0).as_py():
        raise ValueError("not 'label index:value index:value ...'")
    parts = pc.split_pattern(pairs, ":").flatten()
    even = np.arange(0, len(parts), 2)
    indices = parts.take(pa.array(even))
    values = parts.take(pa.array(even + 1))
    ends = np.cumsum(counts - 1)
    bounds = np.concatenate([[0], ends])
    offsets = pa.array(bounds.astype(np.int32))
    return (
        labels.to_numpy(zero_copy_only=False),
        pa.ListArray.from_arrays(offsets, indices.cast(pa.int64())),
        pa.ListArray.from_arrays(offsets, values.cast(pa.float32())),
    )
