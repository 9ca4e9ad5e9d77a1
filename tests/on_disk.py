# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows lie on a disk, with few of them in memory, for tests that hold them to Ram."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hotbed as hb


def on_disk(ram_rows: int, *, fetch: int = 0) -> hb.Ssd:
    return hb.Ssd(tempfile.gettempdir(), ram_rows, fetch=fetch)


@contextmanager
def mounted(folder: Path, *, kib: int) -> Iterator[Path]:
    """Mount a disk of so many KiB; skip the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounts absent")
    try:
        yield folder
    finally:
        # at once for others, and for a table that is still open in it when that ends
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def room_for(folder: Path, *, kib: int) -> None:
    """Give the disk that is mounted there so many KiB."""
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(folder)], check=True)
