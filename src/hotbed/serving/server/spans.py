# SPDX-License-Identifier: Apache-2.0
"""Spans of OpenTelemetry, where variables of the environment, or the program, ask for them.

Only this file and `trace_context.py` know OpenTelemetry. Needs the extra `tracing`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from typing import Any

from hotbed.errors import ConfigError
from hotbed.serving.threads import DaemonThreads
from hotbed.serving.trace_context import TRACEPARENT, TRACESTATE, TraceContext

log = logging.getLogger("hotbed.serving")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = "opentelemetry_traces_exporter"  # the entry points of exporters
_SERVICE = "service.name"
_NO_SERVICE = "unknown_service"  # how the library's name begins where the environment has none
_CLOSE_SECONDS = 5.0  # for the last spans to be sent
_HTTP_FAULT = 500  # from this status on, the server is at fault
_GRPC_FAULTS = {
    "UNKNOWN",
    "DEADLINE_EXCEEDED",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
}


class Spans:
    """Makes the spans of a server.

    Args:
        provider: OpenTelemetry's provider of tracers.
        is_own: whether the server has configured the provider, and shuts it down.
    """

    def __init__(self, provider: Any, *, is_own: bool) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer("hotbed")
        self._is_own = is_own

    def begin(self, name: str, trace: TraceContext | None, attributes: Mapping[str, Any]) -> Any:
        """Begin the span of a request, below that of its caller."""
        above = None
        if trace is not None:
            above = self._propagator.extract(
                {TRACEPARENT: trace.header, TRACESTATE: trace.state or ""}
            )
        kind = self._api.SpanKind.SERVER
        return self._tracer.start_span(name, above, kind=kind, attributes=attributes)

    def end(self, span: Any, status: int | str, attributes: Mapping[str, Any]) -> None:
        """End the span of a request.

        Args:
            span: the span.
            status: of HTTP, or the name of one of gRPC.
            attributes: what is known since the request was read.
        """
        span.set_attributes(attributes)
        if isinstance(status, int):
            span.set_attribute("http.response.status_code", status)
            is_fault = status >= _HTTP_FAULT
        else:
            span.set_attribute("rpc.response.status_code", status)
            is_fault = status in _GRPC_FAULTS
        if is_fault:
            span.set_attribute("error.type", str(status))
            span.set_status(self._api.StatusCode.ERROR)
        span.end()

    @contextmanager
    def scoring(self, spans: Sequence[Any]) -> Iterator[None]:
        """A span `score` below that of each request of a batch; that of the first is current.

        So the rows that the batch fetches are in the trace of its first request.
        """
        attributes = {"hotbed.batch_requests": len(spans)}
        with ExitStack() as stack:
            for number, span in enumerate(reversed(spans), 1):
                above = self._api.set_span_in_context(span)
                part = self._tracer.start_span("score", above, attributes=attributes)
                if number < len(spans):
                    stack.callback(part.end)
                else:
                    stack.enter_context(self._api.use_span(part, end_on_exit=True))
            yield

    def close(self) -> None:
        """Send the last spans. A receiver that does not answer is abandoned."""
        if self._is_own:
            wait([DaemonThreads(1, "hotbed-spans").submit(self._provider.shutdown)], _CLOSE_SECONDS)


def open_spans() -> Spans | None:
    """Return what makes spans; None if nothing asks for them, or the extra is not installed.

    The program may have configured OpenTelemetry. Otherwise the variables of the environment decide
    that name an exporter or an endpoint.

    Raises:
        ConfigError: a variable names an unknown exporter or protocol.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is not None:
        provider = api.get_tracer_provider()
        if not isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
            return Spans(provider, is_own=False)
    names = _exporters()
    if not names:
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "OTEL_ variables ask for spans, but %s is not installed: there are none. "
            "Run pip install hotbed[tracing].",
            error.name,
        )
        return None
    resource = Resource.create()
    if str(resource.attributes[_SERVICE]).startswith(_NO_SERVICE):
        resource = resource.merge(Resource({_SERVICE: "hotbed"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in names:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name)()))
    trace.set_tracer_provider(provider)
    return Spans(provider, is_own=True)


def _exporters() -> list[str]:
    """Return the names of the exporters that the environment asks for."""
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return []
    names = _variable("OTEL_TRACES_EXPORTER")
    if not names and any(map(_variable, _ENDPOINTS)):
        names = "otlp"
    return [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]


def _exporter(name: str) -> Any:
    """Load the exporter of a name."""
    entry = name
    if name == "otlp":
        protocol = next(filter(None, map(_variable, _PROTOCOLS)), "http/protobuf")
        entry = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for point in entry_points(group=_EXPORTERS, name=entry):
        return point.load()
    installed = sorted({point.name for point in entry_points(group=_EXPORTERS)})
    raise ConfigError(
        f"OTEL_TRACES_EXPORTER: the exporter {entry!r} is not installed, got {name!r}. Choose one "
        f"of {installed}, or install its package."
    )


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
