# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of create_table and sparse_lookup."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

import torch

from hotbed import checks
from hotbed.embedding.init import Init
from hotbed.errors import ConfigError

KEY_DTYPES = (torch.int64, torch.int32)
SUMS = ("sum_gradients", "sum_gradients_and_div_by_ranksize")
"""How gradients of several ranks are summed. There is one rank, so that both are the same."""
MOST = 2**31 - 1
MOST_ROWS = 10**9
MOST_DIM = 8192
MOST_SHARDS = 8192
MOST_FACTOR = 10.0

_NAME = re.compile(r"[A-Za-z0-9_.]{1,100}")
_MERGED = "mergeable_table"


def check_name(name: object, names: Container[str]) -> None:
    """Raise ConfigError if a table cannot have this name, beside the tables `names`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"create_table: name has 1 to 100 letters, digits, underscores and dots, got {name!r}. "
            "Rename the table."
        )
    if name.startswith(_MERGED):
        raise ConfigError(
            f"create_table: names that begin with {_MERGED!r} are reserved, got the name {name!r}. "
            "Rename the table."
        )
    if name in names:
        raise ConfigError(
            f"create_table: each table has a name of its own, got the name {name!r} again. Rename "
            "the table, or look it up several times."
        )


def lanes(where: str, dim: Any) -> int:
    """Return the lanes of a row: `dim` is a number, or a shape of one dimension."""
    if isinstance(dim, Sequence) and not isinstance(dim, str) and len(dim) == 1:
        dim = dim[0]
    checks.whole_number(f"{where}: dim", dim, 1, MOST_DIM, "Give a number, or a shape of one.")
    return int(dim)


def check_initializer(where: str, initializer: object, factor: object) -> None:
    """Raise ConfigError if `initializer` is not of hotbed, or `init_param` is out of range."""
    if not isinstance(initializer, Init):
        raise ConfigError(
            f"{where}: emb_initializer must be an initializer of hotbed, got {initializer!r}. Give "
            "hb.Normal(std), hb.Uniform(scale), hb.Constant(value) or hb.Zeros()."
        )
    checks.finite_number(f"{where}: init_param", factor, least=-MOST_FACTOR, most=MOST_FACTOR)


def rows_of(
    where: str,
    device: int,
    host: int,
    ssd: int,
    *,
    grows: bool,
) -> tuple[int, int]:
    """Return the rows that are expected on the device and the host.

    In dynamic expansion (`grows`) the device has all rows, as in Rec SDK.
    """
    checks.whole_number(f"{where}: device_vocabulary_size", device, 1, MOST_ROWS)
    checks.whole_number(f"{where}: host_vocabulary_size", host, 0, MOST_ROWS)
    checks.whole_number(f"{where}: ssd_vocabulary_size", ssd, 0, MOST_ROWS)
    if grows:
        return device, 0
    if ssd > 0 and host == 0:
        raise ConfigError(
            f"{where}: ssd_vocabulary_size needs a host_vocabulary_size above 0, got {ssd} and "
            f"{host}. Give both, or neither."
        )
    if ssd > 0:
        raise ConfigError(
            f"{where}: ssd_vocabulary_size: rows of training lie in memory, and a tier on a disk "
            f"is not built, got {ssd}. Leave it out: the table grows in memory as it needs to."
        )
    return device, host


def check_padding(where: str, keys: Any, length: Any, *, masked: bool) -> None:
    """Raise ConfigError if one of the arguments of padding keys is given without the others."""
    given = [keys is not None, bool(masked), length is not None]
    if any(given) and not all(given):
        raise ConfigError(
            f"{where}: padding_keys, padding_keys_mask and padding_keys_len belong together, got "
            f"{keys!r}, {masked!r} and {length!r}. Give all three, or none."
        )


def check_lookup_name(table: str, name: object) -> None:
    """Raise ConfigError if a lookup has a name that is not a text of 1 to 255 characters."""
    if name is not None and not (isinstance(name, str) and 1 <= len(name) <= 255):
        raise ConfigError(
            f"sparse_lookup in {table!r}: name is a text of 1 to 255 characters, got {name!r}. "
            "Shorten it, or leave it out."
        )
