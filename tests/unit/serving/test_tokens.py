# SPDX-License-Identifier: Apache-2.0
"""Who may make which call: tokens with roles, calls without tokens, client certificates."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.serving.server.endpoints import relay
from hotbed.serving.server.endpoints.grpc import MESSAGES, SERVICE
from hotbed.serving.server.tokens import (
    ANY_ROLE,
    OPERATE,
    Caller,
    RereadFile,
    Roles,
    Tokens,
    denied,
    read_roles,
)

from .conftest import Running, Workers, make_certificate, paused, wait_for

KEYS = {
    "all-of-them": {"infer", "operate", "scrape"},
    "for-infer": {"infer"},
    "for-operate": {"operate"},
    "for-scrape": {"scrape"},
    "for-two": {"infer", "scrape"},
    "unknown": set[str](),
    "": set[str](),
}
FILE = """all-of-them
for-infer infer
for-operate operate
for-scrape scrape
for-two infer,scrape
"""
# a call that is allowed has an answer, or finds no model of that name
REST = {
    ("POST", "/v2/models/none/infer"): "infer",
    ("POST", "/v2/models/none/versions/1/infer"): "infer",
    ("POST", "/v2/repository/models/none/load"): "operate",
    ("POST", "/v2/repository/models/none/unload"): "operate",
    ("GET", "/metrics"): "scrape",
    ("GET", "/status"): "scrape",
    ("GET", "/v2/models/m/stats"): "scrape",
    ("GET", "/v2/models/stats"): "scrape",
    ("GET", "/"): "scrape",
    ("GET", "/v2/models/m"): "",
    ("POST", "/v2/repository/index"): "",
    ("GET", "/v2/models/m/ready"): "",
}
GRPC = {
    "ModelInfer": "infer",
    "RepositoryModelLoad": "operate",
    "RepositoryModelUnload": "operate",
    "ModelStatistics": "scrape",
    "ModelMetadata": "",
    "RepositoryIndex": "",
}


class Door:
    """Calls of a server, with TLS where there is a certificate to send."""

    def __init__(
        self, server: Running | Workers, tls: tuple[str, str] | None = None, trusted: str = ""
    ) -> None:
        self.server = server
        self._trust: ssl.SSLContext | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        if trusted:
            self._trust = ssl.create_default_context(cafile=trusted)
            pair: list[bytes | None] = [None, None]
            if tls is not None:
                self._trust.load_cert_chain(*tls)
                pair = [Path(tls[1]).read_bytes(), Path(tls[0]).read_bytes()]
            self._credentials = grpc.ssl_channel_credentials(Path(trusted).read_bytes(), *pair)

    def status(self, method: str, path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(self.server.http, timeout=30)
        if self._trust is not None:
            connection = http.client.HTTPSConnection(
                self.server.http, timeout=30, context=self._trust
            )
        try:
            connection.request(method, path, headers=headers)
            return connection.getresponse().status
        finally:
            connection.close()

    def infer(self, token: str) -> int:
        """404 for a valid token: there is no such model."""
        return self.status("POST", "/v2/models/none/infer", Authorization=f"Bearer {token}")

    def code(self, call: str, token: str = "", **metadata: str) -> str:
        if token:
            metadata["authorization"] = f"Bearer {token}"
        message = MESSAGES[f"{call}Request"]()
        for field in ("model_name", "name"):
            if field in message.DESCRIPTOR.fields_by_name:
                setattr(message, field, "none")
        channel = grpc.insecure_channel(self.server.grpc)
        if self._credentials is not None:
            channel = grpc.secure_channel(self.server.grpc, self._credentials)
        pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        with channel:
            try:
                data = message.SerializeToString()
                channel.unary_unary(f"/{SERVICE}/{call}")(data, metadata=pairs, timeout=60)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"


@pytest.fixture(scope="module")
def arguments(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[str, str]
) -> dict[str, str]:
    cert, key = certificate
    path = tmp_path_factory.mktemp("keys") / "tokens"
    path.write_text(FILE)
    return {"token_file": str(path), "tls_cert": cert, "tls_key": key, "tls_clients": cert}


@pytest.fixture(scope="module")
def keyed(
    exported: Path, arguments: dict[str, str], certificate: tuple[str, str]
) -> Iterator[Door]:
    running = Running(exported, **arguments)
    yield Door(running, certificate, certificate[0])
    running.close()


@pytest.fixture(scope="module")
def workers(
    exported: Path, arguments: dict[str, str], certificate: tuple[str, str]
) -> Iterator[Door]:
    """Two processes with the same settings."""
    settings = [f"--set={key}={value}" for key, value in arguments.items()]
    server = Workers(f"m={exported}", *settings, "--set", "drain_seconds=0")
    Workers.started.remove(server)  # it outlives its first test
    yield Door(server, certificate, certificate[0])
    assert server.stop() == 0


@pytest.fixture(scope="module", params=["keyed", pytest.param("workers", marks=pytest.mark.slow)])
def door(request: pytest.FixtureRequest) -> Door:
    found: Door = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("key", KEYS)
def test_each_call_needs_a_token_of_its_role(door: Door, key: str) -> None:
    for (method, path), role in REST.items():
        found = door.status(method, path, Authorization=f"Bearer {key}")
        if not KEYS[key]:
            assert found == 401, path
        elif role and role not in KEYS[key]:
            assert found == 403, path
        else:
            assert found in (200, 404), path
    for call, role in GRPC.items():
        outcome = door.code(call, key)
        if not KEYS[key]:
            assert outcome == "UNAUTHENTICATED", call
        elif role and role not in KEYS[key]:
            assert outcome == "PERMISSION_DENIED", call
        else:
            assert outcome in ("OK", "NOT_FOUND"), call
    assert door.status("GET", "/v2/health/live") == 200
    assert door.code("ServerLive") == "OK"


def test_tokens_are_read_again_when_their_file_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text("one infer")
    tokens = Tokens(RereadFile(str(path), read_roles, check_seconds=0).content)

    def roles(token: str) -> set[str]:
        return set(tokens.roles(f"Bearer {token}"))

    assert roles("one") == {"infer"}
    path.write_text("two\none scrape\n")
    assert (roles("one"), roles("two")) == ({"scrape"}, {"infer", "operate", "scrape"})
    for text in ("", "two owner", "# two"):
        path.write_text(text)
        assert roles("one") == {"scrape"}
    path.unlink()
    assert roles("one") == {"scrape"}
    assert "stay" in caplog.text
    assert "two" not in caplog.text
    path.write_text("two")
    assert (roles("one"), roles("two")) == (set(), {"infer", "operate", "scrape"})


def test_tokens_that_could_not_be_read_for_a_while_are_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their file has not changed since: permissions, or no more files that may be opened."""
    path = tmp_path / "tokens"
    path.write_text("one")
    is_away = False

    def read(path: str) -> Roles:
        if is_away:
            raise ConfigError("no more files")
        return read_roles(path)

    tokens = Tokens(RereadFile(str(path), read, check_seconds=0).content)
    is_away = True
    path.write_text("two")
    for _ in range(3):
        assert tokens.roles("Bearer one")
    assert caplog.text.count("no more files") == 1
    is_away = False
    assert tokens.roles("Bearer two")
    assert not tokens.roles("Bearer one")


