# SPDX-License-Identifier: Apache-2.0
"""Which files import which, read from their syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hotbed"
TESTS = ROOT / "tests"


def python_files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree."""
    return list(ast.walk(parsed(path)))


def module_of(node: ast.ImportFrom, path: Path) -> str:
    """Return the dotted name of the module that a `from` import in the file names."""
    if not node.level:
        return node.module or ""
    is_source = path.is_relative_to(SOURCE)
    root = SOURCE if is_source else TESTS
    package = [root.name, *path.relative_to(root).parent.parts]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def file_of(module: str) -> Path | None:
    """Return the file of a module or package of ours by its dotted name; None = it is neither."""
    root, *names = module.split(".")
    folder = {SOURCE.name: SOURCE, TESTS.name: TESTS}.get(root)
    if folder is None:
        return modules_of_tests().get(root)
    if not names:
        return None
    place = folder.joinpath(*names)
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.exists()), None)


@functools.cache
def modules_of_tests() -> dict[str, Path]:
    """The files that tests share, by the name under which they import them."""
    shared = (p for p in python_files(TESTS) if not p.stem.startswith(("test_", "conftest")))
    return {path.stem: path for path in shared}


@functools.cache
def imported_files(path: Path) -> set[Path]:
    """Return the files of ours that `path` imports, at any depth, those for a type checker
    included. `from p import x` counts p only where x is not a module.
    """
    files: set[Path | None] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            files |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = module_of(node, path)
            for alias in node.names:
                files.add(file_of(f"{module}.{alias.name}") or file_of(module))
    return {file for file in files if file is not None}
