# SPDX-License-Identifier: Apache-2.0
"""Serve models: frozen rows, parameter server, cache, session and server. Nothing here trains.

arguments.py         the tensors of a plain model and the ids of its lookups
cache.py             cache the rows that requests read often in bounded memory
client.py            send requests to a server over HTTP
datatypes.py         the datatype of each input, and the unit of times
encoded.py           requests whose ids and numbers are encoded
health.py            add the services of every gRPC server
main.py              the main functions of the commands that serve
parameter_server.py  own the tables of several models and versions, mapped into memory
process.py           the event loop and the log of a server process
kept.py              histories and counts of requests, from the rows of a version
request.py           encode the raw columns of a request
rows.py              tables as servers read them
session.py           score requests with one version of a model, without torch
threads.py           run work in threads that the end of a process does not wait for
trace_context.py     the trace of a request, and how it is passed on to other servers
trained_types.py     columns of requests in the types that they had in training
protocol/            The Open Inference Protocol without a network
request_log/         the log of requests and their scores
routes/              which version answers which request
server/              the server: requests over REST and gRPC, batched, scored and watched
stores/              stores of versions of models and their rows
workers/             a server of several processes
"""
