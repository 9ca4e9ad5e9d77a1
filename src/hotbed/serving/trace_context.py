# SPDX-License-Identifier: Apache-2.0
"""W3C Trace Context: read the `traceparent` of a request, and pass it on to other servers.

Source: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
TRACERESPONSE = "traceresponse"
"""The header of an answer with the place of the server's span, as OpenTelemetry's propagator."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[ -~]{1,512}")
_FLAGS = 0b11  # sampled, and random: a header of ours has no others
_TRACER = "hotbed"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of a request in a trace.

    Attributes:
        trace_id: 32 hexadecimal digits.
        parent_id: of the caller's part of the trace, 16 hexadecimal digits.
        flags: 1 = the caller records its part.
        state: what other systems say about the trace, which is passed on as it is.
    """

    trace_id: str
    parent_id: str
    flags: int
    state: str = ""

    @property
    def header(self) -> str:
        """The value of `traceparent`."""
        return f"00-{self.trace_id}-{self.parent_id}-{self.flags & _FLAGS:02x}"


def read_trace(header: str, state: str = "") -> TraceContext | None:
    """Return what `traceparent` and `tracestate` say; None for a wrong header, as for none."""
    match = _PARENT.fullmatch(header)
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not int(trace_id, 16) or not int(parent_id, 16):
        return None
    if not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, parent_id, int(flags, 16), state)


_current = ContextVar[TraceContext | None]("hotbed_trace", default=None)


@contextmanager
def in_trace(trace: TraceContext | None) -> Iterator[None]:
    """Calls to other servers within the block belong to a trace, where no span is current."""
    before = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(before)


def trace_headers() -> Mapping[str, str]:
    """Return the headers that pass the current trace on; none if there is no trace.

    The trace is that of OpenTelemetry's current span, or else that of `in_trace`.
    """
    trace = _traced_by_program() or _current.get()
    if trace is None:
        return {}
    if not trace.state:
        return {TRACEPARENT: trace.header}
    return {TRACEPARENT: trace.header, TRACESTATE: trace.state}


@contextmanager
def outgoing_call(method: str) -> Iterator[Mapping[str, str]]:
    """Yield the headers for a gRPC call to another server.

    If a span of OpenTelemetry is current and recorded, the call is a span below it.

    Args:
        method: full name of the method, such as "hotbed.Rows/Rows".
    """
    api = _imported_api()
    if api is None or not api.get_current_span().is_recording():
        yield trace_headers()
        return
    attributes = {"rpc.system.name": "grpc", "rpc.method": method}
    tracer = api.get_tracer(_TRACER)
    with tracer.start_as_current_span(
        method, kind=api.SpanKind.CLIENT, attributes=attributes, record_exception=False
    ):
        yield trace_headers()


def _imported_api() -> Any:
    """Return OpenTelemetry's API if this process has imported it, else None."""
    return sys.modules.get("opentelemetry.trace")


def _traced_by_program() -> TraceContext | None:
    """Return the trace of the current span; None if there is none."""
    api = _imported_api()
    if api is None:
        return None
    return context_of(api.get_current_span())


def context_of(span: Any) -> TraceContext | None:
    """Return the place of a span of OpenTelemetry in its trace; None if it is in no trace."""
    place = span.get_span_context()
    if not place.is_valid:
        return None
    return TraceContext(
        format(place.trace_id, "032x"),
        format(place.span_id, "016x"),
        int(place.trace_flags),
        place.trace_state.to_header(),
    )
