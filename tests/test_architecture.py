# SPDX-License-Identifier: Apache-2.0
"""The house rules, checked: order of imports, bans, limits of content, names, headers, links. The
allow-lists may only shrink.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import (
    ROOT,
    SOURCE,
    TESTS,
    imported_files,
    module_of,
    nodes_of,
    parsed,
    python_files,
)

# The path of the data is the order of imports: a folder imports only folders above it in this list,
# and the ground floor: `errors`, `config`, `checks`, `files` and `frozen`.
FOLDERS = [
    "pictures",
    "connectors",
    "data",
    "metrics",
    "embedding",
    "models",
    "parallel",
    "optim",
    "persist",
    "serving",
    "training",
    "job",
    "prepare",
    "quality",
    "watch",
    "compat",
    "cli",
    "testing",
]
BASE = {
    "errors",
    "config",
    "checks",
    "files",
    "frozen",
    "logs",
    "memory",
    "memory_limit",
    "objects",
    "plugins",
    "yaml_files",
    "signals",
}
NEVER = {"serving": {"optim", "parallel", "training"}, "training": {"serving"}}
# The modules that a folder may import beside the ground floor, where few of the folders before it
# will do.
ONLY = {
    "cli": {  # it parses and prints; they work
        "cli",
        "connectors.prepared",
        "job",
        "parallel.probe",
        "persist.upkeep.inspect",
        "persist.upkeep.kept",
        "persist.upkeep.rollback",
        "prepare",
        "quality",
        "serving.main",
        "training.device_checks",
        "training.devices",
        "watch",
    }
}
NATIVE = {
    "connectors/text/jsonl",
    "connectors/hugectr/norm",
    "connectors/text/rows",
    "data/columns",
    "data/histories/rule",
    "embedding/histories",
    "embedding/native",
    "embedding/table",
    "frozen",
    "memory",
    "models/layers/sequence/attend",
    "optim/sparse",
    "parallel/exchange",
    "serving/rows",
    "serving/cache",
    "serving/protocol/bodies",
}
TORCH = (
    "embedding/device/",
    "embedding/lookups/",
    "embedding/modules/",
    "models/",
    "optim/",
    "parallel/",
    "training/",
    "persist/state/checkpoint",
    "persist/state/network",
    "persist/state/restoring",
    "persist/publish/export",
    "persist/publish/independence",
    "persist/publish/plain/",
    "persist/publish/pooled_inputs",
    "persist/publish/read_lengths",
    "persist/publish/rejection",
    "compat/",
)

# The limits count content, so that packing code gains nothing.
COLUMNS = 100
FILE_NODES = 4500
FUNCTION_LINES = 60
PARAMETERS = 7
METHODS = 12
FOLDER_FILES = 20
FOLDER_DEPTH = 4
EXAMPLE_NODES = 1000  # two screens
LIKE_THINGS = {"models", "layers", "connectors", "compat"}  # one file each, as many as there are
# what -> why it may pass its limit
ALLOWED: dict[str, str] = {
    "embedding/table.py:Table.__init__": "every policy of a table is one keyword value of its "
    "constructor",
    "embedding/table.py:Table": "the verbs of design 3 and what a checkpoint needs share one "
    "invariant: the life of a slot",
    "testing/reference.py:ReferenceTable.__init__": "the same face as Table",
    "testing/reference.py:ReferenceTable": "the same methods as Table",
    "embedding/tables.py:make_tables": "the keywords of Table, for all tables",
    "embedding/modules/compiled.py:pool": "the flat argument list of a torch custom operator",
    "embedding/modules/compiled.py:_": "the same operator's shape function",
    "data/dataset.py:Dataset.__init__": "how a source is read is one keyword each; all but three "
    "have defaults",
    "training/decisions/checkpoint.py:Checkpoint.__init__": "when it saves, what stays and what a resume "
    "accepts are one keyword each",
    "cli/commands.py:init": "what a user says of a data file is one option each",
    "cli/commands.py:plan": "what a user says of the machines is one option each",
    "cli/commands.py:serve": "what a user says of the server is one option each",
    "cli/commands.py:parameter_server": "the options of `serve`",
    "cli/commands.py:route": "what a user says of the rule is one option each",
    "training/model.py:RecModel.__init__": "the eight arguments of mindspore_rec.RecModel",
    "training/model.py:RecModel.fit": "what is learned, how often, from which epoch to which "
    "step, and what watches it",
    "training/model.py:RecModel.online_train": "the four arguments of mindspore_rec, and what "
    "ends and watches a stream",
    "compat/hugectr/": "the arguments of HugeCTR's calls",
    "compat/mx_rec/": "the arguments of Rec SDK's calls",
    "compat/mindspore_rec/": "the arguments of MindSpore Recommender's calls",
    "models/": "a model's hyper-parameters are its constructor's keywords, as its paper names them",
}
# Functions that only pass on the keywords of what they wrap.
WRAPPERS = {
    "config.py:described.remembering.__init__",
    "parallel/log_lines.py:name_rank_in_logs.with_rank",
    "parallel/log_lines.py:name_rank_in_logs.warning_with_rank",
    "persist/publish/plain/integers.py:_for_integers.decomposed",
}
BAD_NAMES = re.compile(
    r"(^|_)(utils?|common|helpers?|managers?|misc)(_|$)|(Util|Utils|Helper|Manager|Common)$"
)
# A door keeps the dotted names of the original.
NAMED_ELSEWHERE = {
    "src/hotbed/compat/mx_rec/core/asc/helper.py",
    "src/hotbed/compat/mx_rec/core/asc/manager.py",
}
PRIVATE = re.compile(
    r"/work[/]|/root[/]|/home[/]\w|pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|debian\.org|golang\.org/"
)


def ours(suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Every file of the repository that ends so, outside build folders and hidden folders (but
    .ci).
    """
    roots = [
        ROOT / n
        for n in (
            "src",
            "csrc",
            "tests",
            "benchmarks",
            "deploy",
            "examples",
            "docs",
            "scripts",
            ".ci",
            "changes",
        )
    ]
    for folder in roots:
        yield from (
            p
            for p in sorted(folder.rglob("*"))
            if p.suffix in suffixes and "__pycache__" not in p.parts
        )
    yield from (
        p
        for p in sorted(ROOT.glob("*"))
        if p.is_file() and p.suffix in suffixes and p.name not in (".git", "dev_build.sh")
    )


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def allowed(key: str) -> bool:
    return any(key == k or (k.endswith("/") and key.startswith(k)) for k in ALLOWED)


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of each import in the file, at any depth; imports only a type checker
    sees are left out.
    """
    unseen = {
        id(inner)
        for node in nodes_of(path)
        if isinstance(node, ast.If) and is_for_a_type_checker(node.test)
        for inner in ast.walk(node)
    }
    modules = []
    for node in nodes_of(path):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            modules += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = module_of(node, path)
            modules.append((node.lineno, module))
            modules += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return modules


def is_for_a_type_checker(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def test_a_folder_imports_only_folders_before_it() -> None:
    wrong = []
    for path in python_files(SOURCE):
        home = path.relative_to(SOURCE).parts
        if len(home) == 1 and home[0] == "__init__.py":
            continue  # it stands after every folder
        place = home[0] if len(home) > 1 else None
        before = set(FOLDERS[: FOLDERS.index(place)]) | {place} if place else set()
        permitted = (before | BASE | {"_core"}) - NEVER.get(place or "", set())
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "hotbed" or len(parts) < 2:
                continue
            is_folder = (SOURCE / parts[1]).is_dir()
            if not is_folder and not (SOURCE / f"{parts[1]}.py").exists():
                continue
            if parts[1] not in permitted or (is_folder and not _may_import(place, parts[1:])):
                wrong.append(f"{relative(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def _may_import(place: str | None, parts: list[str]) -> bool:
    """Whether `ONLY` lets a folder import a module."""
    if place not in ONLY:
        return True
    prefixes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return bool(ONLY[place] & prefixes)


def test_the_command_line_may_import_only_the_listed_modules() -> None:
    assert _may_import("cli", ["persist", "upkeep", "inspect", "verify"])
    assert not _may_import("cli", ["persist", "container", "store"])
    assert not _may_import("cli", ["persist"])


def test_nothing_in_the_engine_names_a_front_door() -> None:
    """Imports are checked above; a name in a string would be an import in disguise."""
    wrong = []
    for path in python_files(SOURCE):
        if path.relative_to(SOURCE).parts[0] == "compat":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and "hotbed.compat" in str(node.value):
                wrong.append(f"{relative(path)}:{node.lineno} names {node.value!r}")
        wrong += [
            f"{relative(path)}:{line} imports {module}"
            for line, module in imports(path)
            if module.split(".")[:2] == ["hotbed", "compat"]
        ]
    assert not wrong, "\n".join(wrong)


def test_examples_and_benchmarks_import_names_that_exist() -> None:
    wrong = []
    for path in python_files(ROOT / "benchmarks", ROOT / "examples"):
        for node in nodes_of(path):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("hotbed"):
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                module = importlib.import_module(str(node.module))
                is_package = hasattr(module, "__path__")
                if is_package and importlib.util.find_spec(name) is not None:
                    continue  # a module of it
                if not hasattr(module, alias.name):
                    wrong.append(f"{path.name}:{node.lineno} {name}")
    assert not wrong, "\n".join(wrong)


def cycles(imported: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of files in which each file imports, directly or not, all the others."""
    reached: dict[str, set[str]] = {}
    for name in imported:
        reached[name] = set()
        waiting = list(imported[name])
        while waiting:
            other = waiting.pop()
            if other not in reached[name]:
                reached[name].add(other)
                waiting += imported[other]
    return {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imported
        if name in reached[name]
    }


