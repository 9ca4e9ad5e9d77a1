# SPDX-License-Identifier: Apache-2.0
"""The arguments of create_table and sparse_lookup, with the checks of Rec SDK."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotbed import checks
from hotbed.compat.mx_rec.checks import MOST_INT, boolean
from hotbed.compat.mx_rec.constants.constants import ApplyGradientsStrategy, MxRecMode
from hotbed.compat.mx_rec.no_effect import ARGUMENTS
from hotbed.data.batch import as_ids
from hotbed.embedding.init import Init
from hotbed.embedding.policy import MAX_ADMISSION_BYTES, MIN_ADMISSION_BYTES
from hotbed.errors import ConfigError

__all__ = ["TableArguments"]

KEY_DTYPES = (torch.int64, torch.int32)
SUMS = ("sum_gradients", "sum_gradients_and_div_by_ranksize")
"""How gradients of several ranks are summed."""
MOST_ROWS = 10**9
MOST_DIM = 8192
MOST_SHARDS = 8192
MOST_FACTOR = 10.0

_NAME = re.compile(r"[A-Za-z0-9_.]{1,100}")
_PATHS = (str, os.PathLike)
_MERGED = "mergeable_table"


@dataclass(frozen=True)
class TableArguments:
    """The arguments of `create_table`. Boolean ones may be the texts "True" and "False".

    Args:
        key_dtype: of its ids, torch.int64 or torch.int32.
        dim: lanes of a row, 1 to 8192, or a shape of one number.
        name: of the table, 1 to 100 letters, digits, underscores and dots.
        emb_initializer: how a row starts, for example `hb.Normal(std=0.01)`.
        device_vocabulary_size: rows that you expect. Rows lie in main memory, and the table grows
            past this number.
        host_vocabulary_size: rows that you expect beside them, likewise.
        ssd_vocabulary_size: above 0, rows lie on a disk (`hb.Ssd`), and those of the device and the
            host together stay in memory. The table grows past this number.
        ssd_data_path: the folder on the disk, which exists; the working directory by default. Of
            several, tables that lie on a disk take one each, in turn.
        is_save: whether a `Saver` saves it.
        is_dp: has no effect: each rank owns a part of the rows of every table.
        init_param: multiplies initial rows, -10 to 10.
        all2all_gradients_op: whether the gradients of several ranks are added, or averaged.
        enable_merge: has no effect: all tables are looked up in one call.
        padding_keys: ids of the table whose rows take no update.
        padding_keys_mask: whether they take none; belongs to `padding_keys`.
        padding_keys_len: belongs to them, too, and has no effect.
        value_dtype: torch.float32.
        shard_num: has no effect, as the two that follow it.
        fusion_optimizer_var: state of the optimizer lies in the rows.
        hashtable_threshold: every table is a hash table.
        optimizer_list: its own optimizer, where there are several.
        mode: has no effect; a member of `MxRecMode`, or its value.
        apply_gradients_strategy: has no effect; a member of `ApplyGradientsStrategy`, or its value.
        admission_bytes: an argument of Hotbed: memory for the counts of ids that wait for their
            row, see "Memory for ids that wait" in docs/embedding.md.

    Raises:
        ConfigError: a value is wrong.
    """

    key_dtype: Any
    dim: Any
    name: Any
    emb_initializer: Any
    device_vocabulary_size: Any
    host_vocabulary_size: Any
    ssd_vocabulary_size: Any
    ssd_data_path: Any
    is_save: Any
    is_dp: Any
    init_param: Any
    all2all_gradients_op: Any
    enable_merge: Any
    padding_keys: Any
    padding_keys_mask: Any
    padding_keys_len: Any
    value_dtype: Any
    shard_num: Any
    fusion_optimizer_var: Any
    hashtable_threshold: Any
    optimizer_list: Any
    mode: Any
    apply_gradients_strategy: Any
    admission_bytes: Any

    def __post_init__(self) -> None:
        self._check_name()
        where = self.where
        checks.one_of(f"{where}: key_dtype", self.key_dtype, KEY_DTYPES)
        checks.one_of(f"{where}: value_dtype", self.value_dtype, (torch.float32,))
        checks.one_of(f"{where}: all2all_gradients_op", self.all2all_gradients_op, SUMS)
        memory = f"{where}: admission_bytes"
        checks.whole_number(memory, self.admission_bytes, MIN_ADMISSION_BYTES, MAX_ADMISSION_BYTES)
        MxRecMode.mapping(self.mode)
        strategy = ApplyGradientsStrategy.mapping(self.apply_gradients_strategy)
        checks.whole_number(f"{where}: shard_num", self.shard_num, 1, MOST_SHARDS)
        threshold = self.hashtable_threshold
        checks.whole_number(f"{where}: hashtable_threshold", threshold, 0, MOST_INT)
        self._check_initializer()
        self._check_padding()
        differs = dict(
            key_dtype=self.key_dtype is not torch.int64,
            ssd_data_path=bool(self.ssd_data_path) and not self.ssd_vocabulary_size,
            is_dp=boolean(f"{where}: is_dp", self.is_dp),
            enable_merge=boolean(f"{where}: enable_merge", self.enable_merge),
            padding_keys_len=self.padding_keys_len is not None,
            shard_num=self.shard_num != 1,
            fusion_optimizer_var=not self.fusion_optimizer_var,
            hashtable_threshold=threshold != 0,
            apply_gradients_strategy=strategy is not ApplyGradientsStrategy.DIRECT_APPLY,
        )
        for name, is_given in differs.items():
            ARGUMENTS.log_no_effect(f"create_table.{name}", when=is_given)

    @property
    def where(self) -> str:
        """Where messages say that they come from."""
        return f"create_table {self.name!r}"

    @property
    def lanes(self) -> int:
        """The lanes of a row: `dim` is a number, or a shape of one dimension."""
        dim = self.dim
        if isinstance(dim, Sequence) and not isinstance(dim, str) and len(dim) == 1:
            dim = dim[0]
        advice = "Give a number, or a shape of one."
        checks.whole_number(f"{self.where}: dim", dim, 1, MOST_DIM, advice)
        return int(dim)

    @property
    def saves(self) -> bool:
        """Whether a `Saver` saves the table."""
        return boolean(f"{self.where}: is_save", self.is_save)

    @property
    def averages(self) -> bool:
        """Whether the gradients of several ranks are divided by the number of ranks."""
        return bool(self.all2all_gradients_op == SUMS[1])

    @property
    def padding(self) -> tuple[int, ...]:
        """The ids whose rows take no update."""
        if self.padding_keys is None:
            return ()
        is_one = isinstance(self.padding_keys, int)
        keys = [self.padding_keys] if is_one else self.padding_keys
        return tuple(as_ids(keys, f"{self.where}: padding_keys").tolist())

    def rows(self, *, grows: bool) -> tuple[int, int, int]:
        """Return the rows that are expected on the device, the host and the disk.

        In dynamic expansion (`grows`) the device has all rows, as in Rec SDK.
        """
        device = self.device_vocabulary_size
        host = self.host_vocabulary_size
        ssd = self.ssd_vocabulary_size
        checks.whole_number(f"{self.where}: device_vocabulary_size", device, 1, MOST_ROWS)
        checks.whole_number(f"{self.where}: host_vocabulary_size", host, 0, MOST_ROWS)
        checks.whole_number(f"{self.where}: ssd_vocabulary_size", ssd, 0, MOST_ROWS)
        if grows:
            ARGUMENTS.log_no_effect("create_table.host_vocabulary_size", when=host > 0)
            ARGUMENTS.log_no_effect("create_table.ssd_vocabulary_size", when=ssd > 0)
            return device, 0, 0
        if ssd > 0 and host == 0:
            raise ConfigError(
                f"{self.where}: ssd_vocabulary_size needs a host_vocabulary_size above 0, got "
                f"{ssd} and {host}. Give both, or neither."
            )
        return device, host, ssd

    def folder(self, number: int) -> str:
        """Return the folder of the rows of the program's `number`-th table; "" by default.

        Of several folders, tables take one each, in turn.
        """
        paths = self.ssd_data_path
        if not isinstance(paths, (list, tuple)) or not all(isinstance(p, _PATHS) for p in paths):
            raise ConfigError(
                f"{self.where}: ssd_data_path is a list of folders, got {paths!r}. Give the folder "
                "whose disk is large enough."
            )
        return os.fspath(paths[number % len(paths)]) if paths else ""

    def _check_name(self) -> None:
        name = self.name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                "create_table: name has 1 to 100 letters, digits, underscores and dots, got "
                f"{name!r}. Rename the table."
            )
        if name.startswith(_MERGED):
            raise ConfigError(
                f"create_table: names that begin with {_MERGED!r} are reserved, got the name "
                f"{name!r}. Rename the table."
            )

    def _check_initializer(self) -> None:
        if not isinstance(self.emb_initializer, Init):
            raise ConfigError(
                f"{self.where}: emb_initializer must be an initializer of hotbed, got "
                f"{self.emb_initializer!r}. Give hb.Normal(std), hb.Uniform(scale), "
                "hb.Constant(value) or hb.Zeros()."
            )
        where = f"{self.where}: init_param"
        checks.finite_number(where, self.init_param, least=-MOST_FACTOR, most=MOST_FACTOR)

    def _check_padding(self) -> None:
        masked = boolean(f"{self.where}: padding_keys_mask", self.padding_keys_mask)
        parts = [self.padding_keys is not None, masked, self.padding_keys_len is not None]
        if any(parts) and not all(parts):
            raise ConfigError(
                f"{self.where}: padding_keys, padding_keys_mask and padding_keys_len belong "
                f"together, got {self.padding_keys!r}, {self.padding_keys_mask!r} and "
                f"{self.padding_keys_len!r}. Give all three, or none."
            )


def check_lookup_name(table: str, name: object) -> None:
    """Raise ConfigError if a lookup has a name that is not a text of 1 to 255 characters."""
    if name is not None and not (isinstance(name, str) and 1 <= len(name) <= 255):
        raise ConfigError(
            f"sparse_lookup in {table!r}: name is a text of 1 to 255 characters, got {name!r}. "
            "Shorten it, or leave it out."
        )
