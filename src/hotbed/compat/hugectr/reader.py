# SPDX-License-Identifier: Apache-2.0
"""Data readers: their raw columns, and the datasets that they stand for."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotbed.compat.hugectr.clauses import DataReaderParams, Input, Solver
from hotbed.compat.hugectr.enums import Check_t, DataReaderType_t
from hotbed.compat.hugectr.parquet import ParquetData
from hotbed.connectors import Concat, Norm, Raw, Source
from hotbed.connectors.samples import KeyBits
from hotbed.data.dataset import Dataset
from hotbed.data.schema import Dense, Schema
from hotbed.data.transforms import Log
from hotbed.errors import ConfigError

SHUFFLE_ROWS = 1 << 18
"""Rows of the buffer in which readers shuffle that do so in HugeCTR."""

_LOG = logging.getLogger("hotbed.compat.hugectr")
_ONE_FILE = (DataReaderType_t.Raw, DataReaderType_t.RawAsync)


@dataclass(frozen=True)
class Columns:
    """The raw columns of a reader, as a translation needs them.

    Args:
        labels: one raw column for each label value, over all labels in the order of the `Input`.
        dense: columns of a schema which, in this order, make up the dense tensor. They bring the
            transforms of the reader, such as log(x + 1) of whole numbers.
        slots: one raw column for each slot, over all sparse inputs in their order.
        offsets: what the reader adds to the keys of each slot; zeros without `slot_size_array`.
        sizes: how many keys each slot has by `slot_size_array`; empty where the reader adds none.
    """

    labels: tuple[str, ...]
    dense: tuple[Dense, ...]
    slots: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...] = ()


def columns_of(reader: DataReaderParams, input: Input) -> Columns:
    """Return the raw columns of a reader.

    Those of Norm and Raw files are the `named_columns` of the input. Those of Parquet files have
    the names of the files, by the order in `_metadata.json`.

    Raises:
        ConfigError: `slot_size_array` or the files do not fit the input.
        DataError: the metadata of Parquet files cannot be read.
    """
    named = named_columns(input)
    sized = _with_sizes(named, offset_sizes(reader, named.slots))
    if reader.data_reader_type is DataReaderType_t.Parquet:
        data = ParquetData(_paths(reader.source))
        return Columns(
            _first("labels", data, len(named.labels)),
            _parquet_dense(data, input.dense_dim),
            _first("cats", data, len(named.slots)),
            sized.offsets,
            sized.sizes,
        )
    dense = named.dense
    if _has_whole_dense(reader):
        dense = tuple(replace(column, transforms=[Log()]) for column in dense)
    return replace(sized, dense=dense)


def _with_sizes(columns: Columns, sizes: tuple[int, ...]) -> Columns:
    """Return columns whose slots have keys of their own, of these sizes; as they are without."""
    if not sizes:
        return columns
    return replace(columns, offsets=offsets_of_sizes(sizes), sizes=sizes)


def offsets_of_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the first key of each slot, of slots of these sizes."""
    return tuple(itertools.accumulate(sizes[:-1], initial=0))


def named_columns(input: Input) -> Columns:
    """Return raw columns that are named as the tensors of an input.

    A label or sparse input `x` of one value or slot is the column `x`, otherwise its columns are
    `x_0`, `x_1`, …. The dense values are one column of lists.
    """
    labels: list[str] = []
    for name, dim in zip(input.label_names, input.label_dims, strict=True):
        labels += numbered(name, dim)
    slots: list[str] = []
    for sparse in input.data_reader_sparse_param_array:
        slots += numbered(sparse.top_name, sparse.slot_num)
    dense: tuple[Dense, ...] = ()
    if input.dense_dim:
        dense = (Dense(input.dense_name, width=input.dense_dim),)
    return Columns(tuple(labels), dense, tuple(slots), (0,) * len(slots))


def known_columns(input: Input) -> Columns:
    """Return the named columns of an input, with the slot sizes that its JSON file gives."""
    named = named_columns(input)
    return _with_sizes(named, known_sizes(input) or ())


def known_sizes(input: Input) -> tuple[int, ...] | None:
    """Return the `slot_size_array` of training, by a JSON file; None if it does not say it."""
    if input.reader is not None:
        return offset_sizes(input.reader, named_columns(input).slots)
    return input.slot_size_array


