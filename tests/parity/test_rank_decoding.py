# SPDX-License-Identifier: Apache-2.0
"""Ranks decode the messages of a topic together: rows, order, dead letters and errors are those of
one process.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import ranks_of

import hotbed as hb
from hotbed.connectors import DeadLetters, Journal, Live
from hotbed.connectors.join.inputs import live_of
from hotbed.connectors.messages import decode_messages
from hotbed.parallel import decoding
from hotbed.parallel.connections import _sockets
from hotbed.parallel.world import world_size
from hotbed.persist import content_digest, open_checkpoint
from hotbed.testing import Broker

ROWS = 800
SCHEMA = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item"), hb.Dense("x")])
BAD = {7: b"{", 300: b'{"user": 1}{"user": 2}', 301: b"3", 600: b'{"user": "ann"}', 799: b""}
"""Messages that cannot be decoded, by their number."""


def messages() -> list[bytes]:
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 90, (ROWS, 2)).tolist()
    rows = [{"user": a, "item": b, "x": a / 7, "y": b % 2} for a, b in ids]
    every = [json.dumps(row).encode() for row in rows]
    return [BAD.get(number, value) for number, value in enumerate(every)]


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        running.create("clicks", 1)
        running.produce("clicks", messages(), 0, times=1000)
        yield running


def model_of() -> hb.RecModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = hb.models.DCNv2(SCHEMA, hb.make_tables(SCHEMA, dim=4), hidden=(8,))
    return hb.RecModel(network, "bce", "adam", {"auc"}, grains=8)


def dataset(servers: str, letters: Path, on_error: str = "skip") -> hb.Dataset:
    source = hb.sources.Kafka(servers, "clicks", block_rows=200, linger_seconds=5)
    data = hb.Dataset(source, SCHEMA, 100, on_error=on_error)
    data.live = Live(Journal(), DeadLetters(letters))
    return data


def learned(servers: str, folder: Path) -> Any:
    """Learn the topic; return the digest of the rows, and what is equal on all ranks."""
    model = model_of()
    data = dataset(servers, folder / "letters")
    history = model.online_train(data, max_steps=8, progress=False)
    model.save(folder / "state")
    dense = [parameter.tolist() for parameter in hb.dense_parameters(model.network)]
    metrics = {name: value for name, value in history.metrics.items() if "second" not in name}
    digest = content_digest(open_checkpoint(folder / "state"))
    position = {**data.position["source"], "now": 0}
    return digest, dense, metrics, position


def raised(servers: str, folder: Path) -> str:
    """Return the error of the first bad message."""
    try:
        model_of().online_train(dataset(servers, folder / "none", "raise"), progress=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def everything(servers: str, folder: str) -> Any:
    """Learn the topic by three ranks and by two of them, and meet a bad message after each."""
    shares: list[int] = []

    def counting(decoder: Any, values: Any, schema: Any) -> Any:
        shares.append(len(values))
        return decode_messages(decoder, values, schema)

    results = []
    sockets = []
    settings = {"LEAST_BYTES": 1, "OTHER_BYTES": 10, "decode_messages": counting}
    for most in (3, 2):
        with patch.multiple(decoding, MOST_RANKS=most, **settings):
            results.append(learned(servers, Path(folder, str(most))))
            gc.collect()  # errors hold frames, which hold connections
            sockets.append(len(_sockets()))
            error = raised(servers, Path(folder))
    failure = ""
    if world_size() > 1:
        fails = MemoryError("no memory") if os.environ["RANK"] == "1" else decode_messages
        with patch.multiple(decoding, LEAST_BYTES=1, decode_messages=Mock(side_effect=fails)):
            failure = raised(servers, Path(folder))
    threads = [thread.name for thread in threading.enumerate()]
    return results, error, shares, sockets, failure, threads


def test_inputs_of_a_live_join_decode_as_the_join_is_told_to() -> None:
    live = Live(decode=decode_messages)
    assert live_of(live, 1).decode is decode_messages


def test_three_ranks_decode_a_topic_to_the_bits_of_one_process(
    broker: Broker, tmp_path: Path
) -> None:
    ranks = ranks_of(everything, 3, broker.servers, str(tmp_path / "three"))
    (alone,) = ranks_of(everything, 1, broker.servers, str(tmp_path / "one"))
    letters = [(tmp_path / name / "3" / "letters").read_bytes() for name in ("one", "three")]
    assert letters[0] == letters[1]
    assert len(letters[0].splitlines()) == len(BAD)
    for results, error, shares, sockets, failure, threads in ranks:
        assert results == [alone[0][0]] * 2
        assert error == alone[1]
        assert "partition 0, offset 7: cannot be decoded (not a JSON object)" in error
        assert sum(shares[:4]) > 0
        assert sockets[0] == sockets[1]
        assert "MemoryError: no memory" in failure
        assert "hotbed-decode" not in threads
    for number in range(4):  # a block of each: the first rank takes a smaller share
        first, *others = [shares[number] for _, _, shares, *_ in ranks]
        assert 0 < first < min(others)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_wide_messages_are_shared_out_so_that_the_first_rank_has_time_for_the_rest(
    ranks: int,
) -> None:
    for size in (50, 570, 5000):
        num_bytes = np.cumsum([size] * 8000)
        shares = np.diff([0, *decoding._ends_of_shares(num_bytes, ranks)])
        assert shares.sum() == 8000
        assert np.ptp(shares[1:]) <= 2
        work = shares * size + [decoding.OTHER_BYTES * 8000, *[0] * (ranks - 1)]
        assert shares[0] == 0 or np.ptp(work) <= 2 * size
