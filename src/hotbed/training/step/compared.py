# SPDX-License-Identifier: Apache-2.0
"""Settings of a program as plain values, which ranks can compare.

Objects that Hotbed can describe are compared by their description. A network or any other object
is compared by the attributes that the code of its class reads, without those that its methods set:
these are state. A function is compared by its bytecode and by the values that it reads: defaults,
globals, and variables of the function around it.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.config import GIVEN, describe
from hotbed.embedding.modules import TableModule
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.parallel import digest_of

PLAIN = (bool, int, float, complex, str, bytes)
WORDS = (enum.Enum, PurePath, range, slice, torch.dtype, torch.device)
"""Types whose values have a text that says all of them."""

BAGS = (argparse.Namespace, SimpleNamespace)
"""Classes of known packages whose values hold what a program puts there."""

MOST_OBJECTS = 10_000
"""That are looked at for one that reads an attribute."""
DEPTH = 12
"""How many values deep in each other are looked at."""
_KNOWN = {"hotbed", "numpy", "torch", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose functions have the same code on all ranks: versions are compared elsewhere."""


def compared(value: Any, *, weights: bool = True) -> Any:
    """Return plain values that are equal on two processes if the value does the same on both.

    Args:
        value: a setting, a function, a network or any other object.
        weights: whether the parameters and buffers of networks count.
    """
    return _Comparison(weights).of(value, frozenset(), 0)


def reads_name(value: Any, name: str) -> bool:
    """Return whether the code of an object reads an attribute, as far as that can be seen.

    The code is that of the methods of its class, of functions that it holds, and of those that they
    name, but for known packages. An object that leads to very many others is said to read it.
    """
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FunctionType):
            if _is_known(value):
                continue
            if name in _words_in(value.__code__):
                return True
        left += _led_to(value)
        if len(seen) + len(left) > MOST_OBJECTS:
            return True
    return False


