# SPDX-License-Identifier: Apache-2.0
"""The interface between an HTTP server and the application behind it."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(slots=True)
class HttpRequest:
    """A request.

    Attributes:
        method: such as GET.
        path: as received, without the query.
        headers: by name in lower case.
        peer: address of the client, or of a proxy before it.
        body: the bytes of the body.
        is_last: whether all other requests that have arrived are given to the app already.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    peer: str = ""
    body: bytes = b""
    is_last: bool = False


@dataclass(slots=True)
class HttpResponse:
    """The answer to a request. `kind`: its media type."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Reply: TypeAlias = "HttpResponse | asyncio.Future[HttpResponse]"
"""An answer, or its future, which is cancelled when the client disconnects."""


@dataclass(frozen=True, slots=True)
class Route:
    """How the requests for one path are answered.

    Attributes:
        answer: answers a complete request.
        body_bytes: returns the longest body of a request, in bytes.
    """

    answer: Callable[[HttpRequest], Reply]
    body_bytes: Callable[[], int]


class App(ABC):
    """Answers the requests of an `HttpServer`."""

    @abstractmethod
    def route(self, request: HttpRequest) -> Route:
        """Return the route of a request, from its method and path."""

    @abstractmethod
    def refuse(self, request: HttpRequest) -> HttpResponse | None:
        """Return an answer that rejects a request by its headers, or None to read its body."""

    @abstractmethod
    def failed(self, request: HttpRequest, error: Exception) -> HttpResponse:
        """Return the answer to a request whose route, or its future, raised `error`."""


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Return an error with its reason, in the form of the Open Inference Protocol."""
    return HttpResponse(status, json.dumps({"error": reason}).encode(), headers=headers or {})
