# SPDX-License-Identifier: Apache-2.0
"""The server: requests over REST and gRPC, batched, scored and watched.

access.py          what is said about each request: a line of the access log, a span
http_interface.py  the interface between an HTTP server and the application behind it
meters.py          metrics for Prometheus
options.py         the settings of both servers, each checked when it is set
route_meters.py    metrics and state of the versions of a model
server.py          the server of models: REST and gRPC in one process
spans.py           spans of OpenTelemetry, where variables of the environment ask for them
traffic.py         counts of the requests that each version answered
tokens.py          who may ask a server: tokens with roles, and certificates for TLS
endpoints/         what clients of a server call
scoring/           from a decoded request to its scores
"""