def test_no_files_import_each_other() -> None:
    imported = {
        relative(path): {relative(file) for file in imported_files(path)}
        for path in python_files(SOURCE)
    }
    wrong = [
        "\n".join(f"{name} imports {sorted(imported[name] & cycle)}" for name in sorted(cycle))
        for cycle in cycles(imported)
    ]
    assert not wrong, "these files import each other:\n" + "\n\n".join(wrong)


def between_siblings(imported: dict[str, set[str]]) -> dict[str, dict[str, set[str]]]:
    """Return by folder which of its files and folders import which others of it.

    A folder imports what its files import. `imported`: which files each file imports.
    """
    folders: dict[str, dict[str, set[str]]] = {}
    for name, others in imported.items():
        for other in others:
            mine = name.removesuffix(".py").removesuffix("/__init__").split("/")
            its = other.removesuffix(".py").removesuffix("/__init__").split("/")
            depth = 0
            while depth < min(len(mine), len(its)) and mine[depth] == its[depth]:
                depth += 1
            if depth == min(len(mine), len(its)):
                continue  # a folder and what lies in it
            siblings = folders.setdefault("/".join(mine[:depth]), {})
            siblings.setdefault(mine[depth], set()).add(its[depth])
            siblings.setdefault(its[depth], set())
    return folders


