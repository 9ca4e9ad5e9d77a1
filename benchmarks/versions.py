# SPDX-License-Identifier: Apache-2.0
"""What a further version of a model costs a server: memory of its workers, and files.

A trainer publishes two fulls, and a delta on the second. A server with two workers answers, then
pins and splits by rules that name more and more of them, and each version answers requests for
ids of all rows. Prints JSON lines: the versions, the memory of a worker that is its own
(`private_mib`), the share of what processes share (`shared_mib`), and the MiB of the served folder.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hotbed as hb
from hotbed.persist.publish import PublishDirectory
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.saver import Saver
from hotbed.serving.routes.editing import change_routes


def publish(folder: Path, rows: int, dim: int) -> list[int]:
    """Publish two fulls and a delta of a hundredth of the rows; return their versions."""
    schema = hb.Schema([hb.Label("label"), hb.Id("user"), hb.Id("item")])
    model = hb.RecModel(hb.models.DNN(schema, hb.make_tables(schema, dim=dim)), "bce", hb.Adam())
    for table in model.tables.values():
        table.track()
    saver, publisher = Saver(folder / "run"), PublishDirectory(folder / "published", keep=9)
    versions = []
    for part in (rows, rows // 100, rows // 100):
        ids = np.arange(part)
        data = {"user": ids % 1000, "item": ids, "label": np.zeros(part)}
        model.fit(hb.Dataset(hb.sources.Memory(data), schema, 8192), progress=False)
        saver.submit(capture(model.state(), changes=len(versions) == 2))
        saved = saver.wait()
        assert saved is not None
        publisher.publish(saved)
        versions.append(int(model.counters["steps"]))
        if len(versions) == 1:
            model.export(folder / "export")
    return versions


def memory_of(process: int) -> dict[str, float]:
    """Return the MiB of a process that are its own, and its part of those that it shares."""
    sizes = dict[str, int]()
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        sizes[name.rstrip(":")] = int(size)
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"private_mib": private / 1024, "shared_mib": (sizes["Pss"] - private) / 1024}


def workers_of(process: int) -> list[int]:
    children = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        children += map(int, (thread / "children").read_text().split())
    return children


def ask_all(port: str, rows: int, versions: list[int]) -> None:
    """Have each version read each row, in each worker: clients connect anew for each part."""
    for version in versions:
        for start in range(0, rows, 4096):
            for _ in range(3):
                with hb.Client(f"http://127.0.0.1:{port}") as client:
                    items = np.arange(start, min(rows, start + 4096))
                    client.predict("m", {"item": items}, {"user": 7}, version=version)


def measure(folder: Path, rows: int, versions: list[int]) -> None:
    routes = folder / "routes.yaml"
    routes.write_text("revision: 0\n")
    served = folder / "rows"
    command = [sys.executable, "-m", "hotbed.cli", "serve", f"m={folder / 'export'}"]
    command += ["--watch", str(folder / "published"), "--routes", str(routes)]
    command += ["--http-port", "0", "--set", "workers=2", "--set", f"rows={served}"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    port = ""
    for line in server.stderr:
        if match := re.search(r"listening on port (\d+)", line):
            port = match.group(1)
        if "2 workers listening" in line:
            break
    first, second, newest = versions
    rules: dict[str, dict[str, Any]] = {
        "the newest": {"shadow": "none"},
        "and the full below it": {"canary": f"{second}=50%", "by": "user"},
        "and an earlier full": {"stable": str(first)},
    }
    names = [newest]
    try:
        for (name, rule), version in zip(rules.items(), (None, second, first), strict=True):
            change_routes(routes, "m", rule)
            names += [] if version is None else [version]
            wait_until_loaded(port, names)
            ask_all(port, rows, names)
            memories = [memory_of(process) for process in workers_of(server.pid)]
            mean = {
                key: round(float(np.mean([one[key] for one in memories]))) for key in memories[0]
            }
            files = sum(path.stat().st_size for path in served.rglob("*")) >> 20
            print(json.dumps({"versions": name, **mean, "folder_mib": files}), flush=True)
    finally:
        server.terminate()
        server.wait()


def wait_until_loaded(port: str, versions: list[int]) -> None:
    for _ in range(600):
        with hb.Client(f"http://127.0.0.1:{port}") as client:
            model = client.status()["models"][0]
        loaded = {role["version"] for role in model["routes"]["roles"].values()}
        if loaded >= set(versions):
            return
        time.sleep(0.2)
    raise SystemExit(f"expected versions {versions}, got {loaded}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        versions = publish(Path(folder), arguments.rows, arguments.dim)
        measure(Path(folder), arguments.rows, versions)


if __name__ == "__main__":
    main()
