# SPDX-License-Identifier: Apache-2.0
"""Classes of other packages, by module and name, and what such packages register.

A kind `mypackage.nets:MaskNet` is the class `MaskNet` of the module `mypackage.nets`. A package may
give it a short name in the entry-point group `hotbed.kinds`:

    [project.entry-points."hotbed.kinds"]
    mask_net = "mypackage.nets:MaskNet"

Modules are looked for on `sys.path` alone. A job file that a person names adds its own folder at
the end of it, if a kind in it names a module that lies there and nowhere else.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import operator
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from hotbed.errors import ConfigError

KINDS = "hotbed.kinds"
"""The entry-point group in which packages give short names to their classes."""

NAME = r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*"
"""The pattern of a kind that names a module and a class."""

_NAME = re.compile(NAME, re.ASCII)
_LOG = logging.getLogger("hotbed")


def names_class(kind: object) -> bool:
    """Return whether a kind names a module and a class, as `mypackage.nets:MaskNet` does."""
    return isinstance(kind, str) and _NAME.fullmatch(kind) is not None


def short_kind(kind: Any) -> Any:
    """Return the name of a class in snake case for its kind `module:name`; other values as is."""
    if not isinstance(kind, str) or ":" not in kind:
        return kind
    return snake_case(re.split(r"[.:]", kind)[-1])


def snake_case(name: str) -> str:
    """Return a name in lower case with `_` between its words: `clickTime` becomes `click_time`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


