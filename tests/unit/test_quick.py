# SPDX-License-Identifier: Apache-2.0
"""`make quick` chooses the tests that reach a change: the nearest, then the cheapest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from import_graph import SOURCE, TESTS
from quick import (
    Selection,
    changed_files,
    fill,
    hops_from,
    name_of,
    used_files,
    users_without_import,
)

TEXTS = {
    "tests/conftest.py": "",
    "tests/golden/test_rows.py": "",
    "tests/parity/test_rules.py": "",
    "tests/soak/test_day.py": "",
    "tests/unit/data/conftest.py": "",
    "tests/unit/data/test_dataset.py": "",
    "tests/unit/test_pages.py": 'ROOT / "docs" / "data.md"',
    "tests/unit/test_readme.py": 'ROOT / "README.md"',
}


def test_changed_files_are_those_of_commits_of_the_index_and_of_the_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        command = ["git", *identity, *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    names = ("committed", "staged", "changed", "same", "moved")
    git("init", "-q", "-b", "main")
    for name in names:
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-qm", "base")
    git("branch", "work")
    (tmp_path / "theirs").write_text("after the merge base")
    git("add", ".")
    git("commit", "-qm", "theirs")
    git("checkout", "-q", "work")
    (tmp_path / "committed").write_text("more")
    git("mv", "moved", "its new name")
    git("commit", "-qam", "work")
    (tmp_path / "staged").write_text("more")
    git("add", ".")
    (tmp_path / "changed").write_text("more")
    (tmp_path / "new").write_text("more")
    expected = {"committed", "staged", "changed", "new", "moved", "its new name"}
    assert changed_files("main", tmp_path) == expected
    assert changed_files("HEAD", tmp_path) == {"staged", "changed", "new"}
    with pytest.raises(pytest.UsageError, match=r"--quick nowhere: .*nowhere"):
        changed_files("nowhere", tmp_path)


def test_a_file_uses_what_it_imports_and_where_its_public_names_load_from() -> None:
    path = TESTS / "unit" / "training" / "test_one_pass.py"
    names = {name_of(file) for file in used_files(path)}
    assert "tests/unit/training/test_ahead.py" in names  # from .test_ahead import
    assert "src/hotbed/training/step/one_pass.py" in names
    assert "src/hotbed/embedding/tables.py" in names  # hb.make_tables
    assert used_files(SOURCE / "__init__.py") == set()


def test_hops_are_the_imports_between_a_file_and_a_change() -> None:
    users = {"a": {"b", "c"}, "b": {"c", "d"}, "d": {"a", "e"}, "x": {"e"}}
    assert hops_from({"a"}, users) == {"a": 0, "b": 1, "c": 1, "d": 2, "e": 3}
    assert hops_from({"a", "x"}, users)["e"] == 1


@pytest.mark.parametrize(
    "name, tests",
    [
        ("csrc/core/table.h", {"tests/golden/test_rows.py", "tests/parity/test_rules.py"}),
        ("docs/serving.md", {"tests/unit/test_pages.py"}),
        ("README.md", {"tests/unit/test_readme.py"}),
        ("src/hotbed/data/dataset.py", set()),  # by its imports alone
        ("tests/unit/data/conftest.py", {"tests/unit/data/test_dataset.py"}),
        ("tests/golden/checkpoint/a", {"tests/golden/test_rows.py"}),
        ("tests/conftest.py", {t for t in TEXTS if "/test_" in t and "soak" not in t}),
        ("tests/unit/test_pages.py", set()),
    ],
)
def test_a_file_that_nothing_imports_reaches_its_tests(name: str, tests: set[str]) -> None:
    assert users_without_import(name, set(), TEXTS) == tests


def test_the_nearest_then_the_cheapest_fill_a_minute_of_each_core() -> None:
    hops = {"changed": 0, "far": 3, "near": 1, "near and dear": 1, "long": 1, "new": 2}
    seconds = {"changed": 70.0, "far": 1.0, "near": 5.0, "near and dear": 45.0, "long": 61.0}
    first = ["changed", "near", "near and dear"]
    assert fill(hops, seconds, cores=2) == Selection(first, left_out=3)
    # the long file takes more than a minute; the new one counts as average: 36 s
    assert fill(hops, seconds, cores=4) == Selection([*first, "new", "far"], left_out=1)
