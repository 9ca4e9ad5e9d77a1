# SPDX-License-Identifier: Apache-2.0
"""Send requests to a server over HTTP."""

from __future__ import annotations

import json
import ssl
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.memory import Memory
from hotbed.data.arrow_types import is_bytes, is_list, is_time
from hotbed.errors import (
    ConfigError,
    DataError,
    HotbedError,
    NotServed,
    Overloaded,
    RequestTooLarge,
    ServingError,
    Unauthorized,
)
from hotbed.serving.protocol.rest import HEADER_LENGTH
from hotbed.serving.protocol.tensors import DTYPES
from hotbed.serving.request import check_columns, check_context, single_value
from hotbed.serving.session import Scores
from hotbed.serving.trace_context import trace_headers


class Client:
    """Send requests to a server over HTTP. Safe to call from several threads.

    Any other client of the Open Inference Protocol works as well.

    Args:
        url: http:// or https://, with host and port.
        token: the token, where the server requires one.
        timeout_seconds: time limit of each operation on the connection, as in `http.client`.
        context: the `ssl.SSLContext` of https.

    Raises:
        ConfigError: `url` is not the address of a server.

    Example:
        >>> with hb.Client("http://localhost:8000") as client:
        ...     scores = client.predict("ranker", {"item": [1, 2, 3]}, context={"user": 7})
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_seconds: float = 10.0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._address = parts.netloc.rpartition("@")[2]  # without a password
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"Client.url: expected the address of a server, got "
                f"{parts._replace(netloc=self._address).geturl()!r}. "
                "Write http://HOST:PORT."
            )
        self._parts = parts
        self._seconds = timeout_seconds
        self._tls = context
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._idle: list[HTTPConnection] = []

    def __repr__(self) -> str:
        return f"Client('{self._parts.scheme}://{self._address}')"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all idle connections; the next request opens a new one."""
        while (connection := self._idled()) is not None:
            connection.close()

    def predict(
        self,
        model: str,
        columns: Mapping[str, Any],
        context: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        version: int | None = None,
    ) -> Any:
        """Return predictions of n candidates by the version that is served now.

        Args:
            model: name of the model.
            columns: as for `InferenceSession.predict`.
            context: as for `InferenceSession.predict`.
            headers: further headers, such as `x-request-id`. The trace of OpenTelemetry's current
                span is sent as `traceparent` by itself.
            version: of the versions that the server has loaded, the one that scores; None = as its
                rule says.

        Returns:
            What `InferenceSession.predict` returns.

        Raises:
            DataError: a tensor cannot hold a column, such as lists of several lengths.
            DataError, NotServed, Overloaded, Unauthorized: the server's own reason; Unauthorized
                for a missing or a wrong token.
            ServingError: the server does not answer.
        """
        scores = self.ask(model, columns, context, headers, version)
        outputs = dict(scores.outputs)
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return outputs

    def ask(
        self,
        model: str,
        columns: Mapping[str, Any],
        context: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        version: int | None = None,
    ) -> Scores:
        """Return predictions by output, the version that gave them, and the number of late rows.

        Arguments and errors are those of `predict`. `late` counts the rows that did not reach the
        server in time. `route` says why this version answered, where a rule of the server does.
        """
        check_columns(columns)
        check_context(context)
        tensors = _tensors(columns, context or {})
        tensors.sort(key=lambda tensor: -tensor.width)
        specs = [tensor.spec for tensor in tensors]
        head = {"inputs": specs, "parameters": {"binary_data_output": True}}
        parts = [json.dumps(head).encode()]
        parts += [tensor.data for tensor in tensors]
        own_headers = {
            HEADER_LENGTH: str(len(parts[0])),
            "Content-Type": "application/octet-stream",
        }
        all_headers = {**trace_headers(), **(headers or {}), **own_headers}
        versioned = "" if version is None else f"/versions/{version}"
        path = f"/v2/models/{quote(model, safe='')}{versioned}/infer"
        body, head_bytes = self._send("POST", path, b"".join(parts), all_headers)
        return _scores(body, head_bytes)

    def models(self) -> list[dict[str, str]]:
        """Return the name, version, state and reason of each model of the server."""
        body, _ = self._send("POST", "/v2/repository/index", b"", {})
        models: list[dict[str, str]] = json.loads(body)
        return models

    def status(self) -> dict[str, Any]:
        """Return what the server reports of its models, with the rule of each: GET /status."""
        body, _ = self._send("GET", "/status", b"", {})
        status: dict[str, Any] = json.loads(body)
        return status

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[bytes, int]:
        """Return the body of the answer, and the length of its JSON."""
        path = self._parts.path.rstrip("/") + path
        headers = {**self._headers, **headers}
        while True:
            idled = self._idled()
            connection = idled or self._connect()
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
                break
            except (OSError, HTTPException) as error:
                connection.close()
                # the server may have closed a connection that idled: try another one
                if idled is None or isinstance(error, TimeoutError):
                    raise ServingError(
                        f"{self._address}: the server does not answer, got {error!r}. Look at "
                        "the server's log."
                    ) from error
        self._idle.append(connection)
        if answer.status != 200:
            raise _reason(answer.status, data)
        head_bytes = answer.headers.get(HEADER_LENGTH)
        return data, int(head_bytes or len(data))

    def _idled(self) -> HTTPConnection | None:
        """Take an idle connection, None if all are in use."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connect(self) -> HTTPConnection:
        host = self._parts.hostname or ""
        port = self._parts.port
        if self._parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=self._seconds, context=self._tls)
        return HTTPConnection(host, port, timeout=self._seconds)


def _scores(body: bytes, head_bytes: int) -> Scores:
    """Return the scores of an answer: its JSON, then the values of each output."""
    head = json.loads(body[:head_bytes])
    outputs = {}
    start = head_bytes
    for output in head["outputs"]:
        end = start + output["parameters"]["binary_data_size"]
        outputs[output["name"]] = np.frombuffer(body[start:end], "<f4").reshape(output["shape"])
        start = end
    parameters = head.get("parameters", {})
    late = int(parameters.get("late_rows", 0))
    return Scores(int(head["model_version"]), outputs, late, parameters.get("route", ""))


def _reason(status: int, data: bytes) -> Exception:
    try:
        text = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"the server refused the request, got status {status}. Look at its log."
    kinds: dict[int, type[HotbedError]] = {
        400: DataError,
        401: Unauthorized,
        404: NotServed,
        413: RequestTooLarge,
        429: Overloaded,
    }
    return kinds.get(status, ServingError)(text)


class _Tensor(NamedTuple):
    """Hold a tensor of a request.

    Attributes:
        spec: its entry in the JSON header.
        data: the bytes of a binary tensor, else empty.
        width: bytes of one number. Wide tensors are sent first, so that all are aligned.
    """

    spec: dict[str, Any]
    data: bytes
    width: int


# Arrow type -> tensor type; strings are handled apart.
_KINDS = {pa.from_numpy_dtype(dtype): name for name, dtype in DTYPES.items()}
_VIEWS = {pa.string_view().id, pa.binary_view().id}


def _tensors(columns: Mapping[str, Any], context: Mapping[str, Any]) -> list[_Tensor]:
    """Return the tensors of columns and context that `InferenceSession.predict` would accept.

    Anything else is rejected here, because the server reads a tensor of one value as context.
    """
    twice = columns.keys() & context.keys()
    if twice:
        raise DataError(
            f"column {min(twice)!r}: given twice, got it for the candidates and as context. Give "
            "it once."
        )
    tensors = [_tensor(name, values) for name, values in columns.items()]
    lengths = {tensor.spec["shape"][0] for tensor in tensors}
    if len(lengths) != 1:
        raise DataError(
            f"columns: expected one length, got {sorted(lengths)}. Give each candidate a value in "
            "every column, and give values that hold for all candidates as context."
        )
    tensors.extend(_tensor(name, single_value(name, value)) for name, value in context.items())
    return tensors


def _tensor(name: str, values: Any) -> _Tensor:
    """Return the values that an `InferenceSession` reads from a column.

    Raises DataError where a tensor cannot hold them.
    """
    if type(values) is np.ndarray and values.ndim in (1, 2):
        for kind, dtype in DTYPES.items():
            if dtype == values.dtype:
                return _binary(
                    name, kind, values.shape, np.ascontiguousarray(values).tobytes(), dtype.itemsize
                )
    items = _array(name, values)
    shape = [len(items)]
    if is_list(items.type):
        items, shape = _even(name, items)
    if pa.types.is_dictionary(items.type):
        items = items.dictionary_decode()
    parameters = {}
    if is_time(items.type):
        parameters["arrow_type"] = str(items.type)
        items = items.cast(pa.int32() if items.type.bit_width == 32 else pa.int64())
    elif pa.types.is_decimal(items.type):
        items = _without_decimals(items)
    kind = "BYTES" if _is_text(items.type) else _KINDS.get(items.type, "")
    if not kind:
        raise DataError(
            f"column {name!r}: a tensor cannot hold this type, got {items.type}. Give numbers, "
            "booleans, strings or times."
        )
    if items.null_count:  # only JSON can mark a value as missing
        if kind == "FP16":
            items = items.cast(pa.float32())
        data = items.to_pylist()
        if any(isinstance(value, bytes) for value in data):
            data = [value if value is None else b64encode(value).decode() for value in data]
            parameters["content_type"] = "base64"
        spec = {"name": name, "datatype": kind, "shape": shape, "data": data}
        return _Tensor({**spec, "parameters": parameters}, b"", 0)
    if kind == "BYTES":
        return _binary(name, kind, shape, _encoded(items.to_pylist()), 0)
    numbers = items.to_numpy(zero_copy_only=False)
    return _binary(name, kind, shape, numbers.tobytes(), numbers.itemsize, parameters)


def _without_decimals(values: pa.Array) -> pa.Array:
    """Return decimals as integers where all are whole, which float64 may not hold."""
    for kind in (pa.int64(), pa.uint64()):
        with suppress(pa.ArrowInvalid):
            return values.cast(kind)
    return values.cast(pa.float64(), safe=False)


def _encoded(values: Sequence[str | bytes]) -> bytes:
    """Return strings as the data of a BYTES tensor: each after its length in 4 bytes."""
    parts = list[bytes]()
    for value in values:
        text = value.encode() if isinstance(value, str) else value
        parts.append(len(text).to_bytes(4, "little"))
        parts.append(text)
    return b"".join(parts)


def _binary(
    name: str,
    kind: str,
    shape: Sequence[int],
    data: bytes,
    width: int,
    parameters: Mapping[str, str] | None = None,
) -> _Tensor:
    all_parameters = {"binary_data_size": len(data), **(parameters or {})}
    spec = {"name": name, "datatype": kind, "shape": list(shape), "parameters": all_parameters}
    return _Tensor(spec, data, width)


def _array(name: str, values: Any) -> pa.Array:
    """Return a column as an Arrow array."""
    try:
        if isinstance(values, list):
            # on failure `Memory` names the problem, or finds another type
            with suppress(pa.ArrowException, OverflowError):
                values = pa.array(values)
        if isinstance(values, pa.Array):
            return values
        return Memory({name: values}).table.column(name).combine_chunks()
    except DataError:
        raise
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError(
            f"column {name!r}: expected values of one type, got {reason!r}. Give numbers, booleans "
            "or strings in a list or an array."
        ) from error


def _is_text(kind: pa.DataType) -> bool:
    """Return whether the tensor of this type is BYTES; so is a column of missing values alone."""
    return is_bytes(kind) or kind.id in _VIEWS or pa.types.is_null(kind)


def _even(name: str, lists: pa.Array) -> tuple[pa.Array, list[int]]:
    """Return the items of lists, and the shape of their tensor."""
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    if not len(lists):
        return lists.flatten(), [0]
    shortest = int(lengths.min())
    longest = int(lengths.max())
    if shortest != longest:
        raise DataError(
            f"column {name!r}: a tensor holds lists of one length, got {shortest} to {longest} "
            "values. Fill shorter ones with the `padding` of the Id, ask for candidates of one "
            "length together, or train on text with Split."
        )
    return lists.flatten(), [len(lists), longest]