@pytest.mark.parametrize("roles", ["owner", "infer,", "infer, scrape", " infer", "infer scrape"])
def test_roles_that_do_not_exist_are_rejected(tmp_path: Path, roles: str) -> None:
    (tmp_path / "tokens").write_text(f"s3cret {roles}")
    with pytest.raises(ConfigError, match="line 1") as error:
        RereadFile(str(tmp_path / "tokens"), read_roles)
    assert "s3cret" not in str(error.value)


LOCAL = ["127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"]
REMOTE = ["10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", ""]


@pytest.mark.parametrize(("peer", "is_local"), [(p, p in LOCAL) for p in LOCAL + REMOTE])
def test_without_tokens_the_machine_itself_operates_the_server(peer: str, is_local: bool) -> None:
    assert denied(None, ANY_ROLE, Caller(None, peer)) is None
    assert (denied(None, OPERATE, Caller(None, peer)) is None) is is_local
    assert denied(None, OPERATE, Caller(None, peer, is_forwarded=True)) is not None
    own = Caller(None, peer, "http://localhost:8000", "localhost:8000")
    assert (denied(None, OPERATE, own) is None) is is_local
    for origin, host in itertools.product(
        ["http://evil.example", "null", "http://localhost:9", "http://evil.example:8000"],
        ["localhost:8000", "evil.example:8000"],  # a name that was made to lead here
    ):
        assert denied(None, OPERATE, Caller(None, peer, origin, host)) is not None


