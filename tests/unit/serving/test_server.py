# SPDX-License-Identifier: Apache-2.0
"""What a server does besides answering: it starts, follows, keeps what it has, lets in who may, and
stops without harm.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import ConfigError, HotbedError, ServingError
from hotbed.serving.main import serve_models
from hotbed.serving.server.options import Options, ServerLimits
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.server import Server
from hotbed.serving.server.tokens import read_tokens

from .conftest import Process, Running, at_once, draw, stopped_under_load, wait_for


def test_requests_of_many_clients_are_scored_together_with_the_scores_of_each_alone(
    exported: Path, session: Any
) -> None:
    running = Running(exported, ServerLimits(batch_seconds=0.2, batch_rows=400), grpc_port=None)
    found = dict[int, Any]()

    def one(number: int) -> None:
        columns = draw(10 + number, number)
        context = {}
        if number % 2:
            columns.pop("user")
            context = {"user": number}
        with hb.Client(f"http://{running.http}") as client:
            found[number] = np.abs(
                client.predict("m", columns, context) - session.predict(columns, context)
            ).max()

    at_once(one, 12)
    assert len(found) == 12
    assert max(found.values()) < 1e-6
    assert running.models.named("m").batches < 12
    running.close()


def test_a_version_scores_samples_before_it_answers(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(hb.ParameterServer())
    scored = list[tuple[bool, int]]()
    ask = hb.InferenceSession.ask

    def asked(session: hb.InferenceSession, columns: Any, *others: Any) -> Any:
        served = models.named("m").served
        scored.append((served is not None and served.session is session, len(columns["item"])))
        return ask(session, columns, *others)

    monkeypatch.setattr(hb.InferenceSession, "ask", asked)
    models.add("m", exported)
    assert scored == [(False, 1)]  # a candidate of zeros
    running = Running(exported, models=models)
    with hb.Client(f"http://{running.http}") as client:
        client.predict("m", draw(7, 0))
        models.load("m")
        client.predict("m", draw(5, 0))
    running.close()
    assert scored[1:] == [(True, 7), (False, 7), (True, 5)]


@pytest.mark.filterwarnings("ignore:table .* is fed both")
def test_a_wrong_request_spoils_none_that_is_scored_with_it(exported: Path, session: Any) -> None:
    running = Running(exported, ServerLimits(batch_seconds=0.3), grpc_port=None)
    outcomes = dict[int, Any]()
    columns = draw(5, 3)
    wrong = {**columns, "price": np.array([np.nan] * 5, np.float32)}

    def one(number: int) -> None:
        with hb.Client(f"http://{running.http}") as client:
            try:
                outcomes[number] = client.predict("m", columns if number else wrong)
            except HotbedError as error:
                outcomes[number] = error

    at_once(one, 4)
    assert isinstance(outcomes[0], HotbedError)
    assert all(
        np.abs(outcomes[number] - session.predict(columns)).max() < 1e-6 for number in (1, 2, 3)
    )
    running.close()


def test_a_client_that_disconnects_does_not_affect_others(running: Running) -> None:
    for _ in range(20):
        connection = http.client.HTTPConnection(running.http, timeout=60)
        connection.putrequest("POST", "/v2/models/m/infer")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"{")
        connection.close()
    with hb.Client(f"http://{running.http}") as client:
        assert client.predict("m", draw(3, 1)).shape == (3,)


def test_requests_without_a_valid_token_are_rejected(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\ntwo\n")
    running = Running(exported, token_file=str(tmp_path / "tokens"))
    for token in (None, "three", "", "tw", "one two"):
        with (
            hb.Client(f"http://{running.http}", token) as client,
            pytest.raises(ServingError, match="no token, or a wrong one"),
        ):
            client.predict("m", draw(3, 1))
    for token in ("one", "two"):
        with hb.Client(f"http://{running.http}", token) as client:
            assert client.predict("m", draw(3, 1)).shape == (3,)
    status = {}
    for path, headers in [
        ("/v2/health/ready", {}),
        ("/", {}),
        ("/metrics", {}),
        ("/status", {"Authorization": "Basic dTp0d28="}),
    ]:
        connection = http.client.HTTPConnection(running.http, timeout=60)
        connection.request("GET", path, headers=headers)
        status[path] = connection.getresponse().status
        connection.close()
    assert status == {"/v2/health/ready": 200, "/": 401, "/metrics": 401, "/status": 200}
    codes = []
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        for method, token in [
            ("ServerLive", ""),
            ("ServerMetadata", ""),
            ("ServerMetadata", "Bearer x"),
            ("ServerMetadata", "Bearer two"),
        ]:
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            try:
                call(b"", metadata=[("authorization", token)] if token else [], timeout=60)
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
    assert codes == ["OK", "UNAUTHENTICATED", "UNAUTHENTICATED", "OK"]
    running.close()


@pytest.mark.parametrize(
    "text, problem",
    [
        ("# prod team token\ns3cret-A\n", "a comment, .* line 1"),
        ("s3cret-A\n\ns3cret-B\n", "a blank line, .* line 2"),
        ("s3cret-A\ns3cret B with space\n", "a line with a blank in it, .* line 2"),
        ("s3cret-A \n", "a line with a blank in it, .* line 1"),
        ("\ufeffs3cret-A\n", "a character outside ASCII, .* line 1"),  # as Windows editors write
    ],
)
def test_token_file_with_a_line_that_is_not_a_token_is_rejected(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match=f"token_file: not a token, got {problem}") as error:
        read_tokens(str(tmp_path / "tokens"))
    assert "s3cret" not in str(error.value)


def test_over_tls_scores_are_the_same(
    exported: Path, session: Any, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    running = Running(exported, tls_cert=cert, tls_key=key)
    trust = ssl.create_default_context(cafile=cert)
    with hb.Client(f"https://{running.http}", context=trust) as client:
        assert np.abs(client.predict("m", draw(9, 1)) - session.predict(draw(9, 1))).max() < 1e-6
    secure = grpc.ssl_channel_credentials(Path(cert).read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{running.server.grpc_port}", secure) as channel:
        assert (
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
            == b"\x08\x01"
        )
    running.close()


def test_a_server_that_cannot_start_names_the_wrong_setting(
    exported: Path, tmp_path: Path, running: Running
) -> None:
    models = Models(hb.ParameterServer())
    with pytest.raises(ConfigError, match="cannot listen"):
        Server(models, Options(port=running.server.port))
    with pytest.raises(ConfigError, match="token_file: cannot be read"):
        Server(models, Options(port=0, token_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="token_file: the file holds no token"):
        Server(models, Options(port=0, token_file=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match="Give both"):
        Server(models, Options(port=0, tls_cert="cert"))
    with pytest.raises(ConfigError, match="TLS cannot start"):
        Server(models, Options(port=0, tls_cert="cert", tls_key="key"))
    with pytest.raises(ConfigError, match="Did you mean 'batch_rows'"):
        serve_models([str(exported)], [], {"port": 0, "batch_row": 4})
    with pytest.raises(ConfigError, match="unknown model, got"):
        serve_models([f"a={exported}"], ["b=published"], {"port": 0})
    with pytest.raises(ConfigError, match="expected a name for a URL"):
        models.add("a/b", exported)


def test_the_page_runs_no_script_but_its_own(running: Running) -> None:
    connection = http.client.HTTPConnection(running.http, timeout=60)
    connection.request("GET", "/")
    answer = connection.getresponse()
    policy, page = answer.headers["content-security-policy"], answer.read().decode()
    connection.close()
    nonce = re.search(r"'nonce-([\w-]+)'", policy).group(1)
    assert "default-src 'none'" in policy
    assert page.count("<script") == page.count(f'<script nonce="{nonce}">') == 1
    assert "innerHTML" not in page


@pytest.mark.slow
def test_the_page_shows_a_model_and_trusts_no_name_or_reason(
    exported: Path, browsed: Callable[[str, int], str]
) -> None:
    running, name = Running(exported, grpc_port=None), "<img src=x onerror=document.title=1>"
    running.models.add(name, exported)
    running.models.named(name).problem = "<b>a gap</b>"
    page = browsed(f"http://{running.http}/", 3_000)
    assert page.count("<h2>") == 2
    assert "&lt;img src=x" in page
    assert "&lt;b&gt;a gap" in page
    assert "<img" not in page
    assert "<polyline" in page
    running.close()


def test_idle_connections_and_their_end_cost_nobody_an_answer(running: Running) -> None:
    idle = [http.client.HTTPConnection(running.http, timeout=60) for _ in range(300)]
    for connection in idle:
        connection.connect()
    with hb.Client(f"http://{running.http}") as client:
        assert client.predict("m", draw(3, 1)).shape == (3,)
        for connection in idle:
            connection.close()
        assert client.predict("m", draw(3, 1)).shape == (3,)


@pytest.mark.slow
def test_sigterm_under_load_finishes_requests_then_ends(exported: Path, session: Any) -> None:
    server = Process(f"m={exported}", "--set", "drain_seconds=0.5")
    columns = draw(20, 4)
    stopped_under_load(server, columns, session.predict(columns))
    told = [json.loads(line)["message"] for line in server.lines]
    assert told.index("draining") < told.index("stopped")


@pytest.mark.slow
def test_a_stopping_server_says_that_it_is_not_ready_while_it_answers(exported: Path) -> None:
    server = Process(f"m={exported}", "--set", "drain_seconds=3")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: any("draining" in line for line in server.lines), "it drains")
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("GET", "/v2/health/ready")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["connection"]) == (503, "close")
    connection.close()
    with hb.Client(f"http://{server.http}") as client:
        assert client.predict("m", draw(3, 1)).shape == (3,)
    assert server.stop() == 0
