# SPDX-License-Identifier: Apache-2.0
"""A store of rows is chosen by the scheme of its address, in one place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.serving.stores import opening
from hotbed.serving.stores.base import RowStore
from hotbed.testing import FakeStore


def test_store_of_another_scheme_is_one_more_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore({"t": {"name": "t", "dim": 1}})
    store.publish({"t": {7: [3.0]}})
    calls = []

    def open_fake(url: str, token: str | None, trusted: str | Path | None) -> RowStore:
        calls.append((url, token, trusted))
        return store

    monkeypatch.setitem(opening.STORES, "fake", open_fake)
    opened = hb.ParameterServer.connect("fake://rows:1", "secret", trusted="ca.pem")
    assert opened.model("m").find({"t": np.array([7])})["t"].tolist() == [[3.0]]
    assert calls == [("fake://rows:1", "secret", "ca.pem")]
    assert opening.is_remote("fake://rows:1/ranker")


@pytest.mark.parametrize("source", ["exported", "./grpc", "s3://bucket/model", Path("/tmp/grpc:")])
def test_folders_and_buckets_are_not_remote(source: str | Path) -> None:
    assert not opening.is_remote(source)


def test_address_without_a_store_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected an address, got 'http://rows:1'\. Write grpc"):
        hb.ParameterServer.connect("http://rows:1")
