# SPDX-License-Identifier: Apache-2.0
"""Choose the store of rows at an address: a new kind of store is one more entry of `STORES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from hotbed.errors import ConfigError
from hotbed.files import Where
from hotbed.serving.stores.base import RowStore

Token: TypeAlias = str | Callable[[], str] | None
"""A token to send, or a function that returns it for each call; None where none is needed."""
OpenStore: TypeAlias = Callable[[str, Token, str | Path | None], RowStore]
"""Address, token to send, and PEM file of trusted certificate authorities -> the store there."""


def _open_grpc(url: str, token: Token, trusted: str | Path | None) -> RowStore:
    from hotbed.serving.stores.remote import RemoteParameterServer

    return RemoteParameterServer(url, token, trusted)


STORES: dict[str, OpenStore] = {"grpc": _open_grpc, "grpcs": _open_grpc}
"""Scheme of an address -> what opens the store there."""


def is_remote(source: Where) -> bool:
    """Return whether a model belongs to a store elsewhere: its source is SCHEME://HOST:PORT."""
    scheme, separator, _ = str(source).partition("://")
    return bool(separator) and scheme in STORES


def open_row_store(url: str, token: Token = None, trusted: str | Path | None = None) -> RowStore:
    """Open the store at an address.

    Args:
        url: grpc://HOST:PORT, or grpcs:// for TLS.
        token: the token, or a function that returns it, where the store requires one.
        trusted: a PEM file of certificate authorities for TLS, instead of those of the system.

    Raises:
        ConfigError: no store has such addresses, or `trusted` cannot be read.
    """
    open_store = STORES.get(urlsplit(url).scheme)
    if open_store is None:
        raise ConfigError(
            f"ParameterServer.connect: expected an address, got {url!r}. Write grpc://HOST:PORT, "
            "or grpcs:// for TLS."
        )
    return open_store(url, token, trusted)