def name_of(cls: type) -> str | None:
    """Return `module:name` of a class that can be imported by it; None for others."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "__main__":
        return None
    try:
        is_there = operator.attrgetter(cls.__qualname__)(module) is cls
    except AttributeError:  # made inside a function
        return None
    return f"{cls.__module__}:{cls.__qualname__}" if is_there else None


def registered(group: str) -> list[EntryPoint]:
    """Return what the installed packages register in a group, by name."""
    return sorted(entry_points(group=group), key=lambda entry: entry.name)


def find_class(kind: str, path: str) -> type | None:
    """Return the class of a kind `module:name` or of a registered kind; None for other kinds.

    Args:
        kind: the kind.
        path: of the key that names it, for messages.

    Raises:
        ConfigError: the module cannot be imported, or has no such class; or several packages
            register the kind.
    """
    name = kind
    if not names_class(kind):
        targets = sorted({entry.value for entry in registered(KINDS) if entry.name == kind})
        if not targets:
            return None
        if len(targets) > 1:
            raise ConfigError(
                f"{path}: several packages register this kind, got {kind!r} for "
                f"{', '.join(targets)}. Name one of these."
            )
        name = targets[0].replace(" ", "")
    module_name, _, class_name = name.partition(":")
    module = _imported(module_name, kind, path)
    try:
        cls = operator.attrgetter(class_name)(module)
    except AttributeError as error:
        raise ConfigError(
            f"{path}: there is no {class_name!r} in {_file_of(module) or module_name}, got "
            f"{kind!r}. Correct the name of the class."
        ) from error
    if not isinstance(cls, type):
        raise ConfigError(
            f"{path}: not a class, got {kind!r}, which is {type(cls).__name__}. Name a class."
        )
    return cls


def _imported(name: str, kind: str, path: str) -> ModuleType:
    is_new = name not in sys.modules
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the module does
        advice = "Correct the module."
        top = name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name in (top, name):
            advice = (
                "Install its package, put its folder on PYTHONPATH, or put it beside the job file."
            )
        raise ConfigError(
            f"{path}: cannot be imported, got {kind!r}: {type(error).__name__}: {error}"
            f"{_line_in(error)}. {advice}"
        ) from error
    if is_new:
        _LOG.info("%s: %s is imported from %s", path, kind, _file_of(module))
    return module


def _line_in(error: BaseException) -> str:
    """Return where a module failed; "" where the error says it, or did not come from its lines."""
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    if not lines or isinstance(error, SyntaxError):
        return ""
    return f" ({lines[-1].filename}, line {lines[-1].lineno})"


def _file_of(module: ModuleType) -> str | None:
    file: str | None = getattr(module, "__file__", None)
    return file


def _children(cls: type) -> list[type]:
    """Return the classes directly below `cls`; none for a final class of Hotbed.

    It stays final if a user derives from it.
    """
    children: list[type] = type.__subclasses__(cls)
    is_abstract = inspect.isabstract(cls) or not is_ours(cls)
    return children if is_abstract or any(map(is_ours, children)) else []


def is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "hotbed"


def final_classes(cls: type) -> list[type]:
    """Return the final classes below `cls`.

    A class of Hotbed is abstract or final, so a class with children cannot be a choice.
    """
    final: list[type] = []
    for child in _children(cls):
        below = final_classes(child)
        if below:
            final += below
        elif not inspect.isabstract(child):
            final.append(child)
    return final


# --- the folder of a job --------------------------------------------------------------------------


def look_beside(file: Path, spec: Any) -> None:
    """Let modules be found in the folder of a job file, if a kind in it names one that lies there.

    The folder goes to the end of `sys.path`, so that no file in it takes the place of a module
    that is installed.

    Args:
        file: a local file, which a person named.
        spec: its plain values.
    """
    folder = file.resolve().parent
    if str(folder) in sys.path:
        return
    for kind in _names_in(spec):
        top = kind.partition(":")[0].partition(".")[0]
        lies_there = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if lies_there and top not in sys.modules and importlib.util.find_spec(top) is None:
            sys.path.append(str(folder))
            importlib.invalidate_caches()
            _LOG.info("%s: modules of its kinds are looked for in %s, too", file, folder)
            return


def _names_in(spec: Any) -> Iterator[str]:
    """Yield the texts in plain values that are kinds `module:name`, or look like them."""
    if isinstance(spec, Mapping):
        for value in spec.values():
            yield from _names_in(value)
    elif isinstance(spec, (list, tuple)):
        for value in spec:
            yield from _names_in(value)
    elif names_class(spec):
        yield spec


# --- their sources --------------------------------------------------------------------------------


def digests(spec: Any) -> dict[str, str]:
    """Return the digests of the sources of the classes that plain values name under `kind`."""
    by_kind: dict[str, str] = {}
    if isinstance(spec, Mapping):
        kind = spec.get("kind")
        if isinstance(kind, str) and names_class(kind):
            by_kind[kind] = _digest_of(_imported(kind.partition(":")[0], kind, "kind").__name__)
        for value in spec.values():
            by_kind |= digests(value)
    elif isinstance(spec, (list, tuple)):
        for value in spec:
            by_kind |= digests(value)
    return by_kind


@functools.cache
def _digest_of(module: str) -> str:
    """Return the digest of a module that was imported, and of its neighbours that it imports.

    Neighbours are modules of the same package; of a module without a package, those in its folder,
    unless packages are installed there.
    """
    digest = hashlib.sha256()
    for name, file in sorted(_neighbours(module).items()):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"sha256:{digest.hexdigest()}"


def _neighbours(module: str) -> dict[str, Path]:
    """Return the files of a module and of its neighbours that it imports, by name."""
    origin = _file_of(sys.modules[module])
    if origin is None:
        return {}
    top = module.partition(".")[0]
    is_package = hasattr(sys.modules[top], "__path__")
    folder = Path(origin).parent
    if is_package:
        first = Path(_file_of(sys.modules[top]) or origin)
        folder = first.parent.parent
    installed = {Path(path) for path in sysconfig.get_paths().values()}
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        is_near = name.partition(".")[0] == top or not (is_package or folder in installed)
        file = _source(folder, name) if name != module else Path(origin)
        if name in files or not is_near or file is None:
            continue
        files[name] = file
        waiting += _imports(name, file)
        waiting.append(name.rpartition(".")[0])
    return files


def _source(folder: Path, name: str) -> Path | None:
    """Return the file of a module below a folder, if it is there."""
    path = folder.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if name and file.is_file():
            return file
    return None


def _imports(name: str, file: Path) -> Iterator[str]:
    """Yield the names that a module imports: of modules, and of what may be modules."""
    if file.suffix != ".py":
        return
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}"
