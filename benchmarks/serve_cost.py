# SPDX-License-Identifier: Apache-2.0
"""What one answer costs a server: `hotbed serve` over JSON, binary tensors and gRPC, with and without
a log of requests, an access log and spans, beside the same network in ONNX Runtime behind FastAPI.

A request: a user and some items, to the small DeepFM of `serve_load.py`. Clients are threads of this
process that ask again once they are answered. The servers are measured in turn. The figure is the
processor time of a server a request, of all its threads and of the kernel on its behalf, and the
least of all rounds: other work on the machine only adds to it.

Prints a JSON line for each kind of request, number of candidates, number of clients and server: the
least and the median processor milliseconds, the median and the 99th percentile of the latency in the
best round, for ours the ratio of the least ones to the peer's, and with a log or spans that to ours
without.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from serve_load import caller, grpc_body, http_body, post, small_model, started, write_onnx

ROWS = 100_000
BODIES = 50
CALLERS = {"json": "hotbed json", "binary": "hotbed http", "grpc": "hotbed grpc"}


Started = tuple[subprocess.Popen[str], tuple[int, int]]
"""The process of a server, and its ports for HTTP and gRPC."""


class SpanReceiver(http.server.BaseHTTPRequestHandler):
    """A receiver of spans that drops them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *_: object) -> None: ...


def start_receiver() -> str:
    """Start a receiver of spans, and return its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SpanReceiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def make_body(kind: str, candidates: int, seed: int) -> bytes:
    """A request of a kind, of a user and some items; ids follow a power law."""
    draw = np.random.default_rng(seed)
    ids = (draw.random(1 + candidates) ** 4 * ROWS).astype(np.int64)
    columns = {"user": ids[:1], "item": ids[1:]}
    if kind == "grpc":
        return grpc_body(columns)
    if kind == "binary":
        return http_body(columns)
    if kind == "bytes":
        return post("/bytes", ids.tobytes())
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [len(each)], "data": each.tolist()}
        for name, each in columns.items()
    ]
    return post("/v2/models/m/infer", json.dumps({"inputs": inputs}).encode())


def run_seconds(pid: int) -> float:
    """Processor seconds of the threads of a process, to the nanosecond."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def measure(
    ask_of: Callable[[], Callable[[bytes], None]],
    bodies: list[bytes],
    pid: int,
    clients: int,
    requests: int,
) -> tuple[float, float, float]:
    """Return milliseconds of a request: of processors, and the median and high latency."""
    asks = [ask_of() for _ in range(clients)]
    for ask in asks:
        ask(bodies[0])  # the connection is there
    seconds = list[float]()

    def work(ask: Callable[[bytes], None], first: int) -> None:
        for number in range(first, first + requests // clients):
            begin = time.perf_counter()
            ask(bodies[number % len(bodies)])
            seconds.append(time.perf_counter() - begin)

    before = run_seconds(pid)
    threads = [threading.Thread(target=work, args=(ask, 7 * n)) for n, ask in enumerate(asks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cost = (run_seconds(pid) - before) / len(seconds)
    middle, high = np.percentile(seconds, [50, 99])
    return cost * 1e3, float(middle) * 1e3, float(high) * 1e3


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--kinds", nargs="*", choices=CALLERS, default=list(CALLERS))
    p.add_argument("--candidates", type=int, nargs="*", default=[100, 1])
    p.add_argument("--clients", type=int, nargs="*", default=[1, 4])
    p.add_argument("--requests", type=int, default=1500, help="of one round")
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotbed-serve-cost-") as name:
        root = Path(name)
        small_model(ROWS).export(root / "exported")
        write_onnx(root / "model.onnx", ROWS)
        serve = ("-m", "hotbed.cli", "serve", f"m={root / 'exported'}", "--http-port", "0")
        load = str(Path(__file__).with_name("serve_load.py"))
        peer = (load, "--as", "onnx", "--folder", str(root / "model.onnx"))
        serve = (*serve, "--grpc-port", "0")
        logs = ("--set", f"log={root / 'log'}")
        with ExitStack() as stack:
            servers = {
                "hotbed": started(*serve),
                "hotbed, log": started(*serve, *logs),
                "hotbed, access log": started(*serve, "--set", "access_log=1"),
                "hotbed, spans": started(*serve, OTEL_EXPORTER_OTLP_ENDPOINT=start_receiver()),
                "onnx fastapi": started(*peer),
            }
            processes = {name: stack.enter_context(each) for name, each in servers.items()}
            for kind in a.kinds:
                for candidates in a.candidates:
                    for clients in a.clients:
                        compare(kind, candidates, clients, a, processes)


def compare(
    kind: str,
    candidates: int,
    clients: int,
    a: argparse.Namespace,
    processes: Mapping[str, Started],
) -> None:
    """Measure the servers in turn, and print a line for each."""
    servers = {}
    for server, (process, ports) in processes.items():
        if server != "onnx fastapi":
            servers[server] = (kind, CALLERS[kind], process.pid, ports[kind == "grpc"])
        elif kind != "grpc":
            peer_kind = "bytes" if kind == "binary" else kind
            servers[server] = (peer_kind, server, process.pid, ports[0])
    costs = {server: list[tuple[float, float, float]]() for server in servers}
    for round_ in range(a.rounds + 1):
        for server, (body_kind, caller_kind, pid, port) in servers.items():
            bodies = [make_body(body_kind, candidates, seed) for seed in range(BODIES)]
            cost = measure(partial(caller, caller_kind, port), bodies, pid, clients, a.requests)
            if round_:  # the first one warms up
                costs[server].append(cost)
    least = {server: min(cost for cost, _, _ in each) for server, each in costs.items()}
    for server, each in costs.items():
        line = {
            "server": server,
            "kind": kind,
            "candidates": candidates,
            "clients": clients,
            "cpu_ms": round(least[server], 3),
            "median_cpu_ms": round(float(np.median([cost for cost, _, _ in each])), 3),
            "p50_ms": round(min(middle for _, middle, _ in each), 3),
            "p99_ms": round(min(high for _, _, high in each), 3),
        }
        if server == "hotbed" and "onnx fastapi" in least:
            line["ratio"] = round(least[server] / least["onnx fastapi"], 2)
        if server.startswith("hotbed, "):
            line["ratio"] = round(least[server] / least["hotbed"], 2)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