def test_no_siblings_of_a_folder_import_each_other() -> None:
    """At every level: a folder in a ring with a file beside it is in the wrong place."""
    imported = {
        relative(path): {relative(file) for file in imported_files(path)}
        for path in python_files(SOURCE)
    }
    wrong = [
        f"{folder or '.'}: {sorted(cycle)}"
        for folder, siblings in between_siblings(imported).items()
        for cycle in cycles(siblings)
    ]
    assert not wrong, "these siblings import each other:\n" + "\n".join(wrong)


def test_a_ring_of_siblings_is_found() -> None:
    imported = {
        "a/b/x.py": {"a/c.py"},
        "a/c.py": {"a/b/y.py"},
        "a/b/y.py": set(),
        "d.py": {"a/c.py"},
    }
    found = {name: cycles(siblings) for name, siblings in between_siblings(imported).items()}
    assert found == {"a": {frozenset({"b", "c"})}, "": set()}


STREAMS = "embedding/device/streams.py"
NAMES_STREAMS = re.compile(
    r"torch\.(Event|Stream|accelerator\.(current_stream|set_stream|synchronize))|.*\.record_stream|pin_memory"
)
ATTRIBUTES = {"Event", "Stream", "current_stream", "set_stream", "synchronize", "record_stream"}


def test_one_file_names_the_streams_and_the_pinned_memory_of_torch() -> None:
    """So that a test can replace them, and a reader finds what travels beside the computation."""
    wrong = []
    for path in python_files(SOURCE):
        for node in nodes_of(path):
            name = ""
            if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
                name = ast.unparse(node)
            if isinstance(node, ast.keyword):
                name = node.arg or ""
            if NAMES_STREAMS.fullmatch(name) and relative(path) != STREAMS:
                wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


CONVERTER = "training/auto/"


