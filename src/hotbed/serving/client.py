# SPDX-License-Identifier: Apache-2.0
"""Client: asks a server over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.connectors.base import Memory
from hotbed.data.numbers import is_bytes, is_list
from hotbed.errors import (
    ConfigError,
    DataError,
    HotbedError,
    NotServed,
    Overloaded,
    ServingError,
    Unauthorized,
)
from hotbed.serving.request import check_columns, check_context
from hotbed.serving.server.asks import HEADER_LENGTH
from hotbed.serving.server.protocol import DTYPES, text_of
from hotbed.serving.session import Scores


class Client:
    """Asks a server over HTTP, from any number of threads. Any client of the Open Inference
    Protocol does as well.

    `url`: http:// or https://, with host and port. `token`: where the server wants one. `context`:
    for https, as `ssl` has it.

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
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"Client.url: no address of a server — received {url!r} — write http://HOST:PORT"
            )
        self._parts = parts
        self._seconds = timeout_seconds
        self._tls = context
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._idle: list[HTTPConnection] = []

    def __repr__(self) -> str:
        address = self._parts.netloc.rpartition("@")[2]  # without a password
        return f"Client('{self._parts.scheme}://{address}')"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections; the next request makes a new one."""
        while (connection := self._idled()) is not None:
            connection.close()

    def predict(
        self, model: str, columns: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> NDArray[np.float32] | dict[str, NDArray[np.float32]]:
        """Predictions of n candidates, as `InferenceSession.predict` gives them, by the version
        that is served now.

        Raises DataError for what no tensor holds, lists of several lengths for one; DataError,
        NotServed, Overloaded or Unauthorized (no token, or a wrong one) with the server's reason;
        ServingError where it does not answer.
        """
        outputs = dict(self.ask(model, columns, context).outputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def ask(
        self, model: str, columns: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Scores:
        """As `predict`, by output, and the version that answered; `late`: rows that did not reach
        the server in time.
        """
        check_columns(columns)
        check_context(context)
        tensors = sorted(_tensors(columns, context or {}), key=lambda one: -one.width)
        head = json.dumps(
            {"inputs": [one.spec for one in tensors], "parameters": {"binary_data_output": True}}
        ).encode()
        headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
        place = f"/v2/models/{quote(model, safe='')}/infer"
        body, split = self._send(
            "POST", place, b"".join([head, *(one.data for one in tensors)]), headers
        )
        answer = json.loads(body[: int(split or len(body))])
        at = int(split or 0)
        outputs = {}
        for one in answer["outputs"]:
            size = one["parameters"]["binary_data_size"]
            outputs[one["name"]], at = np.frombuffer(body[at : at + size], "<f4"), at + size
        return Scores(
            int(answer["model_version"]),
            outputs,
            int(answer.get("parameters", {}).get("late_rows", 0)),
        )

    def models(self) -> list[dict[str, str]]:
        """Name, version, state and reason of each model of the server."""
        found: list[dict[str, str]] = json.loads(
            self._send("POST", "/v2/repository/index", b"", {})[0]
        )
        return found

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[bytes, str | None]:
        while True:
            idled = self._idled()
            connection = idled or self._connect()
            try:
                connection.request(
                    method, self._parts.path.rstrip("/") + path, body, {**self._headers, **headers}
                )
                answer = connection.getresponse()
                data = answer.read()
                break
            except (OSError, HTTPException) as error:
                connection.close()
                # one that the server closed while it idled: try another
                if idled is None or isinstance(error, TimeoutError):
                    raise ServingError(
                        f"{self._parts.netloc}: no answer — received {error!r} — look at the server"
                    ) from error
        self._idle.append(connection)
        if answer.status == 200:
            return data, answer.headers.get(HEADER_LENGTH)
        raise _reason(answer.status, data)

    def _idled(self) -> HTTPConnection | None:
        """A connection that no thread uses; another one may take the last at any time."""
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


def _reason(status: int, data: bytes) -> Exception:
    try:
        text = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"the server refused — received status {status} — look at its log"
    kinds: dict[int, type[HotbedError]] = {
        400: DataError,
        401: Unauthorized,
        404: NotServed,
        429: Overloaded,
    }
    return kinds.get(status, ServingError)(text)


class _Tensor(NamedTuple):
    """`data`: of a binary tensor, else empty. `width`: bytes of a number; wide ones go first, so
    that all lie where numbers may lie.
    """

    spec: dict[str, Any]
    data: bytes
    width: int


# Arrow type -> tensor type; strings apart.
_KINDS = {pa.from_numpy_dtype(dtype): name for name, dtype in DTYPES.items()}
_VIEWS = {pa.string_view().id, pa.binary_view().id}


def _tensors(columns: Mapping[str, Any], context: Mapping[str, Any]) -> list[_Tensor]:
    """What `InferenceSession.predict` takes, and nothing else: to the server a tensor of one value
    is context.
    """
    twice = columns.keys() & context.keys()
    if twice:
        raise DataError(
            f"column {min(twice)!r}: given twice — received it for the candidates and as context "
            "— give one"
        )
    found = [_tensor(name, values) for name, values in columns.items()]
    lengths = {one.spec["shape"][0] for one in found}
    if len(lengths) != 1:
        raise DataError(
            f"columns: not one length — received {sorted(lengths)} — give each candidate a value "
            "in every column, and "
            "as context what holds for all of them"
        )
    return [*found, *(_tensor(name, _single(name, value)) for name, value in context.items())]


def _single(name: str, value: Any) -> Any:
    """One value as a column of one."""
    if isinstance(value, pa.Array) and len(value) != 1:
        raise DataError(
            f"column {name!r}: context is one value — received {len(value)} — give one, or a column"
        )
    return (
        value
        if isinstance(value, pa.Array) or (isinstance(value, np.ndarray) and value.shape == (1,))
        else [value]
    )


def _tensor(name: str, values: Any) -> _Tensor:
    """The values that an `InferenceSession` reads from a column. Raises DataError where no tensor
    holds them.
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
    kind = "BYTES" if _is_text(items.type) else _KINDS.get(items.type, "")
    if not kind:
        raise DataError(
            f"column {name!r}: no tensor — received {items.type} — give numbers, booleans or "
            "strings"
        )
    if items.null_count:  # JSON alone says that a value is missing
        given = (items.cast(pa.float32()) if kind == "FP16" else items).to_pylist()
        data = [text_of(name, value) if isinstance(value, bytes) else value for value in given]
        return _Tensor({"name": name, "datatype": kind, "shape": shape, "data": data}, b"", 0)
    if kind == "BYTES":
        texts = [
            value if isinstance(value, bytes) else value.encode() for value in items.to_pylist()
        ]
        return _binary(
            name, kind, shape, b"".join(len(text).to_bytes(4, "little") + text for text in texts), 0
        )
    numbers = items.to_numpy(zero_copy_only=False)
    return _binary(name, kind, shape, numbers.tobytes(), numbers.itemsize)


