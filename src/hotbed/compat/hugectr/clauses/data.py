# SPDX-License-Identifier: Apache-2.0
"""What to read: readers, labels, dense values and sparse slots."""

from __future__ import annotations

import dataclasses
from typing import Any

from hotbed.compat.hugectr.clause import by_order, clause, required
from hotbed.compat.hugectr.enums import (
    Alignment_t,
    Check_t,
    DataReaderSparse_t,
    DataReaderType_t,
    FileSystemType_t,
)
from hotbed.errors import ConfigError

_COPIED = (
    "train_source",
    "train_filelist",
    "eval_source",
    "eval_filelist",
    "dense_model",
    "dense_opt_states",
    "sparse_model",
    "sparse_opt_states",
)
_OLD_SOURCE = [
    "use_hdfs",
    "namenode",
    "port",
    *(f"hdfs_{name}" for name in _COPIED),
    *(f"local_{name}" for name in _COPIED),
    "hdfs_model_home",
    "local_model_home",
]


def _data_source_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `use_hdfs` and `namenode` of v3.4 to v3.8, and the paths of v3.4, too."""
    is_old = bool(args) and isinstance(args[0], bool)
    if not is_old and not set(_OLD_SOURCE).difference(["port"]).intersection(keywords):
        return by_order("data_source_params", ["source", "server", "port"], args, keywords)
    values = by_order("data_source_params", _OLD_SOURCE, args, keywords)
    if values.pop("use_hdfs", False):
        values["source"] = FileSystemType_t.HDFS
    if "namenode" in values:
        values["server"] = values.pop("namenode")
    copies = []
    for name in _COPIED:
        pair = [values.pop(f"{kind}_{name}", "") for kind in ("hdfs", "local")]
        remote, local = ([paths] if isinstance(paths, str) else paths for paths in pair)
        if len(remote) != len(local):
            raise ConfigError(
                f"data_source_params.local_{name}: expected one path for each of {remote}, got "
                f"{local}. Give as many."
            )
        copies += [(old, new) for old, new in zip(remote, local, strict=True) if old and new]
    for home in ("hdfs_model_home", "local_model_home"):
        values.pop(home, None)
    return {**values, "copies": copies}


@clause("data_source_params", _data_source_form)
class DataSourceParams:
    """A file system: `hugectr.data.DataSourceParams`.

    Attributes:
        copies: remote and local path of each file that `move_to_local()` of v3.4 copies.
    """

    source: FileSystemType_t = FileSystemType_t.Local
    server: str = "localhost"
    port: int = 9000
    copies: tuple[tuple[str, str], ...] = ()


@clause("async_param")
class AsyncParam:
    """Settings of the asynchronous reader. `io_block_size` is a name of v3.1."""

    num_threads: int = required()
    num_batches_per_thread: int = required()
    max_num_requests_per_thread: int = 0
    io_depth: int = 0
    io_alignment: int = 0
    shuffle: bool = required()
    aligned_type: Alignment_t = Alignment_t.Non
    multi_hot_reader: bool = True
    is_dense_float: bool = True
    io_block_size: int = 0


@clause("reader")
class DataReaderParams:
    """What to read: `DataReaderParams` of v3.1 and later.

    Attributes:
        adds_slot_offsets: whether keys of Raw and one-hot RawAsync files get the prefix sums of
            `slot_size_array`, as up to v3.0.1: readers of JSON files and of an `Input` have it.
            It is an argument of Hotbed's.
    """

    data_reader_type: DataReaderType_t = required()
    source: str | tuple[str, ...] = required()
    keyset: str | tuple[str, ...] = ""
    eval_source: str = required()
    check_type: Check_t = Check_t.Non  # required by HugeCTR, though a sample of v23.12 lacks it
    cache_eval_data: int = 0
    num_samples: int = 0
    eval_num_samples: int = 0
    float_label_dense: bool = False
    read_file_sequentially: bool = False
    num_workers: int = 12
    slot_size_array: tuple[int, ...] = ()
    data_source_params: DataSourceParams = DataSourceParams()
    async_param: AsyncParam = AsyncParam(
        16, 4, 512000, 4, 512, False, Alignment_t.Non, False, False
    )
    adds_slot_offsets: bool = False


def _sparse_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `(type, max_feature_num, max_nnz, slot_num)` of v2.3 to v3.0.1 too."""
    order = ["type", "max_feature_num", "max_nnz", "slot_num"]
    is_old = bool(args) and isinstance(args[0], DataReaderSparse_t)
    if is_old or not keywords.keys().isdisjoint(order[:3]):
        values = by_order("sparse", order, args, keywords)
        most = values.get("max_feature_num", 1)
        values["nnz_per_slot"] = values.pop("max_nnz", values.pop("nnz_per_slot", most))
        return {"top_name": "", "is_fixed_length": False, **values}
    order = ["top_name", "nnz_per_slot", "is_fixed_length", "slot_num"]
    return by_order("sparse", order, args, keywords)


