# SPDX-License-Identifier: Apache-2.0
"""Batch, which a Dataset yields and a network takes, and Ids, the only jagged type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.position import Position
from hotbed.data.arrays import as_numpy, offsets_of
from hotbed.errors import RowShapeError


@dataclass(frozen=True, eq=False)
class Ids:
    """The ids of one feature for n samples.

    `values`: int64 [m]; every 64-bit value is an ordinary id. `offsets`: int64 [n + 1]; sample i
    owns `values[offsets[i]:offsets[i + 1]]`; None means exactly one id per sample (m = n).
    `weights`: float32 [m] or None (all 1). The arrays are NumPy arrays, or tensors after
    `Batch.map_arrays`.

    Example: `Ids(np.array([7, 8, 9]), np.array([0, 2, 3]))` holds [7, 8] and [9]; its `len` is 2.
    """

    values: Any
    offsets: Any = None
    weights: Any = None

    def __len__(self) -> int:
        if self.offsets is None:
            return len(self.values)
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> Ids:
        if self.offsets is None:
            return self._part(slice(rows.start, rows.stop), None)
        start, stop, _ = rows.indices(len(self))
        stop = max(start, stop)
        first = int(self.offsets[start])
        last = int(self.offsets[stop])
        offsets = self.offsets[start : stop + 1] - first
        return self._part(slice(first, last), offsets)

    def _part(self, index: Any, offsets: Any) -> Ids:
        """Return the ids and weights at `index`, a slice or an array, with new offsets."""
        weights = self.weights
        if weights is not None:
            weights = weights[index]
        return Ids(self.values[index], offsets, weights)

    def lengths(self) -> Any:
        """Return the number of ids of each sample, [n]."""
        if self.offsets is None:
            return np.ones(len(self), np.int64)
        return self.offsets[1:] - self.offsets[:-1]

    def with_offsets(self) -> Ids:
        """Return the same ids with explicit offsets (NumPy only)."""
        if self.offsets is not None:
            return self
        offsets = np.arange(len(self) + 1, dtype=np.int64)
        return Ids(self.values, offsets, self.weights)

    def take(self, rows: np.ndarray) -> Ids:
        """Return the samples of the numbers `rows`, in that order (NumPy only)."""
        if self.offsets is None:
            return self._part(rows, None)
        starts = self.offsets[:-1][rows]
        lengths = self.lengths()[rows]
        offsets = offsets_of(lengths)
        shifts = np.repeat(starts - offsets[:-1], lengths)
        index = shifts + np.arange(offsets[-1])
        return self._part(index, offsets)

    def unstack(self, num_features: int) -> list[Ids]:
        """Return the ids of features that lie sample by sample (NumPy only).

        Sample i of feature k is entry `i * num_features + k` of these ids.

        Raises:
            RowShapeError: the number of entries is not a multiple of `num_features`, or the offsets
                do not rise from 0 to the number of ids.
        """
        if self.offsets is not None:
            _check_offsets(np.asarray(self.offsets), len(self.values))
        num_samples, rest = divmod(len(self), num_features)
        if rest:
            raise RowShapeError(
                f"ids: expected entries for {num_features} features, got {len(self)} entries, "
                f"{rest} more than {num_samples} samples have. Give each sample all features."
            )
        entries = np.arange(len(self)).reshape(num_samples, num_features)
        return [self.take(entries[:, feature]) for feature in range(num_features)]

    def newest(self, max_length: int) -> Ids:
        """Return the last `max_length` ids of each sample (NumPy only)."""
        lengths = self.lengths()
        if len(lengths) == 0 or lengths.max() <= max_length:
            return self
        ends = np.repeat(self.offsets[1:], lengths)
        from_end = ends - np.arange(len(self.values))
        keep = from_end <= max_length
        weights = None if self.weights is None else self.weights[keep]
        return Ids(self.values[keep], offsets_of(np.minimum(lengths, max_length)), weights)

    def map_arrays(self, fn: Callable[[Any], Any]) -> Ids:
        """Return Ids with `fn` applied to each array."""
        values = fn(self.values)
        offsets = self.offsets
        if offsets is not None:
            offsets = fn(offsets)
        weights = self.weights
        if weights is not None:
            weights = fn(weights)
        return Ids(values, offsets, weights)

    @staticmethod
    def concat(parts: Sequence[Ids]) -> Ids:
        """Return all samples of `parts`, in order (NumPy only)."""
        if len(parts) == 1:
            return parts[0]
        weights = _joined([part.weights for part in parts])
        values = np.concatenate([part.values for part in parts])
        if all(part.offsets is None for part in parts):
            return Ids(values, None, weights)
        lengths = np.concatenate([part.lengths() for part in parts])
        return Ids(values, offsets_of(lengths), weights)


def _check_offsets(offsets: NDArray[Any], num_ids: int) -> None:
    """Raise RowShapeError unless `offsets` rise from 0 to the number of ids."""
    is_rising = offsets.ndim == 1 and len(offsets) and bool((offsets[1:] >= offsets[:-1]).all())
    if not is_rising or offsets[0] != 0 or offsets[-1] != num_ids:
        raise RowShapeError(
            f"ids: expected offsets that rise from 0 to {num_ids}, the number of ids, got "
            f"{offsets.tolist()[:8]} of {len(offsets)}. Give where the ids of each entry begin, "
            "and their number."
        )


def as_ids(ids: Any, what: str = "ids") -> NDArray[np.int64]:
    """Return `ids` as a contiguous int64 array [n].

    Args:
        ids: a buffer of integers (the bits of uint64 are reinterpreted), or a list of whole numbers
            of 64 bits, signed or unsigned.
        what: the name of the ids in messages.

    Raises:
        RowShapeError: for anything else, for example floats, even if they are integral.
    """
    if isinstance(ids, (pa.Array, pa.ChunkedArray)):
        if ids.null_count:
            raise RowShapeError(
                f"{what}: nulls are not ids, got {ids.null_count} nulls. Drop or fill them."
            )
        if isinstance(ids, pa.Array):
            ids = as_numpy(ids)
        else:
            ids = ids.to_numpy()
    elif not isinstance(ids, (np.ndarray, list, tuple)) and hasattr(ids, "__dlpack__"):
        ids = np.from_dlpack(ids)
    if isinstance(ids, (list, tuple)):
        array = _of_list(ids, what)
    else:
        array = np.asarray(ids)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    elif array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    if array.dtype != np.int64 or array.ndim != 1:
        raise RowShapeError(
            f"{what}: expected integers of shape [n], got {array.dtype} {list(array.shape)}. "
            "Convert or flatten them; hash numbers of more than 64 bits."
        )
    return np.ascontiguousarray(array)


def _of_list(ids: Sequence[Any], what: str) -> NDArray[np.int64]:
    for kind in set(map(type, ids)):
        if kind is bool or not issubclass(kind, (int, np.integer)):
            wrong = next(id for id in ids if type(id) is kind)
            raise RowShapeError(
                f"{what}: expected whole numbers, got {wrong!r}. Send ids as integers."
            )
    try:
        return np.asarray(ids, np.int64)
    except OverflowError:  # ids that use the upper half of 64 bits, or more
        signed = [_reinterpreted(int(id), what) for id in ids]
        return np.array(signed, np.int64)


def _reinterpreted(id: int, what: str) -> int:
    """Return the signed number with the 64 bits of `id`."""
    if not -(2**63) <= id < 2**64:
        raise RowShapeError(f"{what}: expected numbers of 64 bits, got {id}. Hash longer ones.")
    if id >= 2**63:
        return id - 2**64
    return id


class SideBySide(Mapping[str, Any]):
    """Dense columns by name that lie side by side in one `matrix`.

    `matrix` is [n, sum of widths]; its columns follow the order of `widths`. A network that wants
    all dense columns in one array reads `matrix` without a copy.

    Example: `SideBySide(matrix, {"price": 1, "image": 64})["image"]` is `matrix[:, 1:65]`.
    """

    def __init__(self, matrix: Any, widths: Mapping[str, int]) -> None:
        self.matrix = matrix
        self._places = dict(
            zip(widths, itertools.accumulate(widths.values(), initial=0), strict=False)
        )
        self._widths = dict(widths)

    def __getitem__(self, name: str) -> Any:
        first = self._places[name]
        width = self._widths[name]
        if width == 1:
            return self.matrix[:, first]
        return self.matrix[:, first : first + width]

    def __iter__(self) -> Iterator[str]:
        return iter(self._widths)

    def __len__(self) -> int:
        return len(self._widths)


Record = TypeVar("Record")


def changed(record: Record, changes: Mapping[str, Any]) -> Record:
    """Return a copy of a frozen dataclass with other values of some fields, by name.

    It is `dataclasses.replace` for what each step makes: four times as fast, because no field is
    looked up.
    """
    copied = object.__new__(type(record))
    copied.__dict__.update(record.__dict__)
    copied.__dict__.update(changes)
    return copied


@dataclass(frozen=True, eq=False)
class Batch:
    """n samples, column by column.

    `ids`: Ids by feature name. `dense`: float32 [n] or [n, k] by name. `labels`: float32 [n] by
    name (empty when encoded for prediction). `weight`: float32 [n] or None. `time`: int64 [n],
    microseconds UTC, or None. `position`: where the Dataset is after this batch. `plans`: the ids
    as they were mapped ahead by the training loop, or None. `encoder`: the Dataset's Encoder, which
    knows the schema and the types of the raw columns, or None. `grain_ends`: of each grain, the
    number of the sample before which its run ends, if the source has divided the batch; empty
    otherwise. Runs may be empty or uneven. Slices and `take` drop the ends. `counted`: bool [n],
    False for a further sample of an impression, which policies of tables do not count; None = all
    count. `impressions`: int64 [n], the numbers that a join gave them, if they are asked for;
    `previews`: the impressions that it accepted since the batch before, without labels. `whole`: of
    a batch that ranks share out, all samples without ids and dense columns; here are then those of
    the grains of this rank, and the runs of others are empty. `segments`: by each
    `hotbed.data.columns.SegmentColumn` that was asked for, the segment of each sample, an object
    array [n]. `known`: int64 [n], from when on the labels of a sample of a join were known, in
    microseconds; None = at its time. The arrays are NumPy arrays, or tensors after `map_arrays`,
    but those of segments.

    Example: `batch.map_arrays(torch.from_numpy)`, `batch[10:20]`, `batch.ids["user"].values`.
    """

    ids: Mapping[str, Ids] = field(default_factory=dict)
    dense: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    weight: Any = None
    time: Any = None
    position: Position | None = None
    num_samples: int = -1
    plans: Any = None
    encoder: Any = None
    grain_ends: tuple[int, ...] = ()
    counted: Any = None
    impressions: Any = None
    previews: Batch | None = None
    whole: Batch | None = None
    segments: Mapping[Any, Any] = field(default_factory=dict)
    known: Any = None

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            columns = [
                *self.labels.values(),
                *self.ids.values(),
                *self.dense.values(),
                self.time,
                self.weight,
            ]
            lengths = [len(column) for column in columns if column is not None]
            num_samples = 0
            if lengths:
                num_samples = lengths[0]
            object.__setattr__(self, "num_samples", num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, rows: slice) -> Batch:
        start, stop, _ = rows.indices(self.num_samples)
        stop = max(start, stop)
        part = slice(start, stop)
        batch = self._changed(lambda ids: ids[part], lambda array: array[part], stop - start)
        return self._with_segments_of(batch, part)

    def with_weights(self, weights: Mapping[str, Any]) -> Batch:
        """Return the same samples with other weights of the ids of some features.

        A network learns weights by it. Ids that were mapped ahead of the lookup stay mapped.

        Args:
            weights: float32 [m] of a feature, by its name.

        Example: `collection(batch.with_weights({"clicked": self.weight_of(batch)}))`
        """
        ids = dict(self.ids)
        for name, of_ids in weights.items():
            ids[name] = changed(ids[name], {"weights": of_ids})
        return changed(self, {"ids": ids})

    def at(self, position: Position | None, encoder: Any = None) -> Batch:
        """Return the same samples, with `position` and the `encoder` that made them."""
        return changed(self, {"position": position, "encoder": encoder})

    def map_arrays(self, fn: Callable[[Any], Any]) -> Batch:
        """Return a Batch of `fn(array)` for each array but segments; `fn` keeps the first axis."""
        batch = self._changed(lambda ids: ids.map_arrays(fn), fn, self.num_samples)
        members = {
            "position": self.position,
            "encoder": self.encoder,
            "grain_ends": self.grain_ends,
            "previews": self.previews,
            "whole": None if self.whole is None else self.whole.map_arrays(fn),
            "segments": self.segments,
        }
        return changed(batch, members)

    def take(self, rows: np.ndarray) -> Batch:
        """Return the samples of the numbers `rows`, in that order (NumPy only)."""
        batch = self._changed(lambda ids: ids.take(rows), lambda array: array[rows], len(rows))
        return self._with_segments_of(batch, rows)

    def _with_segments_of(self, batch: Batch, rows: Any) -> Batch:
        """Return a batch of some of the samples with their segments."""
        if not self.segments:
            return batch
        return changed(batch, {"segments": {key: of[rows] for key, of in self.segments.items()}})

    def _changed(
        self, change_ids: Callable[[Ids], Ids], change: Callable[[Any], Any], num_samples: int
    ) -> Batch:
        """Return a Batch of changed ids and arrays, without a position; None stays None."""

        def change_if_any(array: Any) -> Any:
            return None if array is None else change(array)

        return Batch(
            ids={name: change_ids(ids) for name, ids in self.ids.items()},
            dense={name: change(values) for name, values in self.dense.items()},
            labels={name: change(values) for name, values in self.labels.items()},
            weight=change_if_any(self.weight),
            time=change_if_any(self.time),
            num_samples=num_samples,
            counted=change_if_any(self.counted),
            impressions=change_if_any(self.impressions),
            known=change_if_any(self.known),
        )

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Return all samples of `parts` (of one schema), in order (NumPy only)."""
        return joined([BatchSlice.of(part) for part in parts])