def _binary(name: str, kind: str, shape: Sequence[int], data: bytes, width: int) -> _Tensor:
    size = {"binary_data_size": len(data)}
    return _Tensor(
        {"name": name, "datatype": kind, "shape": list(shape), "parameters": size}, data, width
    )


def _array(name: str, values: Any) -> pa.Array:
    """A column as Arrow has it."""
    try:
        if isinstance(values, list):
            # the source says what is wrong, or knows another type
            with suppress(pa.ArrowException, OverflowError):
                values = pa.array(values)
        return (
            values
            if isinstance(values, pa.Array)
            else Memory({name: values}).table.column(name).combine_chunks()
        )
    except DataError:
        raise
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"column {name!r}: no values of one type — {str(error).splitlines()[0][:200]} — give "
            "numbers, booleans or "
            "strings in a list or an array"
        ) from error


def _is_text(kind: pa.DataType) -> bool:
    """Whether its tensor is of BYTES; where all values are missing, any type does."""
    return is_bytes(kind) or kind.id in _VIEWS or pa.types.is_null(kind)


def _even(name: str, lists: pa.Array) -> tuple[pa.Array, list[int]]:
    """Items of lists, and the shape of their tensor."""
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    if not len(lists):
        return lists.flatten(), [0]
    shortest = int(lengths.min())
    longest = int(lengths.max())
    if shortest != longest:
        raise DataError(
            f"column {name!r}: a tensor holds lists of one length, got {shortest} to {longest} "
            "values. "
            "Fill shorter ones with the `padding` of the Id, ask for candidates of one length "
            "together, "
            "or train on text with Split."
        )
    return lists.flatten(), [len(lists), longest]
