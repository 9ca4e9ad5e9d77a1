# SPDX-License-Identifier: Apache-2.0
"""What each parameter and rule of another system is here, from a YAML file for each door.

    python tests/unit/compat/parameter_pages.py    # writes docs/migrate/<door>_parameters.md

Keys of a section:

    title      heading of the section
    whole      text under the heading
    fields     the parameters are the fields of this class of the door
    call       the parameters are those of this callable of the door
    attributes  the parameters are attributes of this class of the door
    places     where the door has what `names` names: modules or classes
    names      parameters without a default
    defaults   parameters with the defaults of the other system
    other_defaults  the same, as text: defaults that have another value here
    ranges     intervals of the other system, such as "(0, 1]", for some of the parameters
    clause     under which the door knows parameters that have no effect
    all        kind of the parameters that are named nowhere else; else `same`
    mapped     the same result, by something with another name: what it is
    unused     no effect: why
    different  another result: why
    rules      checks, errors and promises of the other system: each has a `rule`, its `kind`, what it is
               `here`, and the `test` that shows it, in one of the files `tests` or in another:
               `file.py::test`
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import yaml

from hotbed.compat.hugectr.knobs import NO_EFFECT as HUGECTR_NO_EFFECT
from hotbed.compat.mindspore_rec.no_effect import REASONS as MINDSPORE_REASONS
from hotbed.compat.mx_rec.no_effect import REASONS as REC_SDK_REASONS

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[2] / "docs/migrate"
KINDS = {"same": "same", "mapped": "mapped", "unused": "no effect", "different": "different"}


class Parameter(NamedTuple):
    """A parameter.

    Attributes:
        kind: a key of KINDS.
        note: what it is here.
        default: its default in the other system, as text; "" = it has none.
        range: its interval in the other system; "" = any.
    """

    name: str
    kind: str
    note: str = ""
    default: str = ""
    range: str = ""


class Rule(NamedTuple):
    """A check, an error or a promise of the other system.

    Attributes:
        kind: a key of KINDS.
        here: what it is here.
        test: shows it.
        files: one of them has the test; relative to this folder.
    """

    rule: str
    kind: str
    here: str
    test: str
    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Door:
    """A door, and the file that says what its parameters are.

    Attributes:
        name: of the YAML file and of the page.
        package: where `fields` and `call` of a section are looked up.
        no_effect: reasons of parameters that the door itself lists as without effect, by
            `<clause>.<parameter>`.
    """

    name: str
    package: str
    no_effect: Mapping[str, str]

    @cached_property
    def file(self) -> dict[str, Any]:
        return yaml.load((FOLDER / f"{self.name}_parameters.yaml").read_text(), yaml.CSafeLoader)

    @property
    def sections(self) -> list[dict[str, Any]]:
        return self.file["sections"]

    @property
    def page(self) -> Path:
        return DOCS / f"{self.name.replace('_', '')}_parameters.md"

    def look_up(self, path: str) -> Any:
        """Return what the door has under a dotted path."""
        found: Any = importlib.import_module(self.package)
        for name in path.split("."):
            if isinstance(found, ModuleType) and not hasattr(found, name):
                importlib.import_module(f"{found.__name__}.{name}")
            found = getattr(found, name)
        return found

    def parameters(self, section: Mapping[str, Any]) -> Iterator[Parameter]:
        """Yield the parameters of a section."""
        defaults = {name: repr(value) for name, value in section.get("defaults", {}).items()}
        defaults |= section.get("other_defaults", {})
        ranges = section.get("ranges", {})
        names = [*section.get("names", ()), *defaults]
        if "fields" in section:
            fields = dataclasses.fields(self.look_up(section["fields"]))
            names = [field.name for field in fields] + names
        for name in names:
            if name not in section.get("leave_out", ()):
                kind, note = self._kind(section, name)
                yield Parameter(name, kind, note, defaults.get(name, ""), ranges.get(name, ""))

    def _kind(self, section: Mapping[str, Any], name: str) -> tuple[str, str]:
        for kind in ("mapped", "different", "unused"):
            if name in section.get(kind, {}):
                return kind, section[kind][name]
        reason = self.no_effect.get(f"{section.get('clause')}.{name}")
        if reason is not None:
            return "unused", reason
        return section.get("all", "same"), ""

    def rules(self, section: Mapping[str, Any]) -> Iterator[Rule]:
        """Yield the rules of a section."""
        for rule in section.get("rules", ()):
            file, _, test = rule["test"].rpartition("::")
            files = [file] if file else self.file["tests"]
            kind = rule.get("kind", "same")
            yield Rule(rule["rule"], kind, rule.get("here", ""), test, tuple(files))

    def kinds(self) -> Counter[str]:
        """Return the number of parameters and rules of each kind."""
        counts: Counter[str] = Counter()
        for section in self.sections:
            counts.update(parameter.kind for parameter in self.parameters(section))
            counts.update(rule.kind for rule in self.rules(section))
            counts["same"] += len(section.get("ranges", ()))
        return counts

    def text(self) -> str:
        """Return the page."""
        counts = self.kinds()
        counted = "parameters"
        if any("rules" in section for section in self.sections):
            counted = "parameters, ranges and rules"
        lines = [self.file["head"], f"| | {counted} | share |", "|---|---|---|"]
        for kind, name in KINDS.items():
            share = counts[kind] / counts.total()
            lines.append(f"| {name} | {counts[kind]} | {share:.0%} |")
        for section in self.sections:
            lines += self._section(section)
        return "\n".join([*lines, ""])

    def _section(self, section: Mapping[str, Any]) -> Iterator[str]:
        yield from ("", f"## {section['title']}")
        if "whole" in section:
            yield from ("", section["whole"])
        parameters = list(self.parameters(section))
        with_defaults = "defaults" in section
        if parameters and with_defaults:
            yield from ("", "| parameter | default and range there | | here |", "|---|---|---|---|")
        elif parameters:
            yield from ("", "| parameter | | here |", "|---|---|---|")
        for row in parameters:
            cells = [f"`{row.name.rstrip('_')}`", KINDS[row.kind], row.note]
            if with_defaults:
                default = f"`{row.default}`" if row.default else ""
                cells.insert(1, ", ".join(cell for cell in (default, row.range) if cell))
            yield f"| {' | '.join(cells)} |"
        rules = list(self.rules(section))
        if rules:
            yield from ("", "| rule there | | here |", "|---|---|---|")
        for rule in rules:
            yield f"| {rule.rule} | {KINDS[rule.kind]} | {rule.here} |"


HUGECTR = Door(
    "hugectr",
    "hotbed.compat.hugectr",
    {key: knob.reason for key, knob in HUGECTR_NO_EFFECT.items()},
)
REC_SDK = Door("rec_sdk", "hotbed.compat.mx_rec", REC_SDK_REASONS)
MINDSPORE = Door("mindspore", "hotbed.compat.mindspore_rec", MINDSPORE_REASONS)
DOORS = (HUGECTR, REC_SDK, MINDSPORE)


if __name__ == "__main__":
    for door in DOORS:
        door.page.write_text(door.text())
