# SPDX-License-Identifier: Apache-2.0
"""Requests over HTTP (binary tensors) and gRPC from clients in their own processes, beside plain
torch behind FastAPI.

A request: one user (13 id and 7 dense columns, context tensors) and 100 candidates (13 and 6), a
DLRM of 26 id and 13 dense columns. The peer is the same dense network over `nn.EmbeddingBag` behind
FastAPI and uvicorn; it is sent bare arrays, and encodes nothing. Closed loop: each client asks
again once it is answered. Open loop: Poisson arrivals at rising rates, latency
counted from the moment at which a request was meant to be sent, up to the knee: the last rate with
a 99th percentile under `--knee-ms`. With `deltas` a trainer process learns and publishes ten deltas
a minute meanwhile.

`--pair`: another pair, over JSON in both directions: `hotbed serve` with a small DeepFM of a user and
100 items, and the same network with its embeddings in one graph of ONNX Runtime behind FastAPI. All
clients are in one process of their own; the two servers are measured in turn.

Prints JSON lines: p50, p99 and max in milliseconds, answers a second, and processor milliseconds of
the server a request.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, DENSE, USER_IDS, USER_DENSE, CANDIDATES = 26, 13, 13, 7, 100
KINDS, BODIES = ("hotbed http", "hotbed grpc", "torch fastapi"), 200
PAIR = ("hotbed json", "onnx fastapi")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

# --- clients, in processes of their own -----------------------------------------------------------


def columns(draw: np.random.Generator, rows: int) -> dict[str, Any]:
    """Of one request: user columns [1], candidate columns [100]; a power law over `rows` ids a
    feature.
    """
    found: dict[str, Any] = {}
    for kind, number, user in (("c", FEATURES, USER_IDS), ("d", DENSE, USER_DENSE)):
        for i in range(number):
            values = draw.random(1 if i < user else CANDIDATES)
            found[f"{kind}{i}"] = (
                (values**4 * rows).astype(np.int64) if kind == "c" else values.astype(np.float32)
            )
    return found


def http_body(given: dict[str, Any]) -> bytes:
    inputs = [
        {
            "name": name,
            "datatype": "INT64" if values.dtype == np.int64 else "FP32",
            "shape": [len(values)],
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, values in given.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    data = head + b"".join(values.tobytes() for values in given.values())
    return post("/v2/models/m/infer", data, f"Inference-Header-Content-Length: {len(head)}\r\n")


def json_body(draw: np.random.Generator, rows: int) -> bytes:
    """A user and 100 items, as any client would write them."""
    user, *items = (draw.random(1 + CANDIDATES) ** 4 * rows).astype(np.int64).tolist()
    inputs = [
        {"name": "user", "datatype": "INT64", "shape": [1], "data": [user]},
        {"name": "item", "datatype": "INT64", "shape": [CANDIDATES], "data": items},
    ]
    return post("/v2/models/m/infer", json.dumps({"inputs": inputs}).encode())


def grpc_body(given: dict[str, Any]) -> bytes:
    from hotbed.serving.server.endpoints.grpc import MESSAGES

    request = MESSAGES["ModelInferRequest"](model_name="m")
    for name, values in given.items():
        request.inputs.add(
            name=name, datatype="INT64" if values.dtype == np.int64 else "FP32", shape=[len(values)]
        )
        request.raw_input_contents.append(values.tobytes())
    return bytes(request.SerializeToString())


def torch_body(given: dict[str, Any]) -> bytes:
    whole = [np.broadcast_to(values, CANDIDATES) for values in given.values()]
    return post(
        "/predict",
        b"".join([np.stack(whole[:FEATURES]).tobytes(), np.stack(whole[FEATURES:]).tobytes()]),
    )


def post(path: str, data: bytes, more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )


def caller(kind: str, port: int) -> Callable[[bytes], None]:
    """What asks over a connection of its own, and raises for anything but an answer."""
    if kind == "hotbed grpc":
        import grpc

        channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return lambda body: [call(body, timeout=60), None][1]
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(body: bytes) -> None:
        connection.sendall(body)
        found, end, size = b"", -1, 0
        while end < 0 or len(found) < end + 4 + size:
            found += connection.recv(1 << 16)
            if end < 0 and (end := found.find(b"\r\n\r\n")) >= 0:
                length = LENGTH.search(found[:end])
                size = int(length.group(1)) if length else 0
        if not found.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(found[:300])

    return ask


def client(a: argparse.Namespace) -> None:
    """Latencies in seconds as JSON, of `clients` threads; with a rate, of arrivals that wait for
    nobody.
    """
    draw = np.random.default_rng(a.seed)
    make = {"hotbed http": http_body, "hotbed grpc": grpc_body, "torch fastapi": torch_body}
    if a.kind in PAIR:
        bodies = [json_body(draw, a.rows) for _ in range(BODIES)]
    else:
        bodies = [make[a.kind](columns(draw, a.rows)) for _ in range(BODIES)]
    took, wrong, lock = list[float](), list[str](), threading.Lock()
    begin = time.perf_counter() + 0.3
    until = begin + a.seconds
    meant: Iterator[float] = iter(
        begin + np.cumsum(draw.exponential(1 / a.rate, int(2 * a.rate * a.seconds) + 10))
        if a.rate
        else []
    )

    def work(number: int) -> None:
        ask, i = caller(a.kind, a.port), number
        ask(bodies[i % BODIES])  # the connection is there
        time.sleep(max(0.0, begin - time.perf_counter()))
        while True:
            with lock:
                at = next(meant, until) if a.rate else time.perf_counter()
            if at >= until:
                return
            time.sleep(max(0.0, at - time.perf_counter()))
            at, i = at if a.rate else time.perf_counter(), i + 1
            try:
                ask(bodies[i % BODIES])
                took.append(time.perf_counter() - at)
            except Exception as error:
                wrong.append(repr(error)[:200])
                ask = caller(a.kind, a.port)

    threads = [threading.Thread(target=work, args=(number * 7,)) for number in range(a.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"took": took, "wrong": wrong, "over": time.perf_counter() - begin}))


# --- servers --------------------------------------------------------------------------------------


def peer(a: argparse.Namespace) -> None:
    """The same dense network over nn.EmbeddingBag, behind FastAPI."""
    import torch
    from fastapi import FastAPI, Request, Response
    from serving import Plain, make

    import hotbed as hb

    torch.set_num_threads(1)
    hb.set_num_threads(1)
    plain, app = Plain(make("DLRM", FEATURES), a.rows), FastAPI()  # the bags have their own rows

    async def predict(request: Request) -> Response:
        data = bytearray(await request.body())
        ids = torch.frombuffer(data, dtype=torch.int64, count=FEATURES * CANDIDATES).view(
            FEATURES, CANDIDATES
        )
        dense = torch.frombuffer(data, dtype=torch.float32, offset=8 * FEATURES * CANDIDATES).view(
            DENSE, CANDIDATES
        )
        with torch.inference_mode():
            scores = plain(ids, {f"d{i}": dense[i] for i in range(DENSE)})
        return Response(scores.numpy().tobytes(), media_type="application/octet-stream")

    # FastAPI reads them, not their names
    predict.__annotations__ |= {"request": Request, "return": Response}
    app.post("/predict")(predict)
    run_app(app)


def run_app(app: Any) -> None:
    """Serve an app of FastAPI on a free port, as uvicorn is fastest."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"listening on port {listener.getsockname()[1]}, gRPC 0", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        app, access_log=False, log_level="error", loop="uvloop", http="httptools"
    )
    uvicorn.Server(config).run([listener])


