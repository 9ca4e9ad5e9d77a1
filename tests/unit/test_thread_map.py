# SPDX-License-Identifier: Apache-2.0
"""The map of threads in docs/design names every thread that the package starts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTERS = {"Thread", "DaemonThreads", "ThreadPoolExecutor"}


def names(text: str) -> Iterator[str]:
    """Yield the names that a file gives to threads; of a formatted one its beginning."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTERS:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and str(part.value).startswith("hotbed-"):
                    yield part.value


def test_map_of_threads_names_every_thread() -> None:
    page = (ROOT / "docs/design/0006-serving.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `hotbed-")]
    listed = {row.strip().strip("`").removesuffix("N") for row in rows}
    texts = [path.read_text() for path in (ROOT / "src/hotbed").rglob("*.py")]
    assert listed == {name for text in texts if "hotbed-" in text for name in names(text)}
