# SPDX-License-Identifier: Apache-2.0
"""The parameter server as a process of its own: the same versions and rows as in process, whatever
happens to it.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import ConfigError, NotServed, StoreError
from hotbed.persist.state.saver import Saver
from hotbed.serving.main import followed_of, serve_rows
from hotbed.serving.server.endpoints.rows_service import RowsServer
from hotbed.serving.server.options import RemoteOptions, RowsOptions
from hotbed.serving.stores.messages import CALLS, MESSAGES, SERVICE
from hotbed.serving.stores.remote import RemoteParameterServer

from .conftest import Held, OnThread, Trainer, at_once, make_certificate, wait_for


class Running(OnThread):
    """A parameter server on a free port, on a thread."""

    def __init__(self, exported: Path, **options: Any) -> None:
        self.server = hb.ParameterServer()
        self.server.load("m", exported)
        self.running = RowsServer(
            self.server, ["m"], RowsOptions(port=0, drain_seconds=1, **options)
        )
        super().__init__(self.running)
        self.address = f"127.0.0.1:{self.running.port}"
        self.store = RemoteParameterServer(f"grpc://{self.address}")

    def close(self) -> None:
        self.store.close()
        super().close()


@pytest.fixture(scope="module")
def running(exported: Path) -> Iterator[Running]:
    found = Running(exported)
    yield found
    found.close()


def table_of(store: Any) -> str:
    return next(iter(store.model("m").configs))


def test_versions_and_rows_are_those_of_the_server_in_process(running: Running) -> None:
    here, there = running.server.model("m"), running.store.model("m")
    for name in ("name", "version", "digest", "graph", "configs", "published", "learned"):
        assert getattr(here, name) == getattr(there, name), name
    assert here.schema.to_json() == there.schema.to_json()
    assert here.graph_bytes() == there.graph_bytes()
    assert {name: one.tolist() for name, one in here.weights()} == {
        name: one.tolist() for name, one in there.weights()
    }
    ids = np.array([-(2**63), -1, 0, 1, 7, 59, 10**15, 2**63 - 1])
    wanted = {name: ids[: 3 + number] for number, name in enumerate(here.configs)}
    expected, found = here.find(wanted), there.find(wanted, seconds=5)
    assert {name: rows.tolist() for name, rows in found.items()} == {
        name: rows.tolist() for name, rows in expected.items()
    }
    assert all(rows.dtype == np.float32 for rows in found.values())
    assert there.find({}) == {}
    assert running.store.model("m") is there  # nothing new: not described again
    empty = there.find({name: ids[:0] for name in here.configs})
    assert {rows.shape for rows in empty.values()} == {(0, 4)}


def test_more_rows_than_fit_a_message_come_whole_and_in_order(running: Running) -> None:
    here = running.server.model("m")
    there = replace(running.store.model("m"), answer_bytes=100)
    wanted = {name: np.arange(-5, 60 + number) for number, name in enumerate(here.configs)}
    expected, found = here.find(wanted), there.find(wanted)
    assert {name: rows.tolist() for name, rows in found.items()} == {
        name: rows.tolist() for name, rows in expected.items()
    }
    with pytest.raises(StoreError, match=r"did not arrive in time|DEADLINE"):
        there.find(wanted, seconds=0.001)


def test_changes_and_hot_ids_cross_the_wire(trainer: Trainer) -> None:
    running = Running(trainer.folder / "export")
    trainer.publish(0)
    running.server.load("m", trainer.folder / "published")
    first = running.store.model("m").digest
    trainer.publish(1)
    running.server.load("m", trainer.folder / "published")
    last = running.store.model("m").digest
    expected, found = (
        running.server.changes("m", first, last),
        running.store.changes("m", first, last),
    )
    assert expected is not None
    assert found is not None
    assert {name: ids.tolist() for name, ids in found.items()} == {
        name: ids.tolist() for name, ids in expected.items()
    }
    assert sum(len(ids) for ids in found.values()) > 20
    assert running.store.changes("m", "0" * 64, last) is None
    table = table_of(running.store)
    assert running.store.hot("m", table, 9).tolist() == running.server.hot("m", table, 9).tolist()
    running.close()


def test_many_threads_ask_one_store(running: Running) -> None:
    version, wrong = running.store.model("m"), list[Any]()
    table = table_of(running.store)
    expected = running.server.model("m").find({table: np.arange(60)})[table]

    def ask(number: int) -> None:
        for n in range(20):
            at = (number + n) % 50
            rows = version.find({table: np.arange(at, at + 10)})[table]
            if (rows != expected[at : at + 10]).any():
                wrong.append(at)

    at_once(ask, 8)
    assert not wrong


def test_missing_model_table_or_version_is_named(running: Running) -> None:
    store, version = running.store, running.store.model("m")
    with pytest.raises(NotServed, match="got 'x'"):
        store.model("x")
    with pytest.raises(NotServed, match=r"got '\.\./m'"):
        store.model("../m")
    with pytest.raises(ConfigError, match="unknown table, got 'x'"):
        version.find({"x": np.array([1])})
    with pytest.raises(ConfigError, match="unknown table, got 'x'"):
        store.hot("m", "x", 5)
    with pytest.raises(StoreError, match="version 000000000000 is no longer available"):
        store.ask("Rows", {"model": "m", "digest": "0" * 64, "wanted": []})
    for url in ("rows:8002", "http://rows:8002", "grpc://rows", "grpc://:8002", "grpc://rows:x"):
        with pytest.raises(ConfigError, match="Write grpc://HOST:PORT"):
            hb.ParameterServer.connect(url)
    gone = hb.ParameterServer.connect(f"grpc://{running.address}")
    gone.close()
    with pytest.raises(StoreError, match="closed"):
        gone.model("m")


def test_invalid_bytes_are_rejected_with_a_reason(running: Running, caplog: Any) -> None:
    draw = np.random.default_rng(0)
    codes = set()
    table = table_of(running.store)
    digest = running.store.model("m").digest
    with grpc.insecure_channel(running.address) as channel:
        for name in ("Describe", "Graph", "Weights", "Rows", "Changes", "Hot"):
            call = channel.unary_stream(f"/{SERVICE}/{name}")
            for size in (0, 1, 5, 30, 200):
                try:
                    list(call(draw.bytes(size), timeout=60))
                    codes.add("OK")
                except grpc.RpcError as error:
                    codes.add(error.code().name)
        rows = channel.unary_unary(f"/{SERVICE}/Rows", MESSAGES["RowsRequest"].SerializeToString)
        for wanted in (
            [{"table": table, "ids": b"123"}],
            [{"table": table, "ids": bytes(8 * 5_000_000)}],
        ):
            with pytest.raises(grpc.RpcError) as told:
                rows(MESSAGES["RowsRequest"](model="m", digest=digest, wanted=wanted), timeout=60)
            codes.add(told.value.code().name)
    assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE"}
    assert "a request failed" not in caplog.text


def samples(running: Running) -> dict[str, float]:
    """By name and labels."""
    with urlopen(f"http://127.0.0.1:{running.running.metrics_port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def test_metrics_report_calls_rows_and_versions(exported: Path) -> None:
    running = Running(exported, metrics_port=0)
    version = running.store.model("m")
    version.find({name: np.arange(5) for name in version.configs})
    version.find({table_of(running.store): np.arange(4000)})  # on a thread
    version.graph_bytes()
    with pytest.raises(StoreError, match="is no longer available"):
        running.store.ask("Rows", {"model": "m", "digest": "0" * 64, "wanted": []})
    with pytest.raises(NotServed):
        running.store.model("x")
    refused = 'hotbed_calls_total{call="Describe",code="NOT_FOUND"}'
    # which it is once its answer has left
    wait_for(lambda: refused in samples(running), "the last call is counted")
    found = samples(running)
    assert found['hotbed_asked_rows_total{model="m"}'] == 5 * len(version.configs) + 4000
    assert found['hotbed_calls_total{call="Rows",code="OK"}'] == 2
    assert found['hotbed_calls_total{call="Rows",code="UNAVAILABLE"}'] == 1
    assert found[refused] == 1
    assert found['hotbed_calls_total{call="Graph",code="OK"}'] == 1
    assert found['hotbed_call_seconds_bucket{call="Rows",le="+Inf"}'] == 3
    assert found['hotbed_call_seconds_sum{call="Rows"}'] > 0
    assert found['hotbed_model_version{model="m"}'] == version.version
    assert 'hotbed_model_delay_seconds{model="m"}' not in found  # since when it has it is not known
    assert not [name for name in found if '"x"' in name]  # names that are not here make no series
    running.close()


def test_metrics_report_the_freshness_of_versions(trainer: Trainer) -> None:
    running = Running(trainer.folder / "export", metrics_port=0)
    number = trainer.publish(0)
    running.running.load("m", trainer.folder / "published")
    version = running.server.model("m")
    object.__setattr__(version, "learned", running.running._service.meters.since["m"] - 90)
    found = samples(running)
    assert found['hotbed_model_version{model="m"}'] == number
    assert found['hotbed_model_freshness_seconds{model="m"}'] == pytest.approx(90)
    assert (
        found['hotbed_model_age_seconds{model="m"}']
        >= found['hotbed_model_delay_seconds{model="m"}']
        >= 0
    )
    running.server.unload("m")
    assert not [name for name in samples(running) if name.startswith("hotbed_model_")]
    with pytest.raises(ConfigError, match="metrics_port: cannot listen"):
        RowsServer(
            running.server, ["m"], RowsOptions(port=0, metrics_port=running.running.metrics_port)
        ).run()
    running.close()


def test_calls_above_the_limit_are_rejected_at_once(exported: Path) -> None:
    running = Running(exported, calls=1)
    told, digest = list[str](), running.server.model("m").digest

    def ask(number: int) -> None:
        for _ in range(60):
            try:
                assert list(running.store.stream("Graph", {"model": "m", "digest": digest}))
            except StoreError as error:
                told.append(str(error))

    at_once(ask, 6)
    assert told
    assert all("RESOURCE_EXHAUSTED" in one for one in told)

    def taken() -> bool:
        try:
            return running.store.model("m").digest == digest
        except StoreError:  # a call may end a moment after its answer has left
            return False

    wait_for(taken, "calls are taken again")
    running.close()


def test_rows_need_a_token_and_tls_encrypts_them(
    exported: Path, tmp_path: Path, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    (tmp_path / "tokens").write_text("one\ntwo\n")
    running = Running(exported, token_file=str(tmp_path / "tokens"), tls_cert=cert, tls_key=key)
    url, trusted = f"grpcs://{running.address}", cert
    for token in (None, "three", ""):
        with pytest.raises(StoreError, match=r"UNAUTHENTICATED.*no token, or a wrong one"):
            hb.ParameterServer.connect(url, token, trusted).model("m")
    assert (
        hb.ParameterServer.connect(url, "two", trusted).model("m").version
        == running.server.model("m").version
    )
    assert hb.ParameterServer.connect(url, trusted=trusted).ask("Ready", {}).ready
    with pytest.raises(StoreError, match="UNAVAILABLE"):
        hb.ParameterServer.connect(url, "two").ask("Ready", {}, 5)
    with pytest.raises(ConfigError, match="Give a PEM file"):
        hb.ParameterServer.connect(url, "two", tmp_path / "none")
    running.close()


def test_calls_need_a_certificate_of_the_authorities(
    exported: Path, certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = certificate
    running = Running(exported, tls_cert=cert, tls_key=key, tls_clients=cert)

    def code(own: tuple[str, str] | None) -> str:
        files = (None, None) if own is None else [Path(file).read_bytes() for file in reversed(own)]
        trust = grpc.ssl_channel_credentials(Path(cert).read_bytes(), *files)
        with grpc.secure_channel(running.address, trust) as channel:
            try:
                channel.unary_unary(f"/{SERVICE}/Ready")(b"", timeout=60)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    assert code(certificate) == "OK"
    assert [code(own) for own in (None, make_certificate(tmp_path))] == ["UNAVAILABLE"] * 2
    with pytest.raises(StoreError, match="UNAVAILABLE"):  # a server has none to send
        hb.ParameterServer.connect(f"grpcs://{running.address}", trusted=cert).ask("Ready", {}, 5)
    running.close()


ROLES_OF_KEYS = {"all-of-them": "any", "for-infer": "infer", "for-operate": "operate"}
ROLES_OF_KEYS |= {"for-scrape": "scrape", "unknown": "", None: ""}


@pytest.fixture(scope="module")
def keyed(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "tokens"
    lines = "all-of-them", "for-infer infer", "for-operate operate", "for-scrape scrape"
    path.write_text("\n".join(lines))
    found = Running(exported, token_file=str(path), metrics_port=0)
    yield found
    found.close()


@pytest.mark.parametrize("key", ROLES_OF_KEYS)
def test_each_call_for_rows_needs_a_token_for_infer(keyed: Running, key: str | None) -> None:
    """There is none to load or unload: the tables are those of its command and what it follows."""
    assert set(CALLS) == {
        *("Ready", "Describe", "Rows", "Graph", "Weights", "Map", "Changes", "Hot")
    }
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]

    def code(channel: grpc.Channel, method: str, is_streamed: bool) -> str:
        try:
            if is_streamed:
                list(channel.unary_stream(method)(b"", metadata=metadata, timeout=60))
            else:
                channel.unary_unary(method)(b"", metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    denied = "PERMISSION_DENIED" if ROLES_OF_KEYS[key] else "UNAUTHENTICATED"
    with grpc.insecure_channel(keyed.address) as channel:
        for name, types in CALLS.items():
            expected = "NOT_FOUND" if ROLES_OF_KEYS[key] in ("any", "infer") else denied
            if name == "Ready":
                expected = "OK"
            assert code(channel, f"/{SERVICE}/{name}", types.is_streamed) == expected, name
        assert code(channel, "/grpc.health.v1.Health/Check", False) == "OK"
        unknown = "UNIMPLEMENTED" if ROLES_OF_KEYS[key] else "UNAUTHENTICATED"
        assert code(channel, f"/{SERVICE}/Unload", False) == unknown
    assert samples(keyed)['hotbed_model_version{model="m"}'] > 0


def test_a_rotated_token_reaches_servers_that_fetch_rows(exported: Path, tmp_path: Path) -> None:
    asked, sent = tmp_path / "asked", tmp_path / "sent"
    asked.write_text("one infer\n")
    sent.write_text("one\n")
    running = Running(exported, token_file=str(asked))
    store = RemoteOptions(store_token_file=str(sent)).connect(f"grpc://{running.address}")
    version = store.model("m")
    wanted = {table_of(store): np.arange(3)}

    def rotate(asked_text: str, sent_text: str) -> None:
        asked.write_text(asked_text)
        sent.write_text(sent_text)
        time.sleep(0.6)  # files are looked at every half second
        version.find(wanted)

    rotate("two infer\none infer\n", "one\n")
    rotate("two infer\n", "two\n")
    rotate("two owner\n", "# two")  # those from before stay, on both sides
    assert list(version.weights())
    with pytest.raises(StoreError, match="UNAUTHENTICATED"):
        rotate("three\n", "two\n")
    running.close()


def test_invalid_settings_are_named_at_the_start(exported: Path, running: Running) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'calls'"):
        serve_rows([str(exported)], [], {"port": 0, "call": 4})
    with pytest.raises(ConfigError, match="unknown model, got"):
        serve_rows([f"a={exported}"], ["b=published"], {"port": 0})
    with pytest.raises(ConfigError, match="follows its parameter server"):
        followed_of(["m=published"], {"m": "grpc://rows:8002"})
    with pytest.raises(ConfigError, match="cannot listen"):
        RowsServer(running.server, ["m"], RowsOptions(port=running.running.port)).run()
    with pytest.raises(ConfigError, match="token_file: cannot be read"):
        RowsServer(running.server, ["m"], RowsOptions(port=0, token_file="none"))
    with pytest.raises(ConfigError, match="Give both"):
        RowsServer(running.server, ["m"], RowsOptions(port=0, tls_cert="cert"))


# --- as a process, killed and stopped -------------------------------------------------------------


@pytest.mark.slow
def test_lost_parameter_server_costs_a_deadline_and_is_found_again(
    trainer: Trainer, tmp_path: Path
) -> None:
    source = (f"m={trainer.folder / 'export'}", "--watch", trainer.folder / "published")
    server = Held(tmp_path / "rows", *source)
    store = RemoteParameterServer(f"grpc://127.0.0.1:{server.port}")
    version = trainer.publish(0)
    wait_for(lambda: store.model("m").version == version, "the version is there")
    held, table = store.model("m"), table_of(store)
    expected = held.find({table: np.arange(9)})[table]

    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreError, match="DEADLINE_EXCEEDED"):
        held.find({table: np.arange(9)}, seconds=0.2)
    server.process.send_signal(signal.SIGCONT)
    assert (held.find({table: np.arange(9)}, seconds=60)[table] == expected).all()

    server.stop(signal.SIGKILL)
    with pytest.raises(StoreError, match="UNAVAILABLE"):
        held.find({table: np.arange(9)}, seconds=5)
    again = Held(tmp_path / "rows", *source, port=server.port)
    wait_for(lambda: answers(held, table), "the same store asks the new process")
    # of the same version, without a load
    assert (held.find({table: np.arange(9)})[table] == expected).all()
    assert store.model("m") is held
    assert again.stop() == 0
    assert again.told("stopped")


def answers(version: Any, table: str) -> bool:
    try:
        version.find({table: np.arange(9)}, seconds=1)
    except StoreError:
        return False
    return True


@pytest.mark.slow
def test_gaps_forks_and_torn_versions_keep_the_version_until_the_next_full(
    trainer: Trainer, tmp_path: Path
) -> None:
    server = Held(
        tmp_path / "rows", f"m={trainer.folder / 'export'}", "--watch", trainer.folder / "published"
    )
    store = RemoteParameterServer(f"grpc://127.0.0.1:{server.port}")
    first = trainer.publish(0)
    wait_for(lambda: store.model("m").version == first, "the first version")

    server.process.send_signal(signal.SIGSTOP)  # torn before it is read
    trainer.publish(1)
    part = trainer.tear()
    server.process.send_signal(signal.SIGCONT)
    wait_for(lambda: server.told(f"{part}: torn"), "it names the file")
    assert store.model("m").version == first

    last = trainer.publish(2, full=True)
    wait_for(lambda: store.model("m").version == last, "the full recovers")

    server.process.send_signal(signal.SIGSTOP)
    trainer.publish(3)
    missing = trainer.newest
    trainer.publish(4)
    shutil.rmtree(missing)
    server.process.send_signal(signal.SIGCONT)
    wait_for(lambda: server.told("cannot be read with its chain"), "the gap is told")
    assert store.model("m").version == last
    last = trainer.publish(5, full=True)
    wait_for(lambda: store.model("m").version == last, "the full recovers")

    trainer.saver = Saver(tmp_path / "other run")
    last = trainer.publish(6)
    wait_for(lambda: store.model("m").version == last, "the full of a fork is taken")
    assert server.stop() == 0
