# SPDX-License-Identifier: Apache-2.0
"""A door translates: its syntax trees have no arithmetic on arrays, and no loop over rows.

Numbers of shapes, sizes and rates may be computed. Arrays may be made, cut, put side by side,
looked at and handed on; all that changes their numbers belongs to the engine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotbed

DOOR = Path(hotbed.__file__).parent / "compat"
LIBRARIES = ("numpy", "torch")
ALLOWED = {
    "numpy": {
        "arange",
        "argmax",
        "argsort",
        "array",
        "asarray",
        "ascontiguousarray",
        "concatenate",
        "count_nonzero",
        "dtype",
        "empty",
        "errstate",
        "float32",
        "float64",
        "full",
        "int32",
        "int64",
        "integer",
        "isfinite",
        "memmap",
        "ndarray",
        "repeat",
        "save",
        "savetxt",
        "searchsorted",
        "stack",
        "typing",
        "uint32",
        "unique",
        "zeros",
    },
    "torch": {
        "Tensor",
        "as_tensor",
        "compiler",
        "device",
        "dtype",
        "float32",
        "from_numpy",
        "full_like",
        "fx",
        "get_num_threads",
        "int32",
        "int64",
        "is_grad_enabled",
        "manual_seed",
        "nn",
        "no_grad",
        "optim",
        "tensor",
        "utils",
        "zeros",
    },
}
"""What a door may use of a library: names of types, and calls that do no arithmetic."""
ARITHMETIC = {
    "add_",
    "bmm",
    "clamp",
    "clip",
    "cumprod",
    "cumsum",
    "div_",
    "dot",
    "einsum",
    "exp",
    "log",
    "matmul",
    "mean",
    "mm",
    "mul_",
    "prod",
    "sigmoid",
    "softmax",
    "sqrt",
    "square",
    "sub_",
    "sum",
    "var",
}
ROWS = {"iter_rows", "iterrows", "itertuples", "to_pylist"}
ARRAYS = ("NDArray", "Tensor", "ndarray", "Array")


def faults(text: str) -> list[str]:
    """Return what a module of a door must not have, with its lines."""
    tree = ast.parse(text)
    libraries = _libraries(tree)
    found = list(_foreign(tree, libraries))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in ROWS:
                found.append(f"{node.lineno}: {name} of rows")
            if name in ARITHMETIC and _root(node.func) not in ("math", "statistics"):
                found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found.append(f"{node.lineno}: a product of matrices")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += _of_arrays(node, libraries)
    return found


def _libraries(tree: ast.AST) -> dict[str, str]:
    """Return the library by the name that a module gives it."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in LIBRARIES:
                    names[alias.asname or alias.name] = alias.name
    return names


def _foreign(tree: ast.AST, libraries: dict[str, str]) -> Iterator[str]:
    """Yield uses of a library that are not allowed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            library, _, part = node.module.partition(".")
            names = [part.partition(".")[0]] if part else [alias.name for alias in node.names]
            if library in LIBRARIES and not ALLOWED[library].issuperset(names):
                yield f"{node.lineno}: from {node.module} import {', '.join(names)}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            library = libraries.get(node.value.id, "")
            if library and node.attr not in ALLOWED[library]:
                yield f"{node.lineno}: {library}.{node.attr}"


def _of_arrays(
    function: ast.FunctionDef | ast.AsyncFunctionDef, libraries: dict[str, str]
) -> Iterator[str]:
    """Yield arithmetic on the arrays of a function, and loops over them."""
    arrays = set()
    for argument in (*function.args.args, *function.args.kwonlyargs):
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        if kind.partition("[")[0].rpartition(".")[2] in ARRAYS:
            arrays.add(argument.arg)
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if _root(node.value.func) in libraries:
            arrays |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def is_array(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in arrays

    for node in ast.walk(function):
        operands: list[ast.AST] = []
        if isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        elif isinstance(node, ast.AugAssign):
            operands = [node.target, node.value]
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            operands = [node.operand]
        elif isinstance(node, ast.For | ast.comprehension):
            operands = [node.iter]
        for operand in operands:
            if is_array(operand):
                yield f"{operand.lineno}: {ast.unparse(operand)!r} in {type(node).__name__}"


def _root(node: ast.AST) -> str:
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_a_door_computes_nothing() -> None:
    found = []
    for path in sorted(DOOR.rglob("*.py")):
        for fault in faults(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(DOOR)}:{fault}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import numpy as np\nnp.exp(1)", "2: numpy.exp"),
        ("import torch\ntorch.matmul(a, b)", "2: torch.matmul"),
        ("from torch import softmax", "1: from torch import softmax"),
        ("from torch.nn.functional import relu\nx @ y", "2: a product of matrices"),
        ("x.cumsum(0)", "1: cumsum"),
        ("for row in table.to_pylist(): pass", "1: to_pylist of rows"),
        ("def f(x: Tensor):\n  return x * 2", "2: 'x' in BinOp"),
        ("def f(x: NDArray[np.float32]):\n  x += 1", "2: 'x' in AugAssign"),
        ("import numpy as np\ndef f():\n  a = np.zeros(3)\n  return -a", "4: 'a' in UnaryOp"),
        ("def f(rows: np.ndarray):\n  return [r for r in rows]", "2: 'rows' in comprehension"),
    ],
)
def test_arithmetic_is_found(text: str, fault: str) -> None:
    assert fault in faults(text)


def test_numbers_of_shapes_are_allowed() -> None:
    text = "import math\ndef f(sizes: list[int]):\n  return math.prod(sizes) * 4 + sizes[0] // 2"
    assert not faults(text)
