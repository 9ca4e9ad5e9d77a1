# SPDX-License-Identifier: Apache-2.0
"""What clients of a server call.

http.py          the routes of REST: inference, metrics, status and a page
page.py          the page for people
connection.py    HTTP/1.1 by uvicorn, with limits of time and size
relay.py         connections of gRPC clients, before the library
grpc_server.py   a gRPC server of any service
grpc.py          the Open Inference Protocol over gRPC
triton.py        calls of Triton's tools outside the Open Inference Protocol
rows_rules.py    the rules of a parameter server
rows_service.py  the parameter server: versions and rows over gRPC
"""
