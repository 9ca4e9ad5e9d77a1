# SPDX-License-Identifier: Apache-2.0
"""`hugectr.tools`: the data generator, by its calls and by its old command line.

python -m hotbed.compat.hugectr.tools --config-file dcn.json --voc-size-array 100,200 ...
"""

from __future__ import annotations

import itertools
from pathlib import Path

from hotbed.compat.hugectr.clause import clause, required
from hotbed.compat.hugectr.enums import Check_t, DataReaderType_t, Distribution_t, PowerLaw_t
from hotbed.compat.hugectr.generation import EVALUATION_SEED, FileCounts, SampleFiles, filled_sizes
from hotbed.connectors import Distribution, Keys, PowerLaw, Raw, UniformKeys
from hotbed.connectors.hugectr.raw import NumberType
from hotbed.errors import ConfigError

__all__ = ["DataGenerator", "DataGeneratorParams"]

_TAILS = {PowerLaw_t.Long: 0.9, PowerLaw_t.Medium: 1.1, PowerLaw_t.Short: 1.3}


@clause("data_generator")
class DataGeneratorParams:
    """What to generate, of v3.2 and later.

    `num_files`, `eval_num_files` and `num_samples_per_file` are those of Norm and Parquet data,
    `num_samples` and `eval_num_samples` those of Raw data.
    """

    format: DataReaderType_t = required()
    label_dim: int = required()
    dense_dim: int = required()
    num_slot: int = required()
    i64_input_key: bool = required()
    source: str = required()
    eval_source: str = required()
    slot_size_array: tuple[int, ...] = required()
    nnz_array: tuple[int, ...] = ()
    check_type: Check_t = Check_t.Sum
    dist_type: Distribution_t = Distribution_t.PowerLaw
    power_law_type: PowerLaw_t = PowerLaw_t.Specific
    alpha: float = 1.2
    num_files: int = 128
    eval_num_files: int = 32
    num_samples_per_file: int = 40960
    num_samples: int = 5242880
    eval_num_samples: int = 1310720
    float_label_dense: bool = False
    num_threads: int = 1

    def __post_init__(self) -> None:
        if not self.nnz_array:
            object.__setattr__(self, "nnz_array", (1,) * self.num_slot)
        for key in ("slot_size_array", "nnz_array"):
            numbers = getattr(self, key)
            if len(numbers) != self.num_slot:
                raise ConfigError(
                    f"data_generator.{key}: expected one number for each of {self.num_slot} slots, "
                    f"got {len(numbers)}. Give as many numbers as slots."
                )

    @property
    def distribution(self) -> Distribution:
        """The distribution of the keys."""
        if self.dist_type is Distribution_t.Uniform:
            return UniformKeys()
        return PowerLaw(_TAILS.get(self.power_law_type, self.alpha))


class DataGenerator:
    """Writes random training and evaluation data.

    `data_folder`: where the files lie that are named in a file list; "" = beside it.

    Example:
        >>> params = hugectr.tools.DataGeneratorParams(…)
        >>> hugectr.tools.DataGenerator(params).generate()
    """

    def __init__(self, data_generator_params: DataGeneratorParams, data_folder: str = "") -> None:
        self.params = data_generator_params
        self.data_folder = data_folder

    def generate(self) -> None:
        """Write the files. A source that exists is kept, and this is logged."""
        params = self.params
        files = self._files()
        is_raw = files.raw is not None
        folder = Path(self.data_folder)
        train = FileCounts(folder / "train", params.num_files, params.num_samples_per_file)
        evaluation = FileCounts(folder / "val", params.eval_num_files, params.num_samples_per_file)
        if is_raw:
            train = FileCounts(folder, 1, params.num_samples)
            evaluation = FileCounts(folder, 1, params.eval_num_samples)
        for source, counts, seed in (
            (params.source, train, 0),
            (params.eval_source, evaluation, EVALUATION_SEED),
        ):
            if files.write(source, counts, seed):
                print(f"{source} done!", flush=True)

    def _files(self) -> SampleFiles:
        """Return the samples; in Norm and Raw files, slots have ranges of keys of their own."""
        params = self.params
        sizes = filled_sizes(params.slot_size_array)
        is_parquet = params.format is DataReaderType_t.Parquet
        firsts = [0] * len(sizes)
        if not is_parquet:
            firsts = list(itertools.accumulate(sizes[:-1], initial=0))
        slots: list[Keys] = []
        for size, count, first in zip(sizes, params.nnz_array, firsts, strict=True):
            slots.append(Keys(size, count, first, varies=is_parquet and count > 1))
        return SampleFiles(
            params.format,
            params.label_dim,
            params.dense_dim,
            slots,
            params.distribution,
            64 if params.i64_input_key else 32,
            params.check_type is Check_t.Sum,
            self._raw(),
        )

    def _raw(self) -> Raw | None:
        params = self.params
        if params.format not in (DataReaderType_t.Raw, DataReaderType_t.RawAsync):
            return None
        kind: NumberType = "float32" if params.float_label_dense else "int32"
        slots = {f"C{number}": count for number, count in enumerate(params.nnz_array)}
        return Raw(
            "",
            [f"label{number}" for number in range(params.label_dim)],
            params.dense_dim,
            slots,
            kind,
            kind,
            64 if params.i64_input_key else 32,
        )
