# SPDX-License-Identifier: Apache-2.0
"""A clone with nothing beside it passes: each skip has an allowed reason, and what lies in the
shared folder is asked of one fixture.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ALLOWED_SKIPS
from forked import SERVER

TESTS = Path(__file__).resolve().parents[1]
FILES = {path: path.read_text() for path in sorted(TESTS.rglob("*.py"))}


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
    reasons = [
        (str(path.relative_to(TESTS)), reason)
        for path, text in FILES.items()
        if "pytest.skip(" in text or "pytest.mark.skip" in text
        for reason in reasons_in(ast.parse(text))
    ]
    assert len(reasons) >= 5
    assert not [one for one in reasons if not one[1].startswith(ALLOWED_SKIPS)]


def test_only_one_fixture_knows_the_shared_folder() -> None:
    found = {
        str(path.relative_to(TESTS))
        for path, text in FILES.items()
        if "shared" in text
        for node in ast.walk(ast.parse(text))
        if names_the_shared_folder(node)
    }
    assert found == {"conftest.py"}


class Outcomes:
    """A plugin of pytest that counts how the parts of tests end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.counts[f"{report.when} {report.outcome}"] += 1


def outcomes_without_shared(files: list[str]) -> Counter[str]:
    outcomes = Outcomes()
    arguments = ["-p", "no:xdist", "--assert=plain", "--without-shared", *files]
    assert pytest.main(arguments, [outcomes]) == pytest.ExitCode.OK
    return outcomes.counts


def test_what_needs_the_shared_folder_is_skipped_without_it() -> None:
    files = [
        str(path)
        for path, text in FILES.items()
        if "shared_data" in text and path.name.startswith("test_") and path != Path(__file__)
    ]
    outcomes = SERVER.call(outcomes_without_shared, files)
    assert outcomes.keys() == {"setup skipped", "teardown passed"}
    assert outcomes["setup skipped"] >= len(files)