def test_the_loop_does_not_know_the_converter() -> None:
    """The loop asks `training/step/network.py`; only `hb.auto` and the doors name the converter."""
    wrong = [
        f"{relative(path)} imports {sorted(converter)}"
        for path in python_files(SOURCE)
        if not relative(path).startswith((CONVERTER, "compat/"))
        and relative(path) != "__init__.py"
        and (
            converter := {f for f in map(relative, imported_files(path)) if f.startswith(CONVERTER)}
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_the_loop_asks_no_network_for_its_module() -> None:
    """What a network can do is what it says, and not where its class lies."""
    wrong = []
    for path in python_files(SOURCE / "training"):
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and str(node.value).startswith("hotbed.models"):
                wrong.append(f"{relative(path)}:{node.lineno} names {node.value!r}")
    assert not wrong, "\n".join(wrong)


def test_a_cycle_of_imports_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset({"b", "c"})}


def test_only_the_listed_files_touch_the_native_module() -> None:
    wrong = [
        f"{relative(path)}:{line}"
        for path in python_files(SOURCE)
        for line, module in imports(path)
        if module.startswith("hotbed._core") and relative(path).removesuffix(".py") not in NATIVE
    ]
    assert not wrong, wrong


def test_torch_is_imported_only_where_the_design_says() -> None:
    wrong = [
        f"{relative(path)}:{line}"
        for path in python_files(SOURCE)
        for line, module in imports(path)
        if module.split(".")[0] == "torch"
        and not relative(path).removesuffix(".py").startswith(TORCH)
    ]
    assert not wrong, wrong


def test_the_readme_names_the_folders_in_their_order() -> None:
    text = (ROOT / "README.md").read_text()
    (chain,) = re.findall(r"^    (connectors -> .+)$", text, re.M)
    others = ("pictures", "compat", "testing")
    assert chain.split(" -> ") == [name for name in FOLDERS if name not in others]


def test_folders_are_those_of_the_design() -> None:
    folders = {p.parent.relative_to(SOURCE) for p in python_files(SOURCE)} - {Path()}
    assert {folder.parts[0] for folder in folders} <= set(FOLDERS)
    deep = [str(folder) for folder in folders if len(folder.parts) > FOLDER_DEPTH]
    assert not deep, deep


def chosen_by_a_condition(node: ast.AST) -> bool:
    """Whether `node` is `a if c else b`, or stands in for it: `c and a or b`, `{True: a, False:
    b}[c]`.
    """
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        first = node.values[0]
        return (
            len(node.values) == 2
            and isinstance(first, ast.BoolOp)
            and isinstance(first.op, ast.And)
        )
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        keys = node.value.keys
        return any(isinstance(key, ast.Constant) and isinstance(key.value, bool) for key in keys)
    return isinstance(node, ast.IfExp)


def excess_of(path: Path) -> dict[str, int]:
    """What the file has too much of, and how much of it."""
    text = path.read_text()
    nodes = nodes_of(path)
    chosen = [node for node in nodes if chosen_by_a_condition(node)]
    inside = {id(inner) for node in chosen for inner in ast.walk(node) if inner is not node}
    packed = [
        node
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > 1
    ]
    counts = {
        "wide lines": sum(len(line) > COLUMNS and "://" not in line for line in text.splitlines()),
        "formatter switched off": len(re.findall(r"# fmt: (?:skip|off)", text)),
        "packed assignments": len(packed),
        "nested conditional expressions": sum(id(node) in inside for node in chosen),
        "syntax nodes": len(nodes) if len(nodes) > FILE_NODES else 0,
    }
    return {what: count for what, count in counts.items() if count}


def test_lines_hold_one_thought() -> None:
    wrong = [
        f"{relative(path)}: {count} {what}"
        for path in python_files(SOURCE)
        for what, count in excess_of(path).items()
    ]
    assert not wrong, "\n".join(wrong)


def test_folders_hold_few_files() -> None:
    counts = Counter(
        p.parent.relative_to(SOURCE) for p in python_files(SOURCE) if p.name != "__init__.py"
    )
    wrong = [
        f"{folder}: {count} files"
        for folder, count in counts.items()
        if count > FOLDER_FILES and not LIKE_THINGS & set(folder.parts)
    ]
    assert not wrong, "\n".join(wrong)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = node.body[0]
    docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return (
        node.end_lineno
        - node.lineno
        + 1
        - (first.end_lineno - first.lineno + 1 if docstring else 0)
    )


@functools.cache
def functions(path: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(dotted name, definition) of each function of a file."""
    named = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue  # it has no definitions
            name = (
                f"{prefix}{child.name}"
                if hasattr(child, "name") and not isinstance(child, ast.alias)
                else prefix
            )
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                named.append((name, child))
            walk(child, f"{name}." if name != prefix else prefix)

    walk(parsed(path), "")
    return named


def test_functions_are_short_and_take_few_parameters() -> None:
    wrong = []
    for path in python_files(SOURCE):
        for name, node in functions(path):
            key = f"{relative(path)}:{name}"
            a = node.args
            taken = [
                x.arg
                for x in [*a.posonlyargs, *a.args, *a.kwonlyargs]
                if x.arg not in ("self", "cls")
            ]
            if code_lines(node) > FUNCTION_LINES:
                wrong.append(f"{key}: {code_lines(node)} lines")
            if len(taken) > PARAMETERS and not allowed(key):
                wrong.append(f"{key}: {len(taken)} parameters")
            if a.kwarg and key not in WRAPPERS and not key.startswith("compat/"):
                wrong.append(f"{key}: **{a.kwarg.arg}")
    assert not wrong, "\n".join(wrong)


def test_classes_have_few_public_methods() -> None:
    wrong = []
    for path in python_files(SOURCE):
        for node in nodes_of(path):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [
                f.name
                for f in node.body
                if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
                and not f.name.startswith("_")
                and not any(
                    "property" in ast.unparse(d) or ".setter" in ast.unparse(d)
                    for d in f.decorator_list
                )
            ]
            if len(methods) > METHODS and not allowed(f"{relative(path)}:{node.name}"):
                wrong.append(
                    f"{relative(path)}:{node.name}: {len(methods)} public methods {methods}"
                )
    assert not wrong, "\n".join(wrong)


# Classes that others inherit from though they are not abstract, each with the reason.
INHERITED = {
    "Collector": "that of prometheus_client, which has the name of one here",
    "Journal": "a run may have that of one input in the place of a whole one",
    "Lock": "the locks of folders differ in the file that they lock, and in nothing else",
    "StepsTables": "it has no members: a mark of optimizers",
    "_JoinedDraft": "a draft that is opened here is joined by this process first",
}


def test_a_class_is_abstract_or_final() -> None:
    """Variants are values: a class inherits from abstract ones, errors, records and libraries.

    A door may have the classes of the original.
    """
    nodes = {
        node.name: node
        for path in python_files(SOURCE)
        if "compat" not in path.relative_to(SOURCE).parts
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }
    bases = {name: bases_of(node) for name, node in nodes.items()}
    final = {
        name
        for name, node in nodes.items()
        if not {"ABC", "Protocol", "nn.Module"} & bases[name]
        and not re.search(r"dataclass|abstractmethod", " ".join(decorators_in(node)))
        and not is_error(name, bases)
    }
    heirs = {name: of_class & final - INHERITED.keys() for name, of_class in bases.items()}
    assert {name: wrong for name, wrong in heirs.items() if wrong} == {}
    assert INHERITED.keys() <= set().union(*bases.values()), "the list may only shrink"


def decorators_in(node: ast.ClassDef) -> list[str]:
    """Return the decorators of a class and of its functions, as they are written."""
    functions = [f for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [ast.unparse(d) for each in [node, *functions] for d in each.decorator_list]


def bases_of(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).partition("[")[0] for base in node.bases}


def is_error(name: str, bases: dict[str, set[str]]) -> bool:
    if name not in bases:
        known = getattr(builtins, name, None)
        return isinstance(known, type) and issubclass(known, BaseException)
    return any(is_error(base, bases) for base in bases[name])


# Module constants that tests patch, each with the reason why it is not an argument. A new constant
# becomes an argument of an internal function or class instead.
PATCHED_CONSTANTS = {
    "hotbed.connectors.hugectr.norm.BLOCK_BYTES": "behind the public source Norm",
    "hotbed.connectors.join.turns.READ_ROWS": "behind the public source Join",
    "hotbed.connectors.join.matches.CHUNK_ROWS": "behind the public source Join",
    "hotbed.connectors.join.segment.SEGMENT_ROWS": "behind the public source Join",
    "hotbed.connectors.merge.READ_ROWS": "behind the public source Replay",
    "hotbed.connectors.text.delimited.ROW_BYTES": "behind the public sources of delimited text",
    "hotbed.connectors.text.delimited.SAMPLE_BYTES": "behind the public sources of delimited text",
    "hotbed.connectors.text.lines.BLOCK_BYTES": "behind the public sources of lines",
    "hotbed.cli.launch.GRACE_SECONDS": "how long the launcher of ranks waits for one that stands still",
    "hotbed.data.numbers.FIRST_ROWS": "behind the public Dataset",
    "hotbed.data.dataset.READ_ROWS": "behind the public Dataset",
    "hotbed.job.workload.SECONDS": "behind the public command plan",
    "hotbed.prepare.keyed.kept._PIECE": "behind a preparation, whose rows would be many",
    "hotbed.compat.mx_rec.graph.modifier.MOST_LOOKUPS": "behind modify_graph_and_start_emb_cache",
    "hotbed.persist.container.retention.LEASE_SECONDS": "behind the publishers",
    "hotbed.metrics.segments.BLOCK": "behind the public callback BySegment",
    "hotbed.metrics.segments.MOST_VALUES_OF_STREAM": "behind the public callback BySegment",
    "hotbed.objects.WAITS": "a test does not wait for a store that stays away",
    "hotbed.persist.container.check.rows._NUMBERS_AT_ONCE": "behind every reader of a state",
    "hotbed.persist.container.manifest.FLOATS_VERSION": "a fact of the code: a test writes another version",
    "hotbed.persist.publish.export.TOLERANCE": "a test switches a check off to reach the next one",
    "hotbed.persist.publish.topic._CONNECT_SECONDS": "behind the public PublishTopic",
    "hotbed.serving.server.scoring.models.START_SECONDS": "how long a start waits for a source",
    "hotbed.serving.stores.following._HANG_SECONDS": "how long a source may be read in silence",
    "hotbed.serving.stores.table_files._REMEMBERED_DELTAS": "behind the public ParameterServer",
    "hotbed.training.decisions.checkpoint.PATIENCE": "behind the public callback Checkpoint",
    "hotbed.training.ahead.cores.FAR_WORSE": "inside `online_train`, which makes its own Cores",
    "hotbed.training.watching.history.MAX_POINTS": "behind the public callback History",
}
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")


def patched_constants(path: Path) -> set[str]:
    """Return the dotted names of the constants that a file of tests patches with `setattr`."""
    modules: dict[str, str] = {}
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            module = module_of(node, path)
            modules |= {name.asname or name.name: f"{module}.{name.name}" for name in node.names}
    names = set()
    for node in nodes_of(path):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "setattr" or not node.args:
            continue
        owner, *rest = node.args
        if isinstance(owner, ast.Constant):
            name = str(owner.value)
        else:
            attribute = rest[0].value if rest and isinstance(rest[0], ast.Constant) else ""
            name = f"{modules.get(ast.unparse(owner), ast.unparse(owner))}.{attribute}"
        if CONSTANT.fullmatch(name.rpartition(".")[2]):
            names.add(name)
    return names


def test_tests_patch_only_the_listed_constants() -> None:
    """Also: each listed one is still patched."""
    patched: set[str] = set()
    for path in python_files(TESTS):
        if "setattr" in path.read_text():
            patched |= patched_constants(path)
    assert patched == PATCHED_CONSTANTS.keys(), sorted(patched ^ PATCHED_CONSTANTS.keys())


def test_every_allowance_is_still_needed() -> None:
    """An allowed name that is gone leaves the list."""
    names = {f"{relative(p)}:{n}" for p in python_files(SOURCE) for n, _ in functions(p)}
    classes = {
        f"{relative(p)}:{n.name}"
        for p in python_files(SOURCE)
        for n in nodes_of(p)
        if isinstance(n, ast.ClassDef)
    }
    assert [k for k in ALLOWED if not k.endswith("/") and k not in names | classes] == []


def test_no_file_or_class_has_a_name_that_says_nothing() -> None:
    wrong = []
    for path in ours((".py", ".cpp", ".h")):
        if BAD_NAMES.search(path.stem) and path.relative_to(ROOT).as_posix() not in NAMED_ELSEWHERE:
            wrong.append(str(path.relative_to(ROOT)))
        if path.suffix == ".py":
            classes = re.findall(r"^ *class (\w+)", path.read_text(), re.M)
            wrong += [f"{path.relative_to(ROOT)}:{c}" for c in classes if BAD_NAMES.search(c)]
    assert not wrong, wrong


# These words say nothing of the value: `slots`, not `found`.
BAD_LOCALS = {
    "found",
    "one",
    "held",
    "known",
    "given",
    "told",
    "kept",
    "at",
    "made",
    "taken",
    "own",
}


def test_local_names_say_what_they_hold() -> None:
    wrong = []
    for path in python_files(SOURCE):
        fields = {
            id(node.target)
            for scope in nodes_of(path)
            if isinstance(scope, ast.ClassDef)
            for node in scope.body
            if isinstance(node, ast.AnnAssign)
        }
        for node in nodes_of(path):
            is_set = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if is_set and node.id in BAD_LOCALS and id(node) not in fields:
                wrong.append(f"{relative(path)}:{node.lineno} {node.id}")
    assert not wrong, "\n".join(wrong)


def test_each_package_maps_its_files_in_its_docstring() -> None:
    """A line each: `name.py  what it is`, and `folder/  what it is`."""
    wrong = []
    for path in [p for p in python_files(SOURCE) if p.name == "__init__.py" and p.parent != SOURCE]:
        files = {p.name for p in path.parent.glob("*.py")} - {"__init__.py"}
        folders = {f"{p.parent.name}/" for p in path.parent.glob("*/__init__.py")}
        text = ast.get_docstring(parsed(path)) or ""
        mapped = set(re.findall(r"^ *(\w+(?:\.py|/))  +\S", text, re.M))
        expected = files | folders
        if len(expected) > 1 and mapped != expected:
            wrong.append(f"{relative(path)}: {sorted(mapped ^ expected)}")
    assert not wrong, "\n".join(wrong)


# Classes of one name in two files of the engine, each with its reason.
SAME_NAMES = {
    "Concat": "sources one after the other; HugeCTR's layer",
    "History": "the metrics of a run, as in Keras; the embeddings of a sample's history",
    "MSE": "a metric and a loss, each in its own namespace",
    "Slice": "a range of a source's rows; HugeCTR's layer",
    "Softmax": "a layer and a loss, each in its own namespace",
}


def test_a_class_name_of_the_engine_means_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for path in python_files(SOURCE):
        if not relative(path).startswith("compat/"):  # these have the names of other systems
            for node in nodes_of(path):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, set()).add(relative(path))
    wrong = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    assert wrong.keys() == SAME_NAMES.keys(), wrong


ITEM = re.compile(r"^ +[*\w.]+: (?:The|An?|Its?|Of|Whether|How|What|Which|Number|Name)\b", re.M)


def test_docstrings_describe_arguments_in_lower_case() -> None:
    wrong = []
    for path in python_files(SOURCE):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                items = ITEM.findall(ast.get_docstring(node) or "")
                wrong += [f"{relative(path)}:{node.lineno} {item.strip()}" for item in items]
    assert not wrong, "\n".join(wrong)


def test_no_bare_or_blanket_except_and_no_mutable_default() -> None:
    wrong = []
    for path in python_files(SOURCE):
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{relative(path)}:{node.lineno} bare except")
            if isinstance(node, ast.FunctionDef):
                defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
                if any(isinstance(d, ast.List | ast.Dict | ast.Set) for d in defaults):
                    wrong.append(f"{relative(path)}:{node.lineno} mutable default")
    assert not wrong, wrong


def test_every_type_error_that_is_ignored_has_a_reason() -> None:
    """It stands behind the mark, or as a comment on the line before."""
    wrong = []
    for path in python_files(SOURCE):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            _, mark, rest = line.partition("# type: ignore")
            is_explained = "# " in rest or lines[number - 1].lstrip().startswith("# ")
            if mark and not is_explained:
                wrong.append(f"{relative(path)}:{number + 1}")
    assert not wrong, "\n".join(wrong)


def test_the_bindings_keep_to_the_stable_abi() -> None:
    """Macros such as PyBytes_AS_STRING do not compile in the wheel of Python 3.12 and newer."""
    macro = re.compile(r"\bPy[A-Z][A-Za-z]*_(?:AS|GET|SET)_[A-Z_]+\b")
    files = sorted((ROOT / "csrc/bind").glob("*.*"))
    assert files
    wrong = {path.name: found for path in files if (found := macro.findall(path.read_text()))}
    assert not wrong


def test_every_source_file_carries_its_licence() -> None:
    wrong = [
        str(p.relative_to(ROOT))
        for p in ours((".py", ".cpp", ".h", ".sh"))
        if "SPDX-License-Identifier: Apache-2.0" not in "\n".join(p.read_text().splitlines()[:3])
    ]
    assert not wrong, wrong


def test_nothing_names_a_machine_or_a_registry() -> None:
    suffixes = (
        ".py",
        ".pyi",
        ".cpp",
        ".h",
        ".md",
        ".toml",
        ".txt",
        ".sh",
        ".yaml",
        ".yml",
        ".json",
        ".html",
        "",
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in ours(suffixes)
        if path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_checkpoint_is_tracked_outside_the_golden_ones() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    wrong = [
        name
        for name in listed.stdout.splitlines()  # empty in a tree without git
        if Path(name).name in ("CURRENT", "MANIFEST.json") and not name.startswith("tests/golden/")
    ]
    assert not wrong, wrong


def test_links_in_the_documents_lead_somewhere() -> None:
    wrong = []
    for path in ours((".md",)):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if (
                not re.match(r"https?:|mailto:|#", target)
                and not (path.parent / target.split("#")[0]).exists()
            ):
                wrong.append(f"{path.relative_to(ROOT)}: {target}")
        for name in re.findall(
            r"`((?:src|csrc|tests|docs|examples|benchmarks|scripts)/[\w./-]+\.\w+)`", text
        ):
            if not (ROOT / name).exists():
                wrong.append(f"{path.relative_to(ROOT)}: `{name}`")
    assert not wrong, "\n".join(wrong)


def test_the_changelog_has_each_item_once_in_two_lines_below_its_page() -> None:
    """An older list that a merge brought back fails here."""
    text = (ROOT / "CHANGELOG.md").read_text()
    items = re.findall(r"^- .+(?:\n  .+)*", text, re.M)
    assert [item for item, count in Counter(items).items() if count > 1] == []
    assert [item[:80] for item in items if item.count("\n") > 1] == []
    added = text.partition("\n### Added\n")[2].partition("\n### ")[0]
    before_headings = added.partition("\n#### ")[0]
    assert not before_headings.strip()
    sections = re.findall(r"^#### .+\n\n((?:[- ] .+\n)+)", added, re.M)
    assert max(section.count("\n- ") for section in sections) < 30, "a section is too long"


def test_the_page_of_the_architecture_is_that_of_the_tree() -> None:
    """After a change run `python scripts/architecture.py`."""
    spec = importlib.util.spec_from_file_location("drawing", ROOT / "scripts/architecture.py")
    assert spec is not None
    assert spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    sys.modules["drawing"] = drawing  # its dataclasses look for their module
    spec.loader.exec_module(drawing)
    text = drawing.PAGE.read_text()
    assert text == drawing.page(text)
    assert drawing.PICTURE.read_text() == drawing.picture(text)
    stations = drawing.stations(text)
    numbers = [int(station.number) for station in stations if station.number]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {station.floor for station in stations} <= set(FOLDERS)
    walks = re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\*\*From .+?\n\n", text, re.M | re.S)))
    assert len(walks) > 20
    names = {path.stem for path in python_files(SOURCE)} | {
        node.name
        for path in python_files(SOURCE)
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [walk for walk in walks if not names.issuperset(walk.split("."))] == []
    homes = [(station.floor, file) for station in stations for file in station.files]
    assert all(file.startswith((f"src/hotbed/{floor}/", "csrc/")) for floor, file in homes)


def test_each_part_begins_in_a_file_and_has_a_suite() -> None:
    """That the files are there is checked with the links of the documents."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Add a part\n")[2]
    rows = re.findall(r"^\| (an? .+?) \| (.+?) \| (.+?) \| (.+?) \|$", text, re.M)
    assert len(rows) > 15
    for part, begin, _, suite in rows:
        assert re.search(r"`src/hotbed/[\w/]+\.py`", begin), part
        assert re.search(r"`tests/[\w/]+\.py`", suite), part


TRANSLATED = {"README.md": "README.zh-CN.md"} | {
    f"docs/{page.name}": f"docs/zh/{page.name}" for page in (ROOT / "docs/zh").glob("*.md")
}
SKELETON = r"^#+ |^```.*?^```|^    [^\n]+$|\]\((?!README|#|zh/|\.\./index)[^)]+\)|\*\*[\d.]+x\*\*|^\d+\. `[^`]+`"


def skeleton(page: str) -> list[str]:
    """Levels of headings, code, commands, targets of links and figures in bold, in their order."""
    parts = re.findall(SKELETON, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [part.replace("](../", "](") if "/zh/" in page else part for part in parts]


@pytest.mark.parametrize("page", sorted(TRANSLATED))
def test_a_chinese_page_keeps_step_with_the_english_one(page: str) -> None:
    assert skeleton(TRANSLATED[page]) == skeleton(page)
    assert _figures(TRANSLATED[page]) == _figures(page)


def test_examples_fit_on_two_screens() -> None:
    sizes = {
        p.name: sum(1 for _ in ast.walk(ast.parse(p.read_text())))
        for p in python_files(ROOT / "examples")
    }
    assert {name: size for name, size in sizes.items() if size > EXAMPLE_NODES} == {}


def test_the_public_names_are_the_golden_list() -> None:
    """A name that comes or goes is a decision: change tests/golden/public_names.txt and the
    changelog with it.
    """
    import hotbed

    assert hotbed.__all__ == sorted(hotbed.__all__)
    assert hotbed.__all__ == (ROOT / "tests/golden/public_names.txt").read_text().split()


def test_every_public_name_resolves_and_is_documented() -> None:
    import hotbed

    bare = [name for name in hotbed.__all__ if not (getattr(hotbed, name).__doc__ or "").strip()]
    assert not bare


@pytest.mark.parametrize(
    "statement",
    [
        "import hotbed as hb; hb.Table, hb.Dataset, hb.Adagrad, hb.Schema, hb.sources, "
        "hb.transforms",
        "import hotbed.persist.container.format, hotbed.data.encode, hotbed.embedding.table, hotbed.job, "
        "hotbed.cli.commands",
    ],
)
def test_data_tables_and_formats_live_without_torch(statement: str) -> None:
    heavy = [
        "torch",
        "onnxruntime",
        "fastapi",
        "grpc",
        "confluent_kafka",
        "matplotlib",
        "tensorboard",
    ]
    code = (
        f"import sys; heavy = {heavy!r}\nfor name in heavy: sys.modules[name] = None\n{statement}\n"
        "assert not [n for n in sys.modules if n.split('.')[0] in heavy and sys.modules[n]]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_torch_a_name_that_needs_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nimport hotbed as hb\n"
        "try:\n    hb.RecModel\nexcept hb.errors.MissingExtra as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "hotbed[train]" in done.stdout, done.stdout + done.stderr


def _figures(page: str) -> Counter[float]:
    """Every number in the prose and the tables of a page; 万 is ten thousand."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    scale = {"M": 1e6, "万": 1e4, "": 1.0}
    numbers = re.findall(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?: ?(M\b|万))?", prose)
    return Counter(float(number.replace(",", "")) * scale[unit] for number, unit in numbers)


def test_figures_are_found_in_prose_and_tables() -> None:
    english = _figures("README.md")
    assert english[5.2] == english[8.9] == 1  # strong and weak ones
    assert len(TRANSLATED) == 8


CPU_BUDGET = 940
"""CPU seconds of `make test` on two cores; a capability may add at most 30."""


def test_the_recorded_cost_of_the_suite_is_within_its_budget() -> None:
    recorded = json.loads((ROOT / "tests" / "durations.json").read_text())
    assert sum(cpu for _, cpu in recorded.values()) <= CPU_BUDGET
    gone = [name for name in recorded if name.endswith(".py") and not (ROOT / name).exists()]
    assert not gone, f"{gone} are gone. Run make durations."
