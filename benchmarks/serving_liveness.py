# SPDX-License-Identifier: Apache-2.0
"""How long a server is silent while one client sends bodies that are large, wrong, or both.

Another process asks for `/v2/health/live` every 2 ms. Each body is sent again and again for
`--seconds`, over one connection. Prints JSON lines: the body, its size, how it was answered,
seconds until its answer (median), and p99 and maximum of the probes meanwhile in milliseconds.
Fails where a probe took longer than a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PROBE_SECONDS = 0.002
LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/m/infer"
CALL = "/inference.GRPCInferenceService/ModelInfer"
MILLION = 1_000_000
ROWS = 4096  # what a server takes by default


def export(folder: str, num_columns: int) -> None:
    """A model of so many id columns, one of them of text, exported."""
    import hotbed as hb

    columns = [hb.Id(f"c{i}") for i in range(num_columns - 1)]
    columns.append(hb.Id("text"))
    schema = hb.Schema([hb.Label("label"), *columns])
    draw = np.random.default_rng(0)
    data = {
        f"c{i}": [[int(one)] for one in draw.integers(0, 1000, 512)] for i in range(num_columns - 1)
    }
    data["text"] = [[f"{i}"] for i in range(512)]
    source = hb.sources.Memory({**data, "label": draw.integers(0, 2, 512)})
    network = hb.models.DNN(schema, hb.make_tables(schema, dim=8))
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.01), {"auc"})
    model.fit(hb.Dataset(source, schema, 256), progress=False)
    model.export(folder)


# --- bodies ---------------------------------------------------------------------------------------


def tensor(
    name: str, data: list[Any], shape: list[int] | None = None, kind: str = "INT64"
) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": shape or [len(data)], "data": data}


def packed(*inputs: Any) -> bytes:
    return json.dumps({"inputs": inputs}, separators=(",", ":")).encode()


def binary(arrays: dict[str, np.ndarray], shape: list[int] | None = None) -> tuple[bytes, str]:
    """A body of binary tensors, of which the last one may have another shape, and the length of its
    head.
    """
    inputs = [
        {
            "name": name,
            "datatype": "BYTES" if values.dtype == np.uint8 else "INT64",
            "shape": list(values.shape) if values.dtype == np.int64 else [1],
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, values in arrays.items()
    ]
    inputs[-1]["shape"] = shape or inputs[-1]["shape"]
    head = json.dumps({"inputs": inputs}).encode()
    return head + b"".join(values.tobytes() for values in arrays.values()), str(len(head))


def rest_bodies(num_columns: int) -> Iterator[tuple[str, bytes, str | None]]:
    """(name, body, length of the head of binary ones) for REST."""
    others = [tensor(f"c{i}", [7]) for i in range(1, num_columns - 1)]
    numbers = [*others, tensor("c0", [7])]
    others.append(tensor("text", ["a"], kind="BYTES"))
    ids = {f"c{i}": np.array([7]) for i in range(1, num_columns - 1)}
    ids["text"] = np.frombuffer(b"\1\0\0\0a", np.uint8)
    long = np.ones(2 * MILLION, np.int64)
    yield "1e6 candidates", packed(*others, tensor("c0", list(range(MILLION)))), None
    yield "8e6 integers", packed(*others, tensor("c0", [1] * (8 * MILLION))), None
    yield "4e6 nested [1]", packed(*others, tensor("c0", [[1]] * (4 * MILLION))), None
    yield "4e6 strings", packed(*others, tensor("c0", ["a"] * (4 * MILLION), kind="BYTES")), None
    yield "270,000 inputs", packed(*[tensor("c0", [1])] * 270_000), None
    yield "200,000 names", packed(*(tensor(f"m{i}", [1]) for i in range(200_000))), None
    yield "5e6 empty objects", b'{"zz":[' + b",".join([b"{}"] * (5 * MILLION)) + b"]}", None
    yield "1.4e6 keys", b"{" + b",".join(b'"%x":1' % i for i in range(1_400_000)) + b"}", None
    yield (
        "a number of 4e6 digits",
        packed(*others, tensor("c0", [0])).replace(b"[0]", b"[%b]" % (b"9" * 4_000_000)),
        None,
    )
    yield "an id of 15 MB", b'{"id":"' + b"x" * 15_000_000 + b'","inputs":[]}', None
    yield "2e6 ids, binary", *binary({**ids, "c0": long})
    yield "4 lists of 5e5 ids, binary", *binary({**ids, "c0": long}, [4, 500_000])
    yield (
        "4e6 empty strings, binary",
        *binary({**ids, "c0": np.zeros(16 * MILLION, np.uint8)}, [4 * MILLION]),
    )
    # What follows is legal: all candidates, and lists that fill the body.
    whole = [tensor(f"c{i}", list(range(10**8, 10**8 + ROWS))) for i in range(num_columns - 1)]
    whole.append(tensor("text", ["some text"] * ROWS, kind="BYTES"))
    yield "legal: 4,096 candidates", packed(*whole), None
    limit = max(1 << 20, ROWS * num_columns * 32)
    length = min(1024, limit // 2 // ROWS - 20)
    yield (
        "legal: long lists",
        packed(*others, tensor("c0", [1] * (ROWS * length), [ROWS, length])),
        None,
    )
    yield (
        "legal: long lists of text",
        packed(
            *numbers, tensor("text", ["7"] * (ROWS * (length // 3)), [ROWS, length // 3], "BYTES")
        ),
        None,
    )
    length = min(1024, limit // 8 // ROWS - 8)
    yield "legal: long lists, binary", *binary({**ids, "c0": np.ones((ROWS, length), np.int64)})


def grpc_bodies(num_columns: int) -> Iterator[tuple[str, bytes]]:
    from hotbed.serving.server.endpoints.grpc import MESSAGES

    def message(name: str, shape: list[int], field: str, values: list[Any]) -> bytes:
        """A request of which one column has these values, and the others one."""
        request = MESSAGES["ModelInferRequest"](model_name="m")
        for other in ("text", *(f"c{i}" for i in range(num_columns - 1))):
            kind = "BYTES" if other == "text" else "INT64"
            tensor = request.inputs.add(name=other, datatype=kind, shape=[1])
            if other == name:
                tensor.shape[:] = shape
                getattr(tensor.contents, field).extend(values)
            elif kind == "BYTES":
                tensor.contents.bytes_contents.append(b"a")
            else:
                tensor.contents.int64_contents.append(7)
        return bytes(request.SerializeToString())

    for size in (20_000, 200_000, 2_000_000, 8_000_000, 16_000_000):
        yield f"gRPC: {size // 2:,} empty inputs", b"\x0a\x01m" + b"\x2a\x00" * (size // 2)
    count = 16 * MILLION
    yield "gRPC: 16e6 integers", message("c0", [count], "int64_contents", [1] * count)
    yield "gRPC: 8e6 texts", message("text", [count // 2], "bytes_contents", [b""] * (count // 2))
    yield "gRPC: a shape of 16e6", message("c0", [1] * count, "int64_contents", [])
    limit = max(1 << 20, ROWS * num_columns * 32)
    length = min(1024, limit // ROWS - 20)
    values = [1] * (ROWS * length)
    yield "gRPC, legal: long lists", message("c0", [ROWS, length], "int64_contents", values)
    length = length // 3
    texts = [b"7"] * (ROWS * length)
    yield (
        "gRPC, legal: long lists of text",
        message("text", [ROWS, length], "bytes_contents", texts),
    )


# --- measuring ------------------------------------------------------------------------------------


def probe(port: int) -> None:
    """Ask again and again until stdin ends; print when each answer was asked for and how long it
    took.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    stop = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL)  # it ends with stdin
    probes = list[tuple[float, float]]()
    print("ready", flush=True)
    while stop.poll() is None:
        began = time.monotonic()
        connection.request("GET", "/v2/health/live")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        probes.append((began, time.monotonic() - began))
        time.sleep(PROBE_SECONDS)
    print(json.dumps(probes))


