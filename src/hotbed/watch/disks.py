# SPDX-License-Identifier: Apache-2.0
"""The disks on which the run and its versions lie."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DiskSpace:
    """A disk as this machine sees it. `folders`: on it. `free_bytes`, `total_bytes`: its own."""

    folders: tuple[str, ...]
    free_bytes: int
    total_bytes: int


def disk_spaces(folders: Iterable[Path]) -> list[DiskSpace]:
    """Return the disk of each folder that exists, each disk once."""
    by_device: dict[int, list[Path]] = {}
    for folder in folders:
        if folder.is_dir():
            by_device.setdefault(folder.stat().st_dev, []).append(folder)
    spaces = []
    for together in by_device.values():
        usage = shutil.disk_usage(together[0])
        names = tuple(dict.fromkeys(str(folder) for folder in together))
        spaces.append(DiskSpace(names, usage.free, usage.total))
    return spaces
