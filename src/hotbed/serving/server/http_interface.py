# SPDX-License-Identifier: Apache-2.0
"""The interface between an HTTP server and the application behind it."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


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
        trail: what the app follows of it; None = nothing.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    peer: str = ""
    body: bytes = b""
    is_last: bool = False
    trail: Any = None


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
        template: the path with names for its variable parts, of a route for predictions.
    """

    answer: Callable[[HttpRequest], Reply]
    body_bytes: Callable[[], int]
    template: str = ""


class App(ABC):
    """Answers the requests of an `HttpServer`."""

    @abstractmethod
    def route(self, request: HttpRequest) -> Route:
        """Return the route of a request, from its method and path."""

    @abstractmethod
    def refuse(self, request: HttpRequest) -> HttpResponse | None:
        """Return an answer that rejects a request by its headers, or None to read its body."""

    @abstractmethod
    def begin(self, request: HttpRequest, route: Route) -> None:
        """Note a request that has begun to arrive."""

    @abstractmethod
    def ended(self, request: HttpRequest, response: HttpResponse | None) -> None:
        """Note the answer that is sent to a request, None if its client has left.

        May add headers to the answer.
        """

    @abstractmethod
    def failed(self, request: HttpRequest, error: Exception) -> HttpResponse:
        """Return the answer to a request whose route, or its future, raised `error`."""


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Return an error with its reason, in the form of the Open Inference Protocol."""
    return HttpResponse(status, json.dumps({"error": reason}).encode(), headers=headers or {})
