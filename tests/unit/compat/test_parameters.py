# SPDX-License-Identifier: Apache-2.0
"""The pages of parameters are those of their YAML files, and what these say holds for the doors."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

from parameter_pages import DOORS, FOLDER, KINDS, Door

EACH = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
SECTIONS = [
    pytest.param(door, section, id=f"{door.name}: {section['title']}")
    for door in DOORS
    for section in door.sections
]


@EACH
def test_page_is_that_of_the_file(door: Door) -> None:
    assert door.page.read_text() == door.text()


@EACH
def test_at_most_a_tenth_of_the_parameters_differ(door: Door) -> None:
    kinds = door.kinds()
    assert kinds["different"] <= kinds.total() / 10


@pytest.mark.parametrize(("door", "section"), SECTIONS)
def test_notes_are_of_parameters_that_are_there(door: Door, section: dict[str, Any]) -> None:
    names = [row.name for row in door.parameters(section)]
    noted = [name for kind in KINDS for name in section.get(kind, {})]
    assert set(noted) <= set(names)
    assert len(set(noted)) == len(noted)
    assert len(set(names)) == len(names)


@EACH
def test_parameters_of_a_call_have_their_names_and_defaults(door: Door) -> None:
    for section in door.sections:
        if "call" not in section:
            continue
        parameters = inspect.signature(door.look_up(section["call"])).parameters
        for row in door.parameters(section):
            if (
                f"{section.get('clause')}.{row.name}" in door.no_effect
                and row.name not in parameters
            ):
                continue  # taken by keyword
            own = parameters[row.name].default
            where = (section["call"], row.name)
            assert (own is inspect.Parameter.empty) == (row.default == ""), where
            if row.name in section.get("defaults", {}):
                assert own == section["defaults"][row.name], where


@EACH
def test_each_rule_has_its_test(door: Door) -> None:
    missing = []
    for section in door.sections:
        for rule in door.rules(section):
            assert rule.kind in KINDS
            if not any(rule.test in _tests(FOLDER / file) for file in rule.files):
                missing.append((rule.files, rule.test))
    assert missing == []


@cache
def _tests(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