def rest(port: int, body: bytes, length: str | None) -> Callable[[], str]:
    headers = {"Content-Type": "application/json"}
    if length is not None:
        headers[LENGTH] = length

    def send() -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        try:
            connection.request("POST", INFER, body, headers)
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)
        except ConnectionError:
            return "closed"
        finally:
            connection.close()

    return send


def remote(channel: Any, body: bytes) -> Callable[[], str]:
    import grpc

    call = channel.unary_unary(CALL)

    def send() -> str:
        try:
            call(body, timeout=300)
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)

    return send


def measured(name: str, size: int, send: Callable[[], str], seconds: float) -> dict[str, Any]:
    time.sleep(0.2)
    began = time.monotonic()
    answers = set[str]()
    took = list[float]()
    while time.monotonic() - began < seconds:
        asked = time.monotonic()
        answers.add(send())
        took.append(time.monotonic() - asked)
    window = (began, time.monotonic())
    found = {"body": name, "mb": round(size / 1e6, 2), "answer": "/".join(sorted(answers))}
    return {**found, "seconds": round(float(np.median(took)), 3), "window": window}


def run(a: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    import grpc

    export(folder, a.columns)
    code = "from hotbed.cli.commands import main; main()"
    words = ["serve", f"m={folder}", "--http-port", "0", "--grpc-port", "0"]
    server = subprocess.Popen(
        [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    ports = next(
        filter(None, (re.search(r"on port (\d+), gRPC (\d+)", line) for line in server.stderr))
    )
    port = int(ports[1])
    prober = subprocess.Popen(
        [sys.executable, __file__, "--probe", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert prober.stdout is not None
    prober.stdout.readline()  # "ready": its first request comes now
    rows = [measured("nothing", 0, lambda: (time.sleep(0.1), "-")[1], a.seconds)]
    for name, body, length in rest_bodies(a.columns):
        rows.append(measured(name, len(body), rest(port, body, length), a.seconds))
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{ports[2]}", options=options) as channel:
        for name, body in grpc_bodies(a.columns):
            rows.append(measured(name, len(body), remote(channel, body), a.seconds))
    probes = np.array(json.loads(prober.communicate()[0]))
    server.send_signal(signal.SIGTERM)
    server.wait()
    for row in rows:
        begin, end = row.pop("window")
        inside = (probes[:, 0] + probes[:, 1] >= begin) & (probes[:, 0] <= end)
        latencies = probes[inside, 1] * 1e3
        row["probe_p99_ms"] = round(float(np.percentile(latencies, 99)), 1)
        row["probe_max_ms"] = round(float(latencies.max()), 1)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--columns", type=int, default=2, help="of the model; a body may grow with them"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each body")
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.probe:
        probe(a.probe)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = run(a, str(Path(folder) / "export"))
    for row in rows:
        print(json.dumps(row), flush=True)
    worst = max(row["probe_max_ms"] for row in rows)
    if worst > 1000:
        sys.exit(f"a probe took {worst:.0f} ms")


if __name__ == "__main__":
    main()