def _led_to(value: Any) -> Iterable[Any]:
    """Return the values through which an object leads to code, but for that of known packages."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        named = _globals_of(value.__code__) & value.__globals__.keys()
        of_globals = [value.__globals__[name] for name in named]
        return [*of_globals, *(_content(cell) for cell in value.__closure__ or ())]
    if isinstance(value, type):
        return [] if _is_known(value) else _functions_in(value)
    if isinstance(value, BAGS) or not _is_known(type(value)):
        return [*type(value).__mro__, *getattr(value, "__dict__", {}).values()]
    return ()


def _functions_in(kind: type) -> list[FunctionType]:
    return [function for value in vars(kind).values() for function in _functions_of(value)]


class _Comparison:
    """Reads one value; each object in it counts once."""

    def __init__(self, weights: bool) -> None:
        self._weights = weights
        self._read: list[Any] = []  # the objects, which must live while their ids count
        self._ids: set[int] = set()

    def of(self, value: Any, names: frozenset[str], depth: int) -> Any:
        """Return a value as plain ones; `names`: those of attributes that its reader knows."""
        if value is None or isinstance(value, PLAIN):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, WORDS):
            return str(value)
        if torch.is_tensor(value):
            return _of_tensor(value)
        if isinstance(value, np.ndarray):
            return _of_array(value)
        if depth == DEPTH or id(value) in self._ids:
            return type(value).__qualname__
        self._ids.add(id(value))
        self._read.append(value)
        depth += 1
        if isinstance(value, Mapping):
            return {str(key): self.of(each, names, depth) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.of(each, names, depth) for each in value]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(self.of(each, names, depth)) for each in value)
        return self._of_object(value, names, depth)

    def _of_object(self, value: Any, names: frozenset[str], depth: int) -> Any:
        if isinstance(value, Table):
            return str(value.config)
        if isinstance(value, nn.Module):
            return self._of_network(value, depth)
        if isinstance(value, functools.partial):
            bound = (value.func, value.args, value.keywords)
            return [self.of(part, names, depth) for part in bound]
        if isinstance(value, MethodType):
            method = (value.__func__, value.__self__)
            return [self.of(part, names, depth) for part in method]
        if isinstance(value, FunctionType):
            return self._of_function(value, depth)
        if isinstance(value, ModuleType):
            return self._of_module(value, names, depth)
        if isinstance(value, type):
            return self._of_class(value, names, depth)
        if hasattr(value, "__qualname__"):  # a function that is not written in Python
            return value.__qualname__
        kind: type = type(value)
        if _is_known(kind) and kind not in BAGS:
            return self._described(value, depth)
        settings = {"": kind.__qualname__, **self._of_class_of(kind, depth)}
        wanted = (names | _read_by(kind)) - _set_by(kind)
        return settings | self._attributes(value, wanted, depth)

    def _described(self, value: Any, depth: int) -> Any:
        """Return the description of a value of Hotbed; the name of its class where it has none."""
        try:
            return describe(value)
        except ConfigError:
            kind = type(value).__qualname__
        arguments = vars(value).get("_described") if hasattr(value, "__dict__") else None
        if arguments is None:
            return kind
        return {"": kind} | {n: self.of(v, frozenset(), depth) for n, v in arguments.items()}

    def _of_network(self, network: nn.Module, depth: int) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        arguments = getattr(network, "_described", {})
        for name, value in arguments.items():
            if name not in GIVEN:
                settings[name] = self.of(value, frozenset(), depth)
        for path, module in network.named_modules():
            kind: type = type(module)
            settings[f"{path or 'all'} is"] = kind.__qualname__
            if isinstance(module, TableModule):
                settings[f"{path} looks up"] = [str(feature) for feature in module.layout.features]
                continue
            values = self._attributes(module, _read_by(kind) - _set_by(kind), depth)
            settings |= {f"{path}.{name}".lstrip("."): value for name, value in values.items()}
            settings |= self._of_class_of(kind, depth)
        if self._weights:
            for name, value in (*network.named_parameters(), *network.named_buffers()):
                settings[name] = _of_tensor(value)
        return settings

    def _attributes(self, value: Any, wanted: frozenset[str], depth: int) -> dict[str, Any]:
        """Return the attributes of an object that are wanted, but for private containers."""
        settings = {}
        for name, each in sorted(getattr(value, "__dict__", {}).items()):
            is_cache = name.startswith("_") and isinstance(each, (Mapping, list, set))
            if name in wanted and not is_cache:
                settings[name] = self.of(each, wanted, depth)
        return settings

    def _of_class_of(self, kind: type, depth: int) -> dict[str, Any]:
        """Return what the classes of an object are, but for those of known packages."""
        settings = {}
        for cls in kind.__mro__:
            if not _is_known(cls) and id(cls) not in self._ids:
                self._ids.add(id(cls))
                settings[f"class {cls.__qualname__}"] = self._of_class(cls, _read_by(kind), depth)
        return settings

    def _of_class(self, cls: type, names: frozenset[str], depth: int) -> Any:
        if _is_known(cls):
            return cls.__qualname__
        settings = {}
        for name, value in vars(cls).items():
            for function in _functions_of(value):
                settings[name] = self._of_function(function, depth)
            if name in names and isinstance(value, PLAIN):
                settings[name] = value
        return settings

    def _of_module(self, module: ModuleType, names: frozenset[str], depth: int) -> Any:
        """Return the values of a module that its reader names."""
        if module.__name__.partition(".")[0] in _KNOWN:
            return module.__name__
        settings = {}
        for name in sorted(names):
            value = getattr(module, name, None)
            if isinstance(value, (*PLAIN, FunctionType)):
                settings[name] = self.of(value, names, depth)
        return settings

    def _of_function(self, function: FunctionType, depth: int) -> Any:
        if _is_known(function):
            return function.__qualname__
        code = function.__code__
        names = frozenset(name for part in _parts_of(code) for name in part.co_names)
        settings = {"code with the digest": _digest_of_code(code)}
        defaults = (function.__defaults__, function.__kwdefaults__)
        settings["defaults"] = self.of(defaults, names, depth)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                settings[name] = self.of(_content(cell), names, depth)
        for name in sorted(_globals_of(code)):
            if name in function.__globals__:
                settings[name] = self.of(function.__globals__[name], names, depth)
        return settings


def _of_tensor(tensor: Tensor) -> str:
    values = tensor.detach().cpu()
    if values.layout != torch.strided or values.is_quantized:
        values = values.to_dense()
    return f"{values.dtype} {list(values.shape)} with the digest {digest_of([values])}"


def _of_array(array: np.ndarray) -> str:
    digest = hashlib.sha256(repr(array.tolist()).encode()).hexdigest()[:12]
    return f"{array.dtype} {list(array.shape)} with the digest {digest}"


def _is_known(value: Any) -> bool:
    """Return whether a class or a function is that of a package whose version is compared."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in _KNOWN


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not set yet
        return None


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of an attribute of a class."""
    if isinstance(value, property):
        parts: tuple[Any, ...] = (value.fget, value.fset)
    elif isinstance(value, functools.cached_property):
        parts = (value.func,)
    else:
        parts = (getattr(value, "__func__", value),)
    for part in parts:
        if isinstance(part, FunctionType):
            yield part


def _parts_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _parts_of(value)


def _words_in(code: CodeType) -> frozenset[str]:
    """Return the names and the texts in the code of a function."""
    parts = list(_parts_of(code))
    texts = [value for part in parts for value in part.co_consts if isinstance(value, str)]
    return frozenset(texts).union(*(part.co_names for part in parts))


def _names_in(code: CodeType, *operations: str) -> frozenset[str]:
    return frozenset(
        instruction.argval
        for part in _parts_of(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname in operations
    )


@functools.cache
def _globals_of(code: CodeType) -> frozenset[str]:
    return _names_in(code, "LOAD_GLOBAL", "LOAD_NAME")


def _digest_of_code(code: CodeType) -> str:
    digest = hashlib.sha256()
    for part in _parts_of(code):
        values = [value for value in part.co_consts if not isinstance(value, CodeType)]
        texts = [
            repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
            for value in values
        ]
        digest.update(repr((part.co_code, texts, part.co_names, part.co_varnames)).encode())
    return digest.hexdigest()[:12]


def _methods_of(kind: type) -> Iterator[CodeType]:
    """Yield the code of the methods of a class and those above, but for the making of an object."""
    for cls in kind.__mro__:
        if cls not in (object, nn.Module):
            for name, value in vars(cls).items():
                if name != "__init__":
                    yield from (function.__code__ for function in _functions_of(value))


@functools.cache
def _read_by(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class read."""
    return frozenset(
        name for code in _methods_of(kind) for part in _parts_of(code) for name in part.co_names
    )


@functools.cache
def _set_by(kind: type) -> frozenset[str]:
    """Return the names of attributes that the methods of a class set."""
    return frozenset(name for code in _methods_of(kind) for name in _names_in(code, "STORE_ATTR"))