def training_data(
    reader: DataReaderParams,
    input: Input,
    solver: Solver,
    schema: Schema,
    *,
    short_keys: bool = False,
) -> Dataset:
    """Return the training data of a reader; each epoch reads all of its sources in turn.

    Raw files are shuffled, as HugeCTR's reader does; so are those of RawAsync with `shuffle`.
    `short_keys`: the files of the model hold keys of 32 bits, so that the data may not have others.

    Raises:
        ConfigError: the files do not fit the input.
        DataError: a file cannot be read.
    """
    shuffles = reader.data_reader_type is DataReaderType_t.Raw
    if reader.data_reader_type is DataReaderType_t.RawAsync:
        shuffles = reader.async_param.shuffle
    if short_keys and reader.data_reader_type is DataReaderType_t.Parquet:
        _check_short(reader, input)
    source = _source(reader, input, solver, reader.source, reader.num_samples)
    return _dataset(
        source, reader, schema, solver.batchsize, solver, shuffle=SHUFFLE_ROWS * shuffles
    )


def evaluation_data(
    reader: DataReaderParams, input: Input, solver: Solver, schema: Schema
) -> Dataset:
    """Return the evaluation data of a reader, in the order of its file.

    With `cache_eval_data`, so many batches are read once and kept in memory.

    Raises:
        ConfigError: the files do not fit the input.
        DataError: a file cannot be read.
    """
    source = _source(reader, input, solver, reader.eval_source, reader.eval_num_samples)
    if reader.cache_eval_data:
        source = source.slice(0, reader.cache_eval_data * solver.batchsize_eval)
    return _dataset(
        source, reader, schema, solver.batchsize_eval, solver, cache=bool(reader.cache_eval_data)
    )


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Return names for `count` things: the name itself for one, else with a number behind."""
    if count == 1:
        return (name,)
    return tuple(f"{name}_{number}" for number in range(count))


def offset_sizes(reader: DataReaderParams, slots: Sequence[str]) -> tuple[int, ...]:
    """Return `slot_size_array`, whose prefix sums some readers add to keys; else nothing.

    Sizes behind that of the last slot are not used, as in HugeCTR's Parquet reader.
    """
    if not reader.slot_size_array or not adds_sizes(reader):
        return ()
    return sizes_of_slots(reader, len(slots))


def sizes_of_slots(reader: DataReaderParams, num_slots: int) -> tuple[int, ...]:
    """Return the sizes of so many slots; ConfigError if `slot_size_array` has fewer."""
    sizes = reader.slot_size_array
    if len(sizes) < num_slots:
        raise ConfigError(
            f"reader.slot_size_array: expected one size for each of {num_slots} slots, got "
            f"{len(sizes)} sizes. Give a size for each slot of the input, or none."
        )
    return sizes[:num_slots]


def warn_of_sizes(reader: DataReaderParams, slots: Sequence[str]) -> None:
    """Warn of sizes that no slot has: the slots may be other ones than was meant."""
    sizes = offset_sizes(reader, slots)
    if sizes and len(reader.slot_size_array) > len(sizes):
        _LOG.warning(
            "hugectr: reader.slot_size_array has %d sizes for %d slots; the last %d are not used",
            len(reader.slot_size_array),
            len(sizes),
            len(reader.slot_size_array) - len(sizes),
        )


def adds_sizes(reader: DataReaderParams) -> bool:
    """Return whether a reader adds the prefix sums of `slot_size_array` to keys.

    The reader of Parquet files does so in all releases; that of Raw files and the one-hot RawAsync
    reader up to v3.0.1. The multi-hot reader of v23.04 and later never does: an embedding
    collection has a table of its own for each of its inputs.
    """
    kind = reader.data_reader_type
    if kind is DataReaderType_t.RawAsync and reader.async_param.multi_hot_reader:
        return False
    return kind is DataReaderType_t.Parquet or (kind in _ONE_FILE and reader.adds_slot_offsets)


def _paths(source: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(source, str):
        return (source,)
    return tuple(source)


def _first(role: str, data: ParquetData, count: int) -> tuple[str, ...]:
    """Return the first `count` columns of a role; those after them are not read."""
    names = data.names(role)
    if len(names) < count:
        raise ConfigError(
            f"input: expected {count} columns, got {len(names)} {role} by _metadata.json. Correct "
            "the dimensions of the input, or write the data with more columns."
        )
    return names[:count]


def _parquet_dense(data: ParquetData, dense_dim: int) -> tuple[Dense, ...]:
    if not dense_dim:
        return ()
    columns: list[Dense] = []
    width = 0
    for name in data.names("conts"):
        columns.append(Dense(name, width=data.width(name)))
        width += columns[-1].width
    if width != dense_dim:
        raise ConfigError(
            f"input.dense_dim: the conts of _metadata.json have {width} values, got {dense_dim}. "
            "Correct dense_dim."
        )
    return tuple(columns)


def _has_whole_dense(reader: DataReaderParams) -> bool:
    """Return whether the dense values of a reader are whole numbers, of which it takes logs."""
    if reader.data_reader_type is DataReaderType_t.Raw:
        return not reader.float_label_dense
    if reader.data_reader_type is DataReaderType_t.RawAsync:
        is_float = reader.async_param.multi_hot_reader and reader.async_param.is_dense_float
        return not is_float
    return False


def _source(
    reader: DataReaderParams,
    input: Input,
    solver: Solver,
    source: str | Sequence[str],
    num_samples: int,
) -> Source:
    """Return the rows of one or more sources of a reader."""
    paths = [path for path in _paths(source) if path]
    if not paths:
        raise ConfigError("reader: nothing to read, got no source. Name a file or a file list.")
    kind = reader.data_reader_type
    if kind is DataReaderType_t.Parquet:
        data = ParquetData(paths)
        data.check_rows()
        expected = columns_of(reader, input)
        data.check_keys(expected.slots, {})
        for path in paths:
            columns = columns_of(replace(reader, source=path), input)
            if columns != expected:
                raise ConfigError(
                    f"reader: all sources need the same columns, got {columns} in {path} and "
                    f"{expected} in the first. Write them with one schema."
                )
        return data.files
    if kind in _ONE_FILE:
        files: list[Source] = []
        for path in paths:
            raw = raw_source(reader, input, solver, path)
            files.append(_cut(raw, num_samples))
    else:
        files = [_norm(reader, input, solver, path) for path in paths]
    if len(files) == 1:
        return files[0]
    return Concat(files)


def _check_short(reader: DataReaderParams, input: Input) -> None:
    """Raise DataError if Parquet files have a key that is not one of 32 bits with its offset."""
    columns = columns_of(reader, input)
    ends = {
        name: 2**32 - offset for name, offset in zip(columns.slots, columns.offsets, strict=True)
    }
    ParquetData([path for path in _paths(reader.source) if path]).check_keys(columns.slots, ends)


def _norm(reader: DataReaderParams, input: Input, solver: Solver, path: str) -> Norm:
    named = named_columns(input)
    norm = Norm(
        path,
        named.labels,
        named.slots,
        dense=input.dense_name,
        key_bits=_key_bits(solver),
        checksum=reader.check_type is Check_t.Sum,
    )
    schema = norm.schema()
    num_dense = 0
    if input.dense_name in schema.names:
        num_dense = schema.field(input.dense_name).type.list_size
    if num_dense != input.dense_dim:
        raise ConfigError(
            f"input.dense_dim: {path} has {num_dense} dense values after {len(named.labels)} "
            f"labels, got {input.dense_dim}. Correct label_dim or dense_dim."
        )
    return norm


def raw_source(reader: DataReaderParams, input: Input, solver: Solver, path: str) -> Raw:
    """Return a file of a Raw or RawAsync reader."""
    named = named_columns(input)
    hotness = [1] * len(named.slots)
    is_async = reader.data_reader_type is DataReaderType_t.RawAsync
    if is_async:
        sparse = input.data_reader_sparse_param_array
        hotness = list(itertools.chain.from_iterable(param.hotness for param in sparse))
    has_float_labels = reader.float_label_dense and not is_async
    return Raw(
        path,
        named.labels,
        input.dense_dim,
        dict(zip(named.slots, hotness, strict=True)),
        label_type="float32" if has_float_labels else "int32",
        dense_type="int32" if _has_whole_dense(reader) else "float32",
        key_bits=_key_bits(solver) if is_async else 32,
        dense=input.dense_name,
    )


def _key_bits(solver: Solver) -> KeyBits:
    if solver.i64_input_key:
        return 64
    return 32


def _cut(raw: Raw, num_samples: int) -> Source:
    """Return the first samples of a file; 0 = all."""
    if not num_samples:
        return raw
    present = raw.count_rows()
    if present < num_samples:
        raise ConfigError(
            f"reader.num_samples: {raw.path} has {present} samples of {raw.sample_bytes} bytes, "
            f"got {num_samples}. Correct the number, or the dimensions of the input."
        )
    if present == num_samples:
        return raw
    return raw.slice(0, num_samples)


def _dataset(
    source: Source,
    reader: DataReaderParams,
    schema: Schema,
    batch_size: int,
    solver: Solver,
    *,
    shuffle: int = 0,
    cache: bool = False,
) -> Dataset:
    """Return the dataset of a source. Only damaged samples of Norm files are skipped."""
    on_error = "raise"
    if reader.data_reader_type is DataReaderType_t.Norm:
        on_error = "skip"
    num_rows = source.num_rows()
    has_batch = num_rows is None or num_rows >= batch_size
    return Dataset(
        source,
        schema,
        batch_size,
        shuffle=shuffle,
        seed=solver.seed,
        drop_last=solver.drop_incomplete_batch and has_batch,
        on_error=on_error,
        cache=cache,
    )
