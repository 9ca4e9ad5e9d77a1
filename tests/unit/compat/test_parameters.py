# SPDX-License-Identifier: Apache-2.0
"""What each parameter of HugeCTR is here: parameters.yaml holds for the door, and makes the page.

Write the page anew: python tests/unit/compat/test_parameters.py
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

pytest.importorskip("torch", reason="torch absent")

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import knobs
from hotbed.compat.hugectr.json.solver import read_solver
from hotbed.compat.hugectr.knobs import NO_EFFECT, log_no_effect
from hotbed.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/migrate/hugectr_parameters.md"
SECTIONS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "parameters.yaml").read_text()
)
KINDS = {
    "same": "same",
    "mapped": "mapped",
    "unused": "no effect",
    "different": "different",
}
HEAD = """# HugeCTR's parameters

Every argument and key of HugeCTR v2.3 to v25.03 that users write. [Coming from HugeCTR](hugectr.md) is the guide. A test
checks this page against the door, and writes it: `tests/unit/compat/test_parameters.py`.

* **same**: the same name and meaning.
* **mapped**: the same result, by something that has another name in Hotbed.
* **no effect**: a setting of GPUs, NCCL, MPI or asynchronous input, accepted and logged once.
* **different**: another result, and why.
"""


class Parameter(NamedTuple):
    """A parameter: its name, its kind (a key of KINDS), and what it is here."""

    name: str
    kind: str
    note: str = ""


def class_of(section: Mapping[str, Any]) -> Any:
    """Return the class of the door whose fields are the parameters; None if there is none."""
    if "fields" not in section:
        return None
    folder, _, name = section["fields"].rpartition(".")
    return getattr(importlib.import_module(f"hotbed.compat.hugectr.{folder}".rstrip(".")), name)


def parameters(section: Mapping[str, Any]) -> Iterator[Parameter]:
    """Yield the parameters of a section."""
    names: list[str] = list(section.get("names", ()))
    clause = class_of(section)
    if clause is not None:
        names = [field.name for field in dataclasses.fields(clause)] + names
    for name in names:
        if name not in section.get("leave_out", ()):
            yield parameter(section, name)


def parameter(section: Mapping[str, Any], name: str) -> Parameter:
    for kind in ("mapped", "different", "unused"):
        if name in section.get(kind, {}):
            return Parameter(name, kind, section[kind][name])
    knob = NO_EFFECT.get(f"{section.get('clause')}.{name}")
    if knob is not None:
        return Parameter(name, "unused", knob.reason)
    return Parameter(name, section.get("all", "same"))


def page() -> str:
    """Return the page."""
    counts = Counter(row.kind for section in SECTIONS for row in parameters(section))
    lines = [HEAD, "| | parameters | share |", "|---|---|---|"]
    for kind, text in KINDS.items():
        share = counts[kind] / counts.total()
        lines.append(f"| {text} | {counts[kind]} | {share:.0%} |")
    for section in SECTIONS:
        lines += ["", f"## {section['title']}", ""]
        if "whole" in section:
            lines += [section["whole"], ""]
        lines += ["| parameter | | here |", "|---|---|---|"]
        for row in parameters(section):
            lines.append(f"| `{row.name.rstrip('_')}` | {KINDS[row.kind]} | {row.note} |")
    return "\n".join([*lines, ""])


def test_page_is_that_of_the_tests() -> None:
    assert PAGE.read_text() == page()


def test_at_most_a_tenth_of_the_parameters_differ() -> None:
    kinds = [row.kind for section in SECTIONS for row in parameters(section)]
    assert kinds.count("different") <= len(kinds) / 10


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["title"])
def test_notes_are_of_parameters_that_are_there(section: dict[str, Any]) -> None:
    names = [row.name for row in parameters(section)]
    noted = [name for kind in KINDS for name in section.get(kind, {})]
    assert set(noted) <= set(names)
    assert len(set(noted)) == len(noted)
    assert len(set(names)) == len(names)


# --- the door ---------------------------------------------------------------------------------------

CLAUSES = [section for section in SECTIONS if "fields" in section]
DOOR = ROOT / "src/hotbed/compat/hugectr"


def of_kind(*kinds: str) -> list[Any]:
    """Return the fields of the door's classes that are of these kinds, as parameters of a test."""
    cases = []
    for section in CLAUSES:
        fields = {field.name for field in dataclasses.fields(class_of(section))}
        for row in parameters(section):
            if row.kind in kinds and row.name in fields:
                cases.append(pytest.param(section, row.name, id=f"{section['clause']}.{row.name}"))
    return cases


@pytest.fixture(scope="module")
def read_by_the_door() -> set[str]:
    """The attributes that the door reads, outside of the classes that hold them."""
    names = set()
    for file in DOOR.rglob("*.py"):
        if file.parent.name == "clauses" or file.name == "params.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


@pytest.mark.parametrize(("section", "name"), of_kind("same", "mapped"))
def test_door_reads_what_has_an_effect(
    section: dict[str, Any], name: str, read_by_the_door: set[str]
) -> None:
    assert name in read_by_the_door


@pytest.mark.parametrize(("section", "name"), of_kind("unused"))
def test_what_has_no_effect_is_logged_once(
    section: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"{section['clause']}.{name}"
    if key in NO_EFFECT:
        caplog.set_level("INFO", "hotbed.compat.hugectr")
        knobs._logged.discard(key)
        for _ in range(2):
            log_no_effect(key)
        assert caplog.text.count(f"{key} has no effect, because ") == 1


@pytest.mark.parametrize("knob", NO_EFFECT)
def test_each_knob_of_the_door_is_on_the_page(knob: str) -> None:
    clause, _, name = knob.rpartition(".")
    kinds = set()
    for section in SECTIONS:
        if section.get("clause") == clause:
            kinds |= {row.kind for row in parameters(section) if row.name == name}
    assert kinds
    assert kinds <= {"unused", "different"}


@pytest.mark.parametrize("key", SECTIONS[0]["names"])
def test_arguments_of_releases_in_between_are_taken(key: str) -> None:
    hugectr.CreateSolver(**{key: True})
    with pytest.raises(ConfigError, match="unknown argument"):
        hugectr.CreateSolver(**{f"{key}_": True})


@pytest.mark.parametrize("section", [one for one in SECTIONS if "methods" in one])
def test_methods_are_there(section: dict[str, Any]) -> None:
    missing = {row.name for row in parameters(section)} - set(
        dir(getattr(hugectr, section["methods"]))
    )
    assert missing == set()


@pytest.mark.parametrize(
    "key", [row.name for one in SECTIONS if one.get("read") == "solver" for row in parameters(one)]
)
def test_keys_of_a_solver_clause_are_known(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_solver({key: "?"})
    assert "unknown key" not in str(caught.value)


if __name__ == "__main__":
    PAGE.write_text(page())
