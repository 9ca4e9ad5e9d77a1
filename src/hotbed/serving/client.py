# SPDX-License-Identifier: Apache-2.0
"""Client: asks a server over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, DataError, NotServed, Overloaded, ServingError
from hotbed.serving.server.protocol import DTYPES, HEADER_LENGTH


class Client:
    """Asks a server over HTTP, from any number of threads. Any client of the Open Inference Protocol does as well.

    `url`: http:// or https://, with host and port. `token`: where the server wants one. `context`: for https, as `ssl` has it.

    Example:
        >>> with hb.Client("http://localhost:8000") as client:
        ...     scores = client.predict("ranker", {"item": [1, 2, 3]}, context={"user": 7})
    """

    def __init__(
        self, url: str, token: str | None = None, timeout_seconds: float = 10.0, context: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"Client.url: no address of a server — received {url!r} — write http://HOST:PORT")
        self._parts, self._seconds, self._tls = parts, timeout_seconds, context
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._idle: list[HTTPConnection] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections; the next request makes a new one."""
        while self._idle:
            self._idle.pop().close()

    def predict(
        self, model: str, columns: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> NDArray[np.float32] | dict[str, NDArray[np.float32]]:
        """Predictions of n candidates, as `InferenceSession.predict` gives them, by the version that is served now.

        Raises DataError, NotServed or Overloaded with the server's reason; ServingError where it does not answer.
        """
        outputs = self.ask(model, columns, context)[1]
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def ask(
        self, model: str, columns: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, NDArray[np.float32]]]:
        """As `predict`, but the version that answered, and predictions by output."""
        given = {**columns, **{name: [value] for name, value in (context or {}).items()}}
        inputs, tail = [], []
        for name, values in given.items():
            spec, data = _tensor(name, values)
            inputs.append(spec)
            tail.append(data)
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
        body, split = self._send("POST", f"/v2/models/{quote(model, safe='')}/infer", b"".join([head, *tail]), headers)
        answer, at, outputs = json.loads(body[: int(split or len(body))]), int(split or 0), {}
        for one in answer["outputs"]:
            size = one["parameters"]["binary_data_size"]
            outputs[one["name"]], at = np.frombuffer(body[at : at + size], "<f4"), at + size
        return int(answer["model_version"]), outputs

    def models(self) -> list[dict[str, str]]:
        """Name, version, state and reason of each model of the server."""
        found: list[dict[str, str]] = json.loads(self._send("POST", "/v2/repository/index", b"", {})[0])
        return found

    def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[bytes, str | None]:
        while True:
            known = bool(self._idle)
            connection = self._idle.pop() if known else self._connect()
            try:
                connection.request(method, self._parts.path.rstrip("/") + path, body, {**self._headers, **headers})
                answer = connection.getresponse()
                data = answer.read()
                break
            except (OSError, HTTPException) as error:
                connection.close()
                if not known or isinstance(
                    error, TimeoutError
                ):  # one that the server closed while it idled: try another
                    raise ServingError(
                        f"{self._parts.netloc}: no answer — received {error!r} — look at the server"
                    ) from error
        self._idle.append(connection)
        if answer.status == 200:
            return data, answer.headers.get(HEADER_LENGTH)
        raise _reason(answer.status, data)

    def _connect(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=self._seconds, context=self._tls)
        return HTTPConnection(host, port, timeout=self._seconds)


def _reason(status: int, data: bytes) -> Exception:
    try:
        text = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"the server refused — received status {status} — look at its log"
    return {400: DataError, 404: NotServed, 429: Overloaded}.get(status, ServingError)(text)


def _tensor(name: str, values: Any) -> tuple[dict[str, Any], bytes]:
    """A column as a binary tensor: how it is described, and its bytes."""
    array = np.asarray(values)
    if array.dtype.kind in "USO":
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in array.reshape(-1)]
        kind, data = "BYTES", b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    else:
        kind = next((kind for kind, dtype in DTYPES.items() if dtype == array.dtype), "")
        if not kind:
            raise DataError(f"column {name!r}: no tensor — received {array.dtype} — give numbers, booleans or strings")
        data = np.ascontiguousarray(array).tobytes()
    shape = list(array.shape)
    return {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}, data