class BatchSlice(NamedTuple):
    """The samples `rows` of a batch, which are taken when they are joined with others.

    Many runs of few samples cost a column of them, not a batch each.
    """

    batch: Batch
    rows: slice

    @classmethod
    def of(cls, batch: Batch) -> BatchSlice:
        """Return the run of all samples of a batch."""
        return cls(batch, slice(0, batch.num_samples))

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return int(self.rows.stop - self.rows.start)


def joined(runs: Sequence[BatchSlice], *, features: bool = True) -> Batch:
    """Return the samples of runs (of one schema), in order (NumPy only).

    Without `features` the batch has no ids and dense columns.
    """
    first = runs[0].batch
    if len(runs) == 1:
        whole = first if runs[0].num_samples == first.num_samples else first[runs[0].rows]
        return whole if features else changed(whole, {"ids": {}, "dense": {}})

    def column(values_of: Callable[[Batch], Any]) -> Any:
        """Return a column of all runs; None if the first batch has none."""
        if values_of(first) is None:
            return None
        return np.concatenate([values_of(batch)[rows] for batch, rows in runs])

    counted = None
    if any(batch.counted is not None for batch, _ in runs):
        counted = np.concatenate([_all_if_none(batch)[rows] for batch, rows in runs])
    moments = None
    if any(batch.known is not None for batch, _ in runs):  # not of the files before a join
        moments = np.concatenate([_known_of(batch)[rows] for batch, rows in runs])
    ids: dict[str, Ids] = {}
    dense: dict[str, Any] = {}
    if features:
        for name in first.ids:
            plain = [
                of_run.values[rows]
                for batch, rows in runs
                if (of_run := batch.ids[name]).offsets is None and of_run.weights is None
            ]
            if len(plain) == len(runs):  # the common case is short, because grains are many
                ids[name] = Ids(np.concatenate(plain))
            else:
                ids[name] = Ids.concat([batch.ids[name][rows] for batch, rows in runs])
        for name in first.dense:
            dense[name] = np.concatenate([batch.dense[name][rows] for batch, rows in runs])
    labels = {
        name: np.concatenate([batch.labels[name][rows] for batch, rows in runs])
        for name in first.labels
    }
    previews = [batch.previews for batch, _ in runs if batch.previews is not None]
    segments = {
        key: np.concatenate([batch.segments[key][rows] for batch, rows in runs])
        for key in first.segments
        if all(key in batch.segments for batch, _ in runs)  # some may have been read before
    }
    return Batch(
        ids=ids,
        dense=dense,
        labels=labels,
        weight=column(lambda batch: batch.weight),
        time=column(lambda batch: batch.time),
        num_samples=sum(run.num_samples for run in runs),
        counted=counted,
        impressions=column(lambda batch: batch.impressions),
        known=moments,
        previews=Batch.concat(previews) if previews else None,
        segments=segments,
    )