def small_model(rows: int) -> Any:
    """A DeepFM of a user and an item, with `rows` ids each; its rows are not trained."""
    import torch

    import hotbed as hb

    torch.manual_seed(0)
    schema = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item")])
    tables = hb.make_tables(schema, dim=16)
    for table in tables.values():
        table.find_or_insert(np.arange(rows))
    model = hb.RecModel(hb.models.DeepFM(schema, tables, hidden=(64, 32)), "bce", "adam")
    model.schema = schema
    return model


def onnx_peer(a: argparse.Namespace) -> None:
    """The same network with static embeddings, in ONNX Runtime behind FastAPI."""
    import onnxruntime
    from fastapi import FastAPI, Request, Response

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(a.folder, options)
    app = FastAPI()

    async def infer(request: Request) -> Response:
        asked = json.loads(await request.body())
        inputs = {entry["name"]: np.array(entry["data"], np.int64) for entry in asked["inputs"]}
        (scores,) = session.run(None, inputs)
        output = {"name": "prediction", "datatype": "FP32", "shape": [len(scores)]}
        answer = {"model_name": "m", "outputs": [{**output, "data": scores.tolist()}]}
        return Response(json.dumps(answer).encode(), media_type="application/json")

    async def infer_bytes(request: Request) -> Response:
        ids = np.frombuffer(await request.body(), np.int64)
        (scores,) = session.run(None, {"user": ids[:1], "item": ids[1:]})
        return Response(scores.tobytes(), media_type="application/octet-stream")

    for path, answer in (("/v2/models/m/infer", infer), ("/bytes", infer_bytes)):
        answer.__annotations__ |= {"request": Request, "return": Response}
        app.post(path)(answer)
    run_app(app)


