# SPDX-License-Identifier: Apache-2.0
"""Rehearsals: a script runs for a few iterations on generated data of a fraction of the size."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotbed.compat.hugectr.clauses import (
    DataReaderParams,
    EmbeddingCollectionConfig,
    FitParams,
    Graph,
    Input,
    Solver,
    SparseEmbedding,
)
from hotbed.compat.hugectr.enums import DataReaderType_t
from hotbed.compat.hugectr.generation import generate_missing
from hotbed.errors import ConfigError

UNKNOWN_ITERATIONS = 50
"""Batches of generated data, without `max_iter`."""


@dataclass(frozen=True)
class Rehearsal:
    """How a script is shortened.

    Args:
        max_iter: the most iterations; None = those of the script.
        data_scale: factor of batch sizes, and of the slot sizes of generated data.
        data_root: the folder that stands for `/` in absolute paths of data; None = paths are as
            the script has them.
    """

    max_iter: int | None = None
    data_scale: float = 1.0
    data_root: Path | None = None

    def __post_init__(self) -> None:
        if self.max_iter is not None and self.max_iter < 1:
            raise ConfigError(f"--max-iter: below 1, got {self.max_iter}. Give a number from 1.")
        if not 0 < self.data_scale <= 1:
            raise ConfigError(
                f"--data-scale: not in (0, 1], got {self.data_scale}. Give a fraction such as 0.01."
            )

    def solver(self, solver: Solver) -> Solver:
        """Return a solver with smaller batches, fewer iterations and shorter evaluations."""
        fit = solver.fit
        if fit is not None:
            fit = self.fit(fit, repeats=solver.repeat_dataset)
        return replace(
            solver,
            batchsize=self._scaled(solver.batchsize),
            batchsize_eval=self._scaled(solver.batchsize_eval),
            max_eval_batches=min(solver.max_eval_batches, self._most_evaluated),
            fit=fit,
        )

    def fit(self, fit: FitParams, *, repeats: bool) -> FitParams:
        """Return arguments of `fit` with fewer iterations, and an evaluation after half of them.

        There is one epoch at most: generated data have the iterations of one.
        """
        if self.max_iter is None:
            return fit
        half = max(self.max_iter // 2, 1)
        return replace(
            fit,
            num_epochs=fit.num_epochs if repeats else min(fit.num_epochs, 1),
            max_iter=self._shortened(fit.max_iter),
            display=min(fit.display, half),
            eval_interval=min(fit.eval_interval, half),
        )

    def left_out(self, fit: FitParams, *, repeats: bool) -> tuple[int, ...]:
        """Return the last iterations, at most ten, whose snapshots a rehearsal does not reach.

        A script may load one of these snapshots later. The rehearsal puts its last weights there.

        Args:
            fit: the arguments of the script.
            repeats: whether `max_iter` limits training; False = the number of epochs does.
        """
        if self.max_iter is None or not repeats or fit.snapshot < 1:
            return ()
        first = self.max_iter // fit.snapshot + 1
        last = fit.max_iter // fit.snapshot
        return tuple(fit.snapshot * number for number in range(max(first, last - 9), last + 1))

    def graph(self, graph: Graph) -> Graph:
        """Return a graph whose embeddings have the slot sizes of generated data."""
        embeddings: list[SparseEmbedding | EmbeddingCollectionConfig] = []
        for embedding in graph.embeddings:
            if isinstance(embedding, SparseEmbedding):
                sizes = self._slot_sizes(embedding.slot_size_array)
                embedding = replace(embedding, slot_size_array=sizes)
            embeddings.append(embedding)
        return replace(graph, embeddings=tuple(embeddings))

    def reading(self, reader: DataReaderParams, solver: Solver) -> Reading:
        """Return the reader of a shortened run, and the data that it lacks.

        Args:
            reader: the script's reader.
            solver: the shortened solver.

        Raises:
            ConfigError: one of its sources exists, and another one does not.
        """
        placed = replace(
            reader,
            source=tuple(map(self._placed, _listed(reader.source))),
            eval_source=self._placed(reader.eval_source),
        )
        paths = [Path(path) for path in (*_listed(placed.source), placed.eval_source) if path]
        present = [path for path in paths if path.exists()]
        if present and not all(_mark(path).exists() for path in present):
            absent = [str(path) for path in paths if path not in present]
            if absent:
                raise ConfigError(
                    f"{absent[0]}: does not exist, got {present[0]}. Add the file: data are only "
                    "generated where no source exists."
                )
            return Reading(placed, ())
        counts = (
            (self.max_iter or UNKNOWN_ITERATIONS) * solver.batchsize,
            solver.max_eval_batches * solver.batchsize_eval,
        )
        sizes = self._slot_sizes(placed.slot_size_array)
        generated = replace(placed, slot_size_array=sizes)
        if placed.data_reader_type in (DataReaderType_t.Raw, DataReaderType_t.RawAsync):
            generated = replace(generated, num_samples=counts[0], eval_num_samples=counts[1])
        return Reading(generated, counts)

    @property
    def _most_evaluated(self) -> int:
        """The most batches of an evaluation: a tenth of the iterations."""
        return max((self.max_iter or UNKNOWN_ITERATIONS) // 10, 1)

    def _placed(self, path: str) -> str:
        is_placed = path.startswith(f"{self.data_root}/")
        if self.data_root is None or not path.startswith("/") or is_placed:
            return path
        return f"{self.data_root}{path}"

    def _slot_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return smaller sizes; a slot of size 0, which shares the keys of another, stays so."""
        return tuple(size and self._scaled(size) for size in sizes)

    def _scaled(self, number: int) -> int:
        return max(math.ceil(number * self.data_scale), min(number, 2))

    def _shortened(self, number: int) -> int:
        return number if self.max_iter is None else min(number, self.max_iter)


@dataclass(frozen=True)
class Reading:
    """A shortened reader.

    Args:
        reader: what is read.
        counts: samples to generate, for training and to evaluate; empty = the data are the user's.
    """

    reader: DataReaderParams
    counts: tuple[int, ...]

    @property
    def is_generated(self) -> bool:
        """Whether the data are generated, now or by an earlier run."""
        return bool(self.counts)

    def generate(self, solver: Solver, inputs: Input) -> list[str]:
        """Generate the data that are missing, and return the sources that were written.

        Args:
            solver: the shortened solver.
            inputs: the tensors of a sample.

        Raises:
            ConfigError: an earlier run generated data of other sizes there.
        """
        if not self.is_generated:
            return []
        num_samples, num_evaluated = self.counts
        sparse = inputs.data_reader_sparse_param_array
        description = json.dumps(
            {
                "samples": self.counts,
                "slots": self.reader.slot_size_array,
                "labels": inputs.label_dims,
                "dense": inputs.dense_dim,
                "sparse": [(param.is_fixed_length, *param.hotness) for param in sparse],
            }
        )
        paths = [path for path in (*_listed(self.reader.source), self.reader.eval_source) if path]
        for path in paths:
            mark = _mark(Path(path))
            if mark.exists() and mark.read_text() != description:
                raise ConfigError(
                    f"{path}: was generated with other sizes, got {mark} of an earlier run. "
                    "Remove its folder, or run with the same --max-iter and --data-scale."
                )
        written = generate_missing(self.reader, inputs, solver, (num_samples, num_evaluated))
        for path in written:
            _mark(Path(path)).write_text(description)
        return written


def _listed(source: str | Sequence[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _mark(path: Path) -> Path:
    """Return the file beside generated data that says how they were generated."""
    return path.with_name(f"{path.name}.rehearsal.json")
