# SPDX-License-Identifier: Apache-2.0
"""Random data in the formats of HugeCTR: what `DataGenerator` writes, and what a reader lacks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotbed.compat.hugectr.clauses import DataReaderParams, Input, Solver
from hotbed.compat.hugectr.enums import Check_t, DataReaderType_t
from hotbed.compat.hugectr.parquet import METADATA_FILE, ColumnPlace, FileStats, Metadata
from hotbed.compat.hugectr.reader import adds_sizes, raw_source, sizes_of_slots
from hotbed.connectors import (
    Distribution,
    Generated,
    Keys,
    Norm,
    Parquet,
    PowerLaw,
    Raw,
    Source,
    write_file_list,
)
from hotbed.connectors.samples import KeyBits

EVALUATION_SEED = 1 << 32
"""The first seed of evaluation data; training data begin with 0."""

_LOG = logging.getLogger("hotbed.compat.hugectr")
_ONE_FILE = (DataReaderType_t.Raw, DataReaderType_t.RawAsync)


@dataclass(frozen=True)
class FileCounts:
    """How much to write: files and samples in each.

    `folder`: of the files in a file list. It is relative to the folder of the list.
    """

    folder: Path
    files: int
    samples: int


@dataclass(frozen=True)
class SampleFiles:
    """Samples to draw, and the format of their files.

    Args:
        kind: the format. Parquet files hold single dense columns, the others one of lists.
        label_dim: labels of a sample.
        dense_dim: dense values of a sample.
        slots: the keys of each slot, in order.
        distribution: of the keys.
        key_bits: 32 or 64, for Norm files.
        checksum: whether samples of Norm files have checksums.
        raw: the layout of Raw files; its path is not used.
    """

    kind: DataReaderType_t
    label_dim: int
    dense_dim: int
    slots: Sequence[Keys]
    distribution: Distribution
    key_bits: KeyBits = 32
    checksum: bool = True
    raw: Raw | None = None

    def write(self, source: str, counts: FileCounts, seed: int) -> bool:
        """Write the data that a reader finds under `source`, unless something is there.

        Args:
            source: a file list, or a Raw file.
            counts: how much to write.
            seed: of the first file.

        Returns:
            Whether it was written. A file that exists is kept, and this is logged.
        """
        target = Path(source)
        if target.exists():
            _LOG.warning("hugectr: %s exists and is kept. Remove it to generate it anew.", source)
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.kind in _ONE_FILE:
            assert self.raw is not None
            rows = self._raw_rows(self.raw, counts.samples, seed)
            replace(self.raw, path=source).write(rows)
            return True
        folder = target.parent / counts.folder
        folder.mkdir(parents=True, exist_ok=True)
        files: list[str] = []
        for number in range(counts.files):
            rows = self._rows(counts.samples, seed + number)
            files.append(self._write_file(folder, number, rows))
        if self.kind is DataReaderType_t.Parquet:
            self._metadata(files, counts.samples).write(folder / METADATA_FILE)
        write_file_list(target, files)
        return True

    def _write_file(self, folder: Path, number: int, rows: Source) -> str:
        """Write one file of several, and return its path."""
        if self.kind is DataReaderType_t.Parquet:
            path = str(folder / f"gen_{number}.parquet")
            Parquet(path).write(rows)
            return path
        path = str(folder / f"gen_{number}.data")
        norm = Norm(
            path, self._labels, list(self._slots), key_bits=self.key_bits, checksum=self.checksum
        )
        norm.write(rows)
        return path

    def _rows(self, count: int, seed: int) -> Generated:
        dense = {name: 1 for name in self._dense}
        if self.kind is DataReaderType_t.Norm and self.dense_dim:
            dense = {"dense": self.dense_dim}
        return Generated(count, self._labels, dense, self._slots, self.distribution, seed=seed)

    def _raw_rows(self, raw: Raw, count: int, seed: int) -> Generated:
        dense = {raw.dense: raw.num_dense} if raw.num_dense else {}
        return Generated(
            count,
            raw.labels,
            dense,
            dict(zip(raw.slots, self.slots, strict=True)),
            self.distribution,
            raw.dense_type,
            seed,
        )

    @property
    def _labels(self) -> list[str]:
        return [f"label{number}" for number in range(self.label_dim)]

    @property
    def _dense(self) -> list[str]:
        """Names of single dense columns: they are numbered after the labels, as in HugeCTR."""
        return [f"C{self.label_dim + number}" for number in range(self.dense_dim)]

    @property
    def _slots(self) -> Mapping[str, Keys]:
        first = self.label_dim + self.dense_dim
        return {f"C{number}": keys for number, keys in enumerate(self.slots, first)}

    def _metadata(self, files: Sequence[str], samples: int) -> Metadata:
        names = [*self._labels, *self._dense, *self._slots]
        places = [ColumnPlace(name, number) for number, name in enumerate(names)]
        first_slot = self.label_dim + self.dense_dim
        return Metadata(
            tuple(FileStats(Path(file).name, samples) for file in files),
            cats=tuple(places[first_slot:]),
            conts=tuple(places[self.label_dim : first_slot]),
            labels=tuple(places[: self.label_dim]),
        )


def generate_missing(
    reader: DataReaderParams,
    input: Input,
    solver: Solver,
    counts: tuple[int, int],
    sizes: Sequence[int] = (),
    num_files: int = 4,
) -> list[str]:
    """Write random data under the paths of a reader where nothing is there.

    Args:
        reader: what is to be read.
        input: its tensors.
        solver: whether keys have 64 bits.
        counts: samples of the training and of the evaluation data, over all files of a source.
        sizes: keys of each slot where the reader has no `slot_size_array`; empty = 1000 each.
        num_files: files of a source that has a file list.

    Returns:
        The sources that were written.
    """
    layout = _layout_of(reader, input, solver, sizes)
    sources = reader.source
    if isinstance(sources, str):
        sources = (sources,)
    written: list[str] = []
    for number, source in enumerate([*sources, reader.eval_source]):
        is_evaluation = number == len(sources)
        num_samples = counts[is_evaluation]
        seed = number * num_files
        if is_evaluation:
            seed = EVALUATION_SEED
        folder = Path(f"{Path(source).name}.files")
        per_file = FileCounts(folder, num_files, -(-num_samples // num_files))
        if layout.raw is not None:
            per_file = replace(per_file, samples=num_samples)
        if source and not Path(source).exists():
            layout.write(source, per_file, seed)
            written.append(source)
    return written


def _layout_of(
    reader: DataReaderParams, input: Input, solver: Solver, sizes: Sequence[int]
) -> SampleFiles:
    """Return the samples that a reader expects."""
    hotness: list[int] = []
    for sparse in input.data_reader_sparse_param_array:
        most = sparse.max_feature_num
        for count in sparse.hotness:
            if most is not None:  # it counts the keys of all slots, and max_nnz is its default
                count = min(count, max(1, most // sparse.slot_num))
            hotness.append(count)
    kind = reader.data_reader_type
    raw = None
    if kind in _ONE_FILE:
        raw = raw_source(reader, input, solver, "")
        hotness = list(raw.slots.values())
    if reader.slot_size_array:
        sizes = sizes_of_slots(reader, len(hotness))
    all_sizes = filled_sizes(sizes or [1000] * len(hotness))
    firsts = [0] * len(hotness)
    has_shared_keys = kind in (DataReaderType_t.Norm, DataReaderType_t.Raw)
    if has_shared_keys and not adds_sizes(reader):
        firsts = list(itertools.accumulate(all_sizes[:-1], initial=0))
    slots: list[Keys] = []
    for size, count, first in zip(all_sizes, hotness, firsts, strict=True):
        varies = raw is None and count > 1
        slots.append(Keys(size, count, first, varies))
    return SampleFiles(
        kind,
        sum(input.label_dims),
        input.dense_dim,
        slots,
        PowerLaw(),
        key_bits=64 if solver.i64_input_key else 32,
        checksum=reader.check_type is Check_t.Sum,
        raw=raw,
    )


def filled_sizes(sizes: Sequence[int]) -> list[int]:
    """Return sizes without zeros: slots of size 0 share the keys of the next slot with a size."""
    filled: list[int] = []
    following = 1
    for size in reversed(sizes):
        following = size or following
        filled.append(following)
    return filled[::-1]
