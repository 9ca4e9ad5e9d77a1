# SPDX-License-Identifier: Apache-2.0
"""A clone with nothing beside it passes: each skip has an allowed reason, and what lies in the
shared folder is asked of one fixture.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import ALLOWED_SKIPS

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def text_of(node: ast.expr) -> str:
    """Return how a reason begins: a text, or the first part of a formatted one."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) else ""


def reasons_in(tree: ast.Module) -> Iterator[str]:
    """Yield the reasons of `pytest.skip` and of `pytest.mark.skip` and `skipif`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.skip":
            yield text_of(node.args[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("pytest.mark.skip"):
            yield next(text_of(word.value) for word in node.keywords if word.arg == "reason")


def names_the_shared_folder(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and isinstance(node.right, ast.Constant)
        and "shared" in Path(str(node.right.value)).parts
    )


def test_each_skip_has_an_allowed_reason() -> None:
    reasons = {path: list(reasons_in(ast.parse(path.read_text()))) for path in FILES}
    assert sum(map(len, reasons.values())) >= 5
    refused = {
        (str(path.relative_to(TESTS)), reason)
        for path in FILES
        for reason in reasons[path]
        if not reason.startswith(ALLOWED_SKIPS)
    }
    assert not refused


def test_only_one_fixture_knows_the_shared_folder() -> None:
    found = {
        str(path.relative_to(TESTS))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if names_the_shared_folder(node)
    }
    assert found == {"conftest.py"}


def test_what_needs_the_shared_folder_is_skipped_without_it() -> None:
    files = [str(p) for p in FILES if "shared_data" in p.read_text() and "/test_" in str(p)]
    files.remove(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--without-shared", *files],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    counts = [line for line in done.stdout.splitlines() if " skipped in " in line]
    assert len(counts) == 1, done.stdout
    assert not {"passed", "failed", "error"} & set(counts[0].split())
