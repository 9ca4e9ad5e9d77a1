# SPDX-License-Identifier: Apache-2.0
"""What is said about each request: a line of the access log, a span, and its trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from hotbed.logs import FIELDS
from hotbed.serving.protocol.offered import request_id_header
from hotbed.serving.request_log.writer import RequestIds, in_sample
from hotbed.serving.server.spans import Spans
from hotbed.serving.trace_context import (
    TRACEPARENT,
    TRACERESPONSE,
    TRACESTATE,
    TraceContext,
    context_of,
    in_trace,
    read_trace,
)

log = logging.getLogger("hotbed.access")
_LENGTH = 256  # of a text of the client in a line or a span
_NOTHING = nullcontext()


@dataclass(frozen=True)
class RequestName:
    """A request as its protocol names it.

    Attributes:
        protocol: http or grpc.
        name: such as "POST /v2/models/ranker/infer" or "inference.GRPCInferenceService/ModelInfer".
        is_prediction: whether it asks for predictions.
        span_name: the name of its span.
    """

    protocol: Literal["http", "grpc"]
    name: str
    is_prediction: bool
    span_name: str


class Trails:
    """Follows the requests of a server from their begin to their end.

    Args:
        request_ids: names the requests of the access log.
        share: of the answered requests for predictions that have a line in the access log, chosen
            by a hash of the request's id. Any request that ends with an error has one. 0 = no log.
        spans: makes spans; None = there are none.
    """

    def __init__(self, request_ids: RequestIds, share: float = 0.0, spans: Spans | None = None):
        self._request_ids = request_ids
        self._share = share
        self.spans = spans
        self._is_on = bool(share) or spans is not None

    def needs(self, headers: Mapping[str, str]) -> bool:
        """Return whether something is to be said about a request with these headers."""
        return self._is_on or TRACEPARENT in headers

    def begin(
        self,
        call: RequestName,
        headers: Mapping[str, str],
        request_id: str,
        attributes: Mapping[str, Any],
    ) -> Trail:
        """Return the trail of a request that has arrived.

        A request for predictions has a span, and so has any whose caller sends its trace.

        Args:
            call: what it asks for.
            headers: by name in lower case.
            request_id: as its header says; "" = it has none.
            attributes: of its span.
        """
        trace = read_trace(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, ""))
        trail = Trail(self, call, request_id, trace)
        if self.spans is not None and (call.is_prediction or trace is not None):
            trail.span = self.spans.begin(call.span_name, trace, attributes)
            trail.trace = context_of(trail.span) or trace
        return trail

    def ended(self, trail: Trail, status: int | str, reason: str) -> None:
        """Write what a request that has ended leaves: see `Trail.ended`."""
        if trail.span is not None and self.spans is not None:
            self.spans.end(trail.span, status, trail.attributes())
        if not self._share:
            return
        if status in (200, "OK") and not (
            trail.call.is_prediction and in_sample(trail.request_id, self._share)
        ):
            return
        log.info("%s", trail.call.name[:_LENGTH], extra={FIELDS: trail.fields(status, reason)})

    def name_of(self, request_id: str) -> str:
        """Return the name of a request, a new one if it has none and the log needs one."""
        return self._request_ids.name(request_id, "")


@dataclass(slots=True)
class Trail:
    """A request that is being answered, and what is known about it so far.

    Attributes:
        trails: has begun it.
        call: what it asks for.
        request_id: its name; "" = it has none yet.
        trace: its place in a trace; None = it is in none.
        span: its span; None = it has none.
        model: name of the model; "" = none.
        version: the version that scored; None = none did.
        route: why this version scored; "" = none did.
        candidates: their number; None = they were not decoded.
        started: when it began (`time.perf_counter`).
    """

    trails: Trails
    call: RequestName
    request_id: str
    trace: TraceContext | None
    span: Any = None
    model: str = ""
    version: int | None = None
    route: str = ""
    candidates: int | None = None
    started: float = field(default_factory=time.perf_counter)

    def decoded(self, request_id: str, candidates: int) -> None:
        """Note what a request has named and asked to score."""
        self.request_id = request_id or self.request_id
        self.candidates = candidates

    def ended(self, status: int | str, reason: str = "") -> None:
        """End the span, and write the line of the access log if the request is in its sample.

        Args:
            status: of HTTP, or the name of one of gRPC.
            reason: of an error.
        """
        self.request_id = self.trails.name_of(self.request_id)
        self.trails.ended(self, status, reason)

    def answer_headers(self) -> dict[str, str]:
        """Return the headers of the answer: the name of the request, and the place of its span."""
        headers = request_id_header(self.request_id)
        if self.span is not None and self.trace is not None:
            headers[TRACERESPONSE] = self.trace.header
        return headers

    def fields(self, status: int | str, reason: str) -> dict[str, Any]:
        """Return what a line of the access log says, without what is not known."""
        milliseconds = round(1e3 * (time.perf_counter() - self.started), 3)
        trace_id = "" if self.trace is None else self.trace.trace_id
        fields = {
            "request_id": self.request_id[:_LENGTH],
            "trace_id": trace_id,
            "protocol": self.call.protocol,
            "model": self.model[:_LENGTH],
            "version": self.version,
            "route": self.route,
            "status": status,
            "candidates": self.candidates,
            "milliseconds": milliseconds,
            "reason": reason[:_LENGTH],
        }
        return {name: value for name, value in fields.items() if value not in (None, "")}

    def attributes(self) -> dict[str, Any]:
        """Return what a span says about the model, without what is not known."""
        attributes = {
            "hotbed.model": self.model[:_LENGTH],
            "hotbed.version": self.version,
            "hotbed.route": self.route,
            "hotbed.candidates": self.candidates,
            "hotbed.request_id": self.request_id[:_LENGTH],
        }
        return {name: value for name, value in attributes.items() if value not in (None, "")}


def being_scored(trails: Sequence[Trail | None]) -> AbstractContextManager[None]:
    """Return a block in which a batch of requests is scored.

    Calls to other servers within it belong to the trace of its first request that is in one.
    """
    traced = [trail for trail in trails if trail is not None and trail.trace is not None]
    if not traced:
        return _NOTHING
    spans = [trail.span for trail in traced if trail.span and trail.span.is_recording()]
    maker = traced[0].trails.spans
    if spans and maker is not None:
        return maker.scoring(spans)
    return in_trace(traced[0].trace)