def write_onnx(path: Path, rows: int) -> None:
    """Write a DeepFM of two embeddings of `rows` rows, for one user and n items."""
    import torch
    from torch import Tensor, nn

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(rows, 16), nn.Embedding(rows, 16)
            self.user_weight, self.item_weight = nn.Embedding(rows, 1), nn.Embedding(rows, 1)
            self.deep = nn.Sequential(
                nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
            )

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            item_rows = self.item(item)
            user_rows = self.user(user).expand_as(item_rows)
            crossed = (user_rows * item_rows).sum(1)
            linear = (self.user_weight(user) + self.item_weight(item)).squeeze(1)
            deep = self.deep(torch.cat([user_rows, item_rows], 1)).squeeze(1)
            return torch.sigmoid(crossed + linear + deep)

    ids = torch.zeros(1, dtype=torch.int64), torch.zeros(CANDIDATES, dtype=torch.int64)
    torch.onnx.export(
        Small().eval(),
        ids,
        path,
        input_names=["user", "item"],
        dynamic_axes={"item": {0: "n"}},
        dynamo=False,
    )


@contextmanager
def started(
    *command: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], tuple[int, int]]]:
    """A server's process with variables of its environment, and its ports for HTTP and gRPC."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"listening on port (\d+), gRPC (\d+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()])
        drain.start()
        yield process, (int(found.group(1)), int(found.group(2)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def trainer(a: argparse.Namespace) -> None:
    """Publishes a full, then deltas of a few thousand rows each, until it is stopped."""
    import torch
    from serving import make

    import hotbed as hb
    from hotbed.persist.publish import PublishDirectory
    from hotbed.persist.state.checkpoint import capture
    from hotbed.persist.state.saver import Saver

    os.nice(19)  # a trainer has a machine of its own
    torch.set_num_threads(1)
    hb.set_num_threads(1)
    model, draw, root = make("DLRM", a.rows * FEATURES), np.random.default_rng(1), Path(a.folder)
    for table in model.tables.values():
        table.track()
    saver, publisher = Saver(root / "run"), PublishDirectory(root / "published")
    due = time.monotonic()
    while True:
        whole = {name: np.broadcast_to(v, CANDIDATES) for name, v in columns(draw, a.rows).items()}
        data = hb.sources.Memory({**whole, "y": draw.integers(0, 2, CANDIDATES)})
        model.fit(hb.Dataset(data, model.schema, CANDIDATES), progress=False)
        saver.submit(capture(model.state(), changes=not saver.needs_full))
        saved = saver.wait()
        assert saved is not None
        publisher.publish(saved)
        print(model.counters["steps"], flush=True)
        due = max(due + a.delta_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


# --- the runs -------------------------------------------------------------------------------------


class Load:
    """Loads one server, and prints what it measures."""

    def __init__(
        self, kind: str, port: int, process: subprocess.Popen[str], a: argparse.Namespace
    ) -> None:
        self.kind, self._port, self._process, self._a = kind, port, process, a
        self.run(2, seconds=0.5, silent=True)

    def run(
        self,
        clients: int,
        rate: float = 0.0,
        seconds: float = 0.0,
        silent: bool = False,
        **more: Any,
    ) -> Any:
        """One line, of clients in two processes; with a `rate`, an open loop."""
        seconds = seconds or self._a.seconds
        processes = 1 if self.kind in PAIR else min(2, clients)
        command = [
            sys.executable,
            __file__,
            "--as",
            "client",
            "--kind",
            self.kind,
            "--port",
            str(self._port),
            "--rows",
            str(self._a.rows),
            "--seconds",
            str(seconds),
            "--rate",
            str(rate / processes),
        ]
        cpu = cpu_seconds(self._process)
        running = [
            subprocess.Popen(
                [*command, "--clients", str(-(-clients // processes)), "--seed", str(seed)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(processes)
        ]
        found = [json.loads(one.communicate()[0]) for one in running]
        cpu = cpu_seconds(self._process) - cpu
        took = np.array([one for part in found for one in part["took"]]) * 1e3
        wrong = [one for part in found for one in part["wrong"]]
        line = {
            "server": self.kind,
            "loop": "open" if rate else "closed",
            "clients": clients,
            "rate": round(rate, 1),
            "answers": len(took),
            "failed": len(wrong),
            "per_second": round(len(took) / max(one["over"] for one in found), 1),
            "p50": round(float(np.median(took)), 2),
            "p99": round(float(np.quantile(took, 0.99)), 2),
            "max": round(float(took.max()), 2),
            "cpu_ms": round(cpu / max(1, len(took)) * 1e3, 3),
            **more,
        }
        if wrong:
            line["first_error"] = wrong[0]
        if not silent:
            print(json.dumps(line), flush=True)
        return line

    def to_the_knee(self, top: float) -> float:
        """Rising rates, as shares of `top` answers a second; the last one under the knee."""
        knee, over = 0.0, 0
        for share in self._a.shares:
            line = self.run(32, share * top)
            if line["p99"] <= self._a.knee_ms and not line["failed"]:
                knee, over = line["per_second"], 0
            elif (over := over + 1) == 2:  # one alone may be the machine's
                break
        print(
            json.dumps(
                {"server": self.kind, "knee_per_second": knee, "p99_under_ms": self._a.knee_ms}
            ),
            flush=True,
        )
        return knee


def with_deltas(
    loads: list[Load], a: argparse.Namespace, rate: float, folder: Path, port: int
) -> None:
    """The same load twice: quiet, and while deltas arrive; `port`: of HTTP."""
    import hotbed as hb

    seconds = max(a.seconds, 2.5 * a.delta_seconds)
    for load in loads:
        load.run(32, rate, seconds, deltas=False)
    command = [
        sys.executable,
        __file__,
        "--as",
        "trainer",
        "--rows",
        str(a.rows),
        "--folder",
        str(folder),
        "--delta-seconds",
        str(a.delta_seconds),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first = [process.stdout.readline().strip() for _ in range(2)][-1]  # the full, and a delta
        with hb.Client(f"http://127.0.0.1:{port}") as client:
            while int(client.models()[0]["version"]) < int(first):
                time.sleep(0.1)
        for load in loads:
            load.run(32, rate, seconds, deltas=True)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--ids", type=int, default=1_000_000)
    p.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    p.add_argument("--closed", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    p.add_argument("--shares", type=float, nargs="*", default=[0.25, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1])
    p.add_argument("--knee-ms", type=float, default=25.0)
    p.add_argument("--delta-seconds", type=float, default=6.0)
    p.add_argument("--only", choices=KINDS, nargs="*", default=KINDS)
    p.add_argument("--pair", action="store_true", help="JSON, beside onnxruntime behind FastAPI")
    p.add_argument("--runs", type=int, default=5, help="of each server of the pair, in turn")
    p.add_argument("--quick", action="store_true", help="only proves that it runs")
    p.add_argument(
        "--as", dest="role", choices=("main", "client", "peer", "onnx", "trainer"), default="main"
    )
    for name, kind in (
        ("kind", str),
        ("port", int),
        ("rows", int),
        ("clients", int),
        ("seed", int),
        ("folder", str),
    ):
        p.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    p.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    a = p.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if a.role != "main":
        roles = {"client": client, "peer": peer, "onnx": onnx_peer, "trainer": trainer}
        roles[a.role](a)
        return
    if a.quick:
        a.ids, a.seconds, a.closed, a.shares, a.delta_seconds = (
            26_000,
            0.5,
            [1, 4],
            [0.25, 0.5],
            0.5,
        )
    if a.pair:
        a.rows = a.ids // 2
        measure_pair(a)
        return
    a.rows = a.ids // FEATURES
    measure(a)


def measure_pair(a: argparse.Namespace) -> None:
    """Print a line for each run, and the ratios of answers a second by number of clients."""
    with tempfile.TemporaryDirectory(prefix="hotbed-serve-load-") as name:
        root = Path(name)
        small_model(a.rows).export(root / "exported")
        write_onnx(root / "model.onnx", a.rows)
        serve = ("-m", "hotbed.cli", "serve", f"m={root / 'exported'}", "--http-port", "0")
        onnx = (__file__, "--as", "onnx", "--folder", str(root / "model.onnx"))
        with started(*serve) as (ours, ports), started(*onnx) as (theirs, others):
            loads = [
                Load(kind, port, process, a)
                for kind, port, process in zip(
                    PAIR, (ports[0], others[0]), (ours, theirs), strict=True
                )
            ]
            for clients in a.closed:
                ratios = []
                for _ in range(a.runs):
                    first, second = (load.run(clients) for load in loads)
                    ratios.append(first["per_second"] / second["per_second"])
                summary = {"clients": clients, "median_ratio": round(float(np.median(ratios)), 2)}
                spread = [round(min(ratios), 2), round(max(ratios), 2)]
                print(json.dumps({**summary, "ratios": spread}), flush=True)


def measure(a: argparse.Namespace) -> None:
    from serving import make

    root = Path(tempfile.mkdtemp(prefix="hotbed-serve-load-"))
    try:
        make("DLRM", a.ids).export(root / "exported")
        command = (
            "-m",
            "hotbed.cli",
            "serve",
            f"m={root / 'exported'}",
            "--watch",
            str(root / "published"),
            "--http-port",
            "0",
            "--grpc-port",
            "0",
            "--set",
            f"rows={root / 'rows'}",
        )
        tops, ours = dict[str, float](), list[Load]()
        with (
            started(*command) as (server, ports),
            started(__file__, "--as", "peer", "--rows", str(a.rows)) as (other, theirs),
        ):
            loads = [
                Load(kind, port, process, a)
                for kind, port, process in zip(
                    KINDS, (*ports, theirs[0]), (server, server, other), strict=True
                )
                if kind in a.only
            ]
            for clients in a.closed:
                for load in loads:  # in turn
                    line = load.run(clients)
                    tops[load.kind] = max(tops.get(load.kind, 0.0), line["per_second"])
            for load in loads:
                load.to_the_knee(tops[load.kind])
            ours = [load for load in loads if load.kind.startswith("hotbed")]
            if ours:
                with_deltas(ours, a, min(tops[load.kind] for load in ours) / 3, root, ports[0])
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
