# SPDX-License-Identifier: Apache-2.0
"""The stub of the native module, which mypy and editors read, says what the module is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hotbed


def test_the_committed_stub_is_the_one_that_the_module_generates(tmp_path: Path) -> None:
    """Renew it with: python -m nanobind.stubgen -m hotbed._core -o src/hotbed/_core.pyi"""
    made = tmp_path / "_core.pyi"
    words = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "hotbed._core", "-o", str(made)]
    subprocess.run(words, check=True, capture_output=True)
    assert made.read_text() == (Path(hotbed.__file__).parent / "_core.pyi").read_text()
