# SPDX-License-Identifier: Apache-2.0
"""Client: asks a server over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, DataError, NotServed, Overloaded, ServingError
from hotbed.serving.server.protocol import DTYPES, HEADER_LENGTH
from hotbed.serving.session import Scores


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
        outputs = dict(self.ask(model, columns, context).outputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def ask(self, model: str, columns: Mapping[str, Any], context: Mapping[str, Any] | None = None) -> Scores:
        """As `predict`, by output, and the version that answered; `late`: rows that did not reach the server in time."""
        given = {**columns, **{name: [value] for name, value in (context or {}).items()}}
        tensors = sorted((_tensor(name, values) for name, values in given.items()), key=lambda one: -one.width)
        head = json.dumps(
            {"inputs": [one.spec for one in tensors], "parameters": {"binary_data_output": True}}
        ).encode()
        headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
        place = f"/v2/models/{quote(model, safe='')}/infer"
        body, split = self._send("POST", place, b"".join([head, *(one.data for one in tensors)]), headers)
        answer, at, outputs = json.loads(body[: int(split or len(body))]), int(split or 0), {}
        for one in answer["outputs"]:
            size = one["parameters"]["binary_data_size"]
            outputs[one["name"]], at = np.frombuffer(body[at : at + size], "<f4"), at + size
        return Scores(int(answer["model_version"]), outputs, int(answer.get("parameters", {}).get("late_rows", 0)))

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


class _Tensor(NamedTuple):
    """A binary tensor. `width`: bytes of a number; wide ones go first, so that all lie where numbers may lie."""

    spec: dict[str, Any]
    data: bytes
    width: int


def _tensor(name: str, values: Any) -> _Tensor:
    array = np.asarray(values)
    if array.dtype.kind in "USO":
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in array.reshape(-1)]
        kind, data, width = "BYTES", b"".join(len(text).to_bytes(4, "little") + text for text in texts), 0
    else:
        kind = next((kind for kind, dtype in DTYPES.items() if dtype == array.dtype), "")
        if not kind:
            raise DataError(f"column {name!r}: no tensor — received {array.dtype} — give numbers, booleans or strings")
        data, width = np.ascontiguousarray(array).tobytes(), array.dtype.itemsize
    shape, size = list(array.shape), {"binary_data_size": len(data)}
    return _Tensor({"name": name, "datatype": kind, "shape": shape, "parameters": size}, data, width)
