# SPDX-License-Identifier: Apache-2.0
"""The client of Kafka runs in a process of its own: it may end, hang or be refused, and the reader
goes on or names it.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_streams import fill, hasty, make, rows, within

from hotbed.connectors import Kafka
from hotbed.connectors.kafka.client import ClientEnded, KafkaClient
from hotbed.errors import ConfigError, DataError
from hotbed.testing import Broker


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_ends_or_hangs_is_started_again_and_no_message_is_lost(
    broker: Broker, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    topic = how.name
    broker.create(topic, 3)
    fill(broker, topic, range(900))
    source = Kafka(broker.servers, topic, block_rows=30)
    items = make(hasty(source, hang=1.0), 30).stream()
    first = within(items, 5)
    pid = source._readings[0].client.pid
    assert pid is not None
    os.kill(pid, how)
    with caplog.at_level(logging.WARNING, "hotbed.kafka"):
        rest = within(items, 25)
        while "the process of the client ended" not in caplog.text:
            next(items)
    assert sorted(row for batch in rows([*first, *rest]) for row in batch) == list(range(900))
    reason = "no answer within 1 s, so it was killed" if how == signal.SIGSTOP else how.name
    assert f"({reason})" in caplog.text


def test_a_client_that_ends_again_and_again_is_an_error(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create("again", 3)
    fill(broker, "again", range(90))
    source = hasty(Kafka(broker.servers, "again"), retry=0.01)
    items = make(source, 30).stream()
    within(items, 3)

    def consume(self: KafkaClient, count: int, seconds: float) -> None:
        raise ClientEnded("SIGSEGV")

    monkeypatch.setattr(KafkaClient, "consume", consume)
    with pytest.raises(DataError, match=r"ended 5 times in a row, got SIGSEGV. Install another"):
        within(items, 1)


def test_a_client_ends_with_its_trainer(broker: Broker) -> None:
    """A fork that lives on holds the trainer's end of the connection open."""
    code = (
        "import os, signal, sys, time\n"
        "from hotbed.connectors.kafka.client import KafkaClient\n"
        "client = KafkaClient({'bootstrap.servers': sys.argv[1], 'group.id': 'g'})\n"
        "client.request('wait', 0.0)\n"
        "fork = os.fork()\n"
        "if not fork:\n    os.close(1)\n    time.sleep(60)\n"
        "print(client.pid, fork, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, broker.servers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    client, fork = map(int, done.stdout.split())
    deadline = time.monotonic() + 30
    while _runs(client) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(fork, signal.SIGKILL)
    assert not _runs(client)


def _runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_options_that_the_client_refuses_are_named() -> None:
    source = Kafka("localhost:1", "clicks", options={"no.such.option": "1"})
    with pytest.raises(ConfigError, match=r"options: the client .* refuses them, got .*no.such"):
        within(make(source).stream(), 1)
    source = Kafka("localhost:1", "clicks", options={"oauth_cb": lambda config: ("", 0.0)})
    with pytest.raises(ConfigError, match=r"options.oauth_cb: the client .* cannot import"):
        within(make(source).stream(), 1)


def test_functions_among_the_options_are_imported_in_the_process_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time\ndef token(config):\n    return 'not a token', time.time() + 60\n"
    (tmp_path / "signing_in.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "OAUTHBEARER",
        "oauth_cb": importlib.import_module("signing_in").token,
    }
    client = KafkaClient(Kafka("localhost:1", "clicks", options=options).client_options())
    assert client.request("wait", 0.0) is None
    client.close()