@clause("sparse", _sparse_form)
class DataReaderSparseParam:
    """Sparse slots that are read together.

    Attributes:
        type: placement, which v2.3 to v3.0.1 and old JSON files give here, else None.
        max_feature_num: ids of a sample in all slots, which they give here too.
    """

    top_name: str = required()
    nnz_per_slot: int | tuple[int, ...] = required()
    is_fixed_length: bool = required()
    slot_num: int = required()
    type: DataReaderSparse_t | None = None
    max_feature_num: int | None = None

    def __post_init__(self) -> None:
        if self.slot_num < 1:
            raise ConfigError(
                f"sparse.slot_num: below 1, got {self.slot_num}. Give the number of slots."
            )
        if isinstance(self.nnz_per_slot, tuple) and len(self.nnz_per_slot) != self.slot_num:
            raise ConfigError(
                f"sparse.nnz_per_slot: expected one number for each of {self.slot_num} slots, "
                f"got {list(self.nnz_per_slot)}. Give a number or a list of that length."
            )

    @property
    def hotness(self) -> tuple[int, ...]:
        """The most ids of a sample in each slot."""
        if isinstance(self.nnz_per_slot, tuple):
            return self.nnz_per_slot
        return (self.nnz_per_slot,) * self.slot_num


_READER_OF_INPUT = (
    "data_reader_type",
    "source",
    "eval_source",
    "check_type",
    "cache_eval_data",
    "num_samples",
    "eval_num_samples",
    "float_label_dense",
    "num_workers",
    "slot_size_array",
)
_OLD_INPUT = [
    *_READER_OF_INPUT[:5],
    "label_dim",
    "label_name",
    "dense_dim",
    "dense_name",
    *_READER_OF_INPUT[5:],
    "data_reader_sparse_param_array",
    "sparse_names",
]


def _input_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take the signatures with one label and with several, and that of v3.0."""
    is_old = bool(args) and isinstance(args[0], DataReaderType_t)
    if is_old or not keywords.keys().isdisjoint([*_READER_OF_INPUT[:-1], "sparse_names"]):
        return _old_input(by_order("input", _OLD_INPUT, args, keywords))
    order = ["label_dim", "label_name", "dense_dim", "dense_name", "data_reader_sparse_param_array"]
    if args and isinstance(args[0], (list, tuple)):
        order = ["label_dims", "label_names", *order[2:]]
    if len(args) > 5 or "label_weights" in keywords:
        order.insert(2, "label_weights")
    values = by_order("input", order, args, keywords)
    return _one_label(values)


def _one_label(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for one label as those for a list of labels."""
    for key in ("label_dim", "label_name"):
        if key in values:
            value = values.pop(key)
            several = isinstance(value, (list, tuple))
            values[f"{key}s"] = value if several else (value,)
    return values


def _old_input(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an input that holds its reader and names of its sparse slots."""
    values = _one_label(values)
    reader = {key: values.pop(key) for key in _READER_OF_INPUT if key in values}
    reader = {"float_label_dense": True, "adds_slot_offsets": True, **reader}  # as in v3.0
    params = values.pop("data_reader_sparse_param_array", ())
    names = values.pop("sparse_names", ())
    if len(params) != len(names):
        raise ConfigError(
            f"input.sparse_names: expected one name for each of {len(params)} entries of "
            f"data_reader_sparse_param_array, got {list(names)}. Name each of them."
        )
    sparse = []
    for param, name in zip(params, names, strict=True):
        sparse.append(dataclasses.replace(param, top_name=name))
    values["data_reader_sparse_param_array"] = tuple(sparse)
    return {**values, "reader": DataReaderParams(**reader)}


@clause("input", _input_form)
class Input:
    """The tensors of a batch: labels, dense values and sparse slots.

    Attributes:
        label_dims: number of columns of each label.
        label_weights: of the losses; empty if not given.
        reader: what to read, which v3.0 and JSON files give here, else None.
        slot_size_array: that of the reader of training, in graphs that this package writes; None
            in those of HugeCTR, which do not say it.
        adds_slot_offsets: of that reader, if its files were Raw or RawAsync.
    """

    label_dims: tuple[int, ...] = required()
    label_names: tuple[str, ...] = required()
    label_weights: tuple[float, ...] = ()
    dense_dim: int = required()
    dense_name: str = required()
    data_reader_sparse_param_array: tuple[DataReaderSparseParam, ...] = required()
    reader: DataReaderParams | None = None
    slot_size_array: tuple[int, ...] | None = None
    adds_slot_offsets: bool = False

    def __post_init__(self) -> None:
        if len(self.label_dims) != len(self.label_names):
            raise ConfigError(
                f"input.label_dims: expected one number for each of {list(self.label_names)}, "
                f"got {list(self.label_dims)}. Give as many numbers as names."
            )
