# SPDX-License-Identifier: Apache-2.0
"""The software of a process, which all ranks of a job must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hotbed


def software() -> dict[str, Any]:
    """Return what decides the bits of a training beside its settings, by name."""
    return {
        "the versions of hotbed and torch": (hotbed.__version__, str(torch.__version__)),
        "code of hotbed with the digest": _digest_of_hotbed(),
        "the instruction set, which ATEN_CPU_CAPABILITY can lower,": (
            torch.backends.cpu.get_cpu_capability()
        ),
    }


def digest_of_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _digest_of_hotbed() -> str:
    """Return a digest of the Python files of Hotbed."""
    return digest_of_files(sorted(Path(hotbed.__file__).parent.rglob("*.py")))
