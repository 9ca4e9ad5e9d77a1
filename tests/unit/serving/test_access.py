# SPDX-License-Identifier: Apache-2.0
"""Who may make which call: tokens with roles, calls without tokens, client certificates."""

from __future__ import annotations

import http.client
import itertools
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import hotbed as hb
from hotbed.errors import ConfigError, ServingError
from hotbed.serving.server.access import ANY_ROLE, OPERATE, Caller, Tokens, denied
from hotbed.serving.server.endpoints import grpc as endpoint
from hotbed.serving.server.endpoints.grpc import MESSAGES, SERVICE

from .conftest import Running

KEYS = {
    "all-of-them": {"infer", "operate", "scrape"},
    "for-infer": {"infer"},
    "for-operate": {"operate"},
    "for-scrape": {"scrape"},
    "for-two": {"infer", "scrape"},
    "unknown": set[str](),
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


def status(running: Running, method: str, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection(running.http, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def code(running: Running, call: str, token: str = "") -> str:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    names = {"RepositoryModelLoad": "model_name", "RepositoryModelUnload": "model_name"}
    message = MESSAGES[f"{call}Request"]()
    if call == "ModelInfer":
        message.model_name = "none"
    elif call in names:
        setattr(message, names[call], "none")
    elif hasattr(message, "name"):
        message.name = "none"
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        try:
            data = message.SerializeToString()
            channel.unary_unary(f"/{SERVICE}/{call}")(data, metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


@pytest.fixture(scope="module")
def keyed(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "tokens"
    path.write_text(FILE)
    running = Running(exported, token_file=str(path))
    yield running
    running.close()


@pytest.mark.parametrize("key", KEYS)
def test_each_call_needs_a_token_of_its_role(keyed: Running, key: str) -> None:
    for (method, path), role in REST.items():
        found = status(keyed, method, path, Authorization=f"Bearer {key}")
        if not KEYS[key]:
            assert found == 401, path
        elif role and role not in KEYS[key]:
            assert found == 403, path
        else:
            assert found in (200, 404), path
    for call, role in GRPC.items():
        outcome = code(keyed, call, key)
        if not KEYS[key]:
            assert outcome == "UNAUTHENTICATED", call
        elif role and role not in KEYS[key]:
            assert outcome == "PERMISSION_DENIED", call
        else:
            assert outcome in ("OK", "NOT_FOUND"), call


def test_tokens_are_read_again_when_their_file_changes(
    keyed: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text("one infer")
    tokens = Tokens(str(path))

    def roles(token: str) -> set[str]:
        tokens._checked = 0.0  # as if a second had passed
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


@pytest.mark.parametrize("roles", ["owner", "infer,", "infer, scrape", " infer", "infer scrape"])
def test_roles_that_do_not_exist_are_rejected(tmp_path: Path, roles: str) -> None:
    (tmp_path / "tokens").write_text(f"s3cret {roles}")
    with pytest.raises(ConfigError, match="line 1") as error:
        Tokens(str(tmp_path / "tokens"))
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
    running: Running, keyed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    unload = "/v2/repository/models/none/unload"
    assert status(running, "POST", unload) == 404
    assert status(running, "POST", unload, Origin="http://evil.example") == 403
    assert status(running, "POST", unload, Origin=f"http://{running.http}") == 404
    assert status(running, "POST", unload, **{"X-Forwarded-For": "10.0.0.1"}) == 403
    key = "Bearer for-operate"
    assert status(keyed, "POST", unload, Authorization=key, Origin="http://evil.example") == 403
    assert code(running, "RepositoryModelUnload") == "NOT_FOUND"
    assert endpoint._address_of("ipv6:%5B::1%5D:5000") == "::1"
    monkeypatch.setattr(endpoint, "_address_of", lambda peer: "10.0.0.1")
    for call in ("RepositoryModelLoad", "RepositoryModelUnload"):
        assert code(running, call) == "PERMISSION_DENIED"
        assert code(keyed, call, "for-operate") == "NOT_FOUND"
    assert code(running, "RepositoryIndex") == "OK"


def test_connections_need_a_certificate_of_the_authorities(
    exported: Path, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    running = Running(exported, tls_cert=cert, tls_key=key, tls_clients=cert)
    trust = ssl.create_default_context(cafile=cert)
    for is_certified in (False, True):
        if is_certified:
            trust.load_cert_chain(cert, key)
        pair = (Path(key).read_bytes(), Path(cert).read_bytes()) if is_certified else (None, None)
        credentials = grpc.ssl_channel_credentials(Path(cert).read_bytes(), *pair)
        port = running.server.grpc_port
        with (
            hb.Client(f"https://{running.http}", context=trust) as client,
            grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel,
        ):
            live = channel.unary_unary(f"/{SERVICE}/ServerLive")
            if is_certified:
                assert client.models()[0]["name"] == "m"
                assert live(b"", timeout=10) == b"\x08\x01"
            else:
                with pytest.raises(ServingError):
                    client.models()
                with pytest.raises(grpc.RpcError):
                    live(b"", timeout=10)
    running.close()
    with pytest.raises(ConfigError, match="Give both"):
        Running(exported, tls_clients=cert)