def _joined(arrays: Sequence[Any]) -> Any:
    """Return the arrays of all parts as one, in order; None if the first part has none."""
    return None if arrays[0] is None else np.concatenate(arrays)


def _known_of(batch: Batch) -> Any:
    return batch.time if batch.known is None else batch.known


def _all_if_none(batch: Batch) -> Any:
    return np.ones(batch.num_samples, bool) if batch.counted is None else batch.counted


@dataclass(frozen=True, eq=False)
class CountedTimes:
    """Times of samples, of which policies of tables count some only.

    Attributes:
        time: int64 microseconds [n], or None.
        counted: bool [n].
    """

    time: Any
    counted: Any


@dataclass(frozen=True, eq=False)
class SharedTimes:
    """Times of samples of a batch that ranks share out.

    Attributes:
        time: of the samples of this rank, int64 microseconds [n].
        whole: of all samples.
    """

    time: Any
    whole: Any


def times_of(batch: Any) -> Any:
    """Return the times of a batch as a lookup takes them; None if there are none."""
    time = getattr(batch, "time", None)
    counted = getattr(batch, "counted", None)
    whole = getattr(batch, "whole", None)
    if time is not None and whole is not None:
        return SharedTimes(time, whole.time)
    return time if counted is None else CountedTimes(time, counted)