def test_pages_of_other_sites_and_other_machines_operate_no_server(
    running: Running, keyed: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    unload = "/v2/repository/models/none/unload"
    open_door = Door(running)
    assert open_door.status("POST", unload) == 404
    assert open_door.status("POST", unload, Origin="http://evil.example") == 403
    assert open_door.status("POST", unload, Origin=f"http://{running.http}") == 404
    key = "Bearer for-operate"
    for origin in ("http://evil.example", "null"):
        assert keyed.status("POST", unload, Authorization=key, Origin=origin) == 403
        for call in (
            "RepositoryModelLoad",
            "RepositoryModelUnload",
        ):  # a proxy of gRPC-Web sends it
            assert open_door.code(call, origin=origin) == "PERMISSION_DENIED"
            assert keyed.code(call, "for-operate", origin=origin) == "PERMISSION_DENIED"
    for header in ("Forwarded", "X_Forwarded_For", "X_Real_IP"):
        forwarded = {header.replace("_", "-"): "10.0.0.1"}
        assert open_door.status("POST", unload, **forwarded) == 403
        assert keyed.status("POST", unload, Authorization=key, **forwarded) == 404
        metadata = {header.lower(): "10.0.0.1"}
        assert open_door.code("RepositoryModelUnload", **metadata) == "PERMISSION_DENIED"
        assert keyed.code("RepositoryModelUnload", "for-operate", **metadata) == "NOT_FOUND"
    assert open_door.code("RepositoryModelUnload") == "NOT_FOUND"
    elsewhere = property(lambda client: "10.0.0.1", lambda client, host: None)
    monkeypatch.setattr(relay._Outer, "host", elsewhere, raising=False)
    for call in ("RepositoryModelLoad", "RepositoryModelUnload"):
        assert open_door.code(call) == "PERMISSION_DENIED"
        assert keyed.code(call, "for-operate") == "NOT_FOUND"
    assert open_door.code("RepositoryIndex") == "OK"


def test_connections_need_a_certificate_of_the_authorities(
    door: Door, exported: Path, certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, _ = certificate
    with hb.Client(f"https://{door.server.http}", "for-infer", context=door._trust) as client:
        assert client.models()[0]["name"] == "m"
    for own in (None, make_certificate(tmp_path)):
        stranger = Door(door.server, own, trusted=cert)
        for _ in range(4):  # of whichever worker takes the connection
            with pytest.raises(OSError):
                stranger.status("GET", "/v2/health/live")
            assert stranger.code("ServerLive") == "UNAVAILABLE"
    with pytest.raises(ConfigError, match="Give both"):
        Running(exported, tls_clients=cert)


@pytest.mark.slow
def test_every_worker_reads_tokens_again_and_keeps_those_of_before_a_wrong_file(
    workers: Door, arguments: dict[str, str]
) -> None:
    server, path = workers.server, Path(arguments["token_file"])
    assert isinstance(server, Workers)

    def each_worker() -> Iterator[int]:
        for worker in server.children:
            with paused([other for other in server.children if other != worker]):
                yield worker

    def each_has_rotated() -> None:
        for _ in each_worker():
            wait_for(lambda: workers.infer("for-infer") == 401, "the old token is rejected")
            assert workers.infer("new") == 404
        for _ in range(6):  # connections of gRPC are spread over the workers
            assert workers.code("ModelInfer", "for-infer") == "UNAUTHENTICATED"
            assert workers.code("ModelInfer", "new") == "NOT_FOUND"
            assert workers.code("RepositoryModelUnload", "new") == "PERMISSION_DENIED"

    (path.parent / "next").write_text("new infer\n")
    (path.parent / "next").replace(path)
    each_has_rotated()
    (path.parent / "next").write_text("new owner\n")
    (path.parent / "next").replace(path)

    def is_reported() -> bool:
        assert workers.infer("new") == 404
        lines = [line for line in server.lines if "The tokens from before stay" in line]
        return len(lines) == 1  # of the parent

    wait_for(is_reported, "the wrong file is reported")
    each_has_rotated()
    before = server.children
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: len(set(server.children) - {before[0]}) == 2, "it is started again")
    each_has_rotated()
    path.write_text(FILE)  # as it was for the other tests
    for _ in each_worker():
        wait_for(lambda: workers.infer("new") == 401, "a file that is right again is read")
        assert workers.infer("for-infer") == 404
