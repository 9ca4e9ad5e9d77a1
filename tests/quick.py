# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that a change reaches by the import graph, in about a minute: a plugin of pytest.

`pytest --quick BASE` (`make quick`) takes the files that differ from the merge base with BASE,
committed or not. The nearest files of tests come first, then the cheapest by durations.json, until
a minute of every core is full. Some files reach tests without an import:

* the C++ core: `TESTS_OF_CORE`;
* a conftest.py, and a file that only tests read: the tests beside and below;
* any other file (a document, an example): the tests that name it, or its first folder, in a string.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path, PurePath
from typing import Any

import pytest
from import_graph import (
    ROOT,
    SOURCE,
    TESTS,
    file_of,
    imported_files,
    module_of,
    parsed,
    python_files,
)
from schedule import recorded

SECONDS = 60
"""Of each core. A file that takes longer runs only if it has changed itself."""

CORE = ("csrc/", "CMakeLists.txt")
TESTS_OF_CORE = ("tests/contract/", "tests/golden/", "tests/parity/", "tests/unit/test_stub.py")
"""Nearly every test runs the core; these compare its rows and bits."""


@dataclass
class Selection:
    """Files of tests to run, and how many more the change reaches."""

    files: list[str]
    left_out: int


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests that reach what changed since BASE, for about a minute"
    parser.addoption("--quick", metavar="BASE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.quick is None:
        return
    if hasattr(config, "workerinput"):
        selection = Selection(*config.workerinput["selection"])
    else:
        changed = changed_files(config.option.quick)
        selection = select(changed, cores=getattr(config.option, "numprocesses", 0) or 1)
        if not selection.files:
            pytest.exit(f"no test reaches the {len(changed)} changed files", returncode=0)
    config.pluginmanager.register(Collecting(selection), "collecting")


class Collecting:
    """Collects the files of a selection alone, and says in the end how many it left out."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["selection"] = astuple(self._selection)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        is_chosen = collection_path.is_dir() or name_of(collection_path) in self._selection.files
        return None if is_chosen else True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._selection.left_out:
            terminalreporter.write_line(
                f"{self._selection.left_out} more files reach the change: make test"
            )


def changed_files(base: str, root: Path = ROOT) -> set[str]:
    """Return the files that differ from the merge base of HEAD and `base`, new ones included."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise pytest.UsageError(f"--quick {base}: {done.stderr.strip() or 'no merge base'}")
        return done.stdout

    commit = git("merge-base", "HEAD", base).strip()
    tracked = git("diff", "--name-only", "--no-renames", "-z", commit)
    untracked = git("ls-files", "--others", "--exclude-standard", "-z")
    return {name for name in (tracked + untracked).split("\0") if name}


def select(changed: set[str], cores: int) -> Selection:
    """Return the files of tests to run for the changed files."""
    users = users_by_import()
    texts = {name_of(path): path.read_text() for path in python_files(TESTS)}
    conftests = {name for name in texts if name.endswith("/conftest.py")}
    for name in changed | conftests:
        users[name] |= users_without_import(name, users[name], texts)
    hops = hops_from(changed, users)
    hops_of_tests = {test: hops[test] for test in files_of_tests(texts) if test in hops}
    seconds = {name: wall for name, (wall, _) in recorded().items() if name in texts}
    return fill(hops_of_tests, seconds, cores)


def users_by_import() -> dict[str, set[str]]:
    """Return, for each file of the package and of the tests, the files that use it directly."""
    users: dict[str, set[str]] = defaultdict(set)
    for path in python_files(SOURCE, TESTS):
        for used in used_files(path):
            users[name_of(used)].add(name_of(path))
    return users


def used_files(path: Path) -> set[Path]:
    """Return the files that `path` imports, and those that its public names load from."""
    package = SOURCE / "__init__.py"
    if path in (package, TESTS / "conftest.py"):
        return (
            set()
        )  # the package loads a name on use; of that conftest's fixtures few tests use each
    names = re.findall(r"\b(?:hb|hotbed)\.(\w+)", path.read_text())
    public = {file for name in names if (file := public_files().get(name))}
    return imported_files(path) | public | ({package} if public else set())


@functools.cache
def public_files() -> dict[str, Path | None]:
    """Return the file that each public name of the package loads from."""
    package = SOURCE / "__init__.py"
    return {
        str(alias.asname): file_of(f"{module}.{alias.name}") or file_of(module)
        for node in ast.walk(parsed(package))
        if isinstance(node, ast.ImportFrom) and node.level
        for module in [module_of(node, package)]
        for alias in node.names
    }


def users_without_import(name: str, importers: set[str], texts: dict[str, str]) -> set[str]:
    """Return the files of `texts` that a file reaches though they do not import it."""
    if name.startswith(CORE):
        return {test for test in texts if test.startswith(TESTS_OF_CORE)}
    if not name.startswith("tests/"):
        return files_that_name(name, texts)
    if importers or name in files_of_tests(texts):
        return set()
    return tests_beside(name, texts)


def files_that_name(name: str, texts: dict[str, str]) -> set[str]:
    """Return the files that have the name of a file, or of its first folder, in a string."""
    path = PurePath(name)
    words = [rf"[\"']{path.parts[0]}[\"'/]"]
    if path.suffix != ".py":
        words.append(rf"[\"'/]{re.escape(path.name)}\b")
    pattern = re.compile("|".join(words))
    return {file for file, text in texts.items() if pattern.search(text)}


def tests_beside(name: str, texts: dict[str, str]) -> set[str]:
    """Return the files of tests in the nearest folder above a file that has some, and below it."""
    for folder in PurePath(name).parents:
        beside = {t for t in files_of_tests(texts) if PurePath(t).is_relative_to(folder)}
        if beside:
            return beside
    return set()


def files_of_tests(texts: dict[str, str]) -> set[str]:
    """Return those of `make test`."""
    names = {name for name in texts if PurePath(name).name.startswith("test_")}
    return {name for name in names if not name.startswith("tests/soak/")}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def hops_from(changed: set[str], users: dict[str, set[str]]) -> dict[str, int]:
    """Return the files that use a changed one, directly or not, and over how many files."""
    hops = dict.fromkeys(changed, 0)
    waiting = list(changed)
    for name in waiting:
        for user in users.get(name, set()) - hops.keys():
            hops[user] = hops[name] + 1
            waiting.append(user)
    return hops


def fill(hops: dict[str, int], seconds: dict[str, float], cores: int) -> Selection:
    """Return the nearest files of tests, then the cheapest, that fit into the time."""
    average = sum(seconds.values()) / max(len(seconds), 1)
    costs = {name: seconds.get(name, average) for name in hops}
    files: list[str] = []
    left = float(SECONDS * cores)
    for name in sorted(hops, key=lambda name: (hops[name], costs[name], name)):
        is_short = costs[name] <= SECONDS or hops[name] == 0
        if is_short and costs[name] <= left:
            files.append(name)
            left -= costs[name]
    return Selection(files, len(hops) - len(files))
