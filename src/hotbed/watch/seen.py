# SPDX-License-Identifier: Apache-2.0
"""Everything that the page shows, at one moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hotbed.watch.asked import AskedServer, ServerAnswer
from hotbed.watch.measured import MeasuredFolder, MeasuredQuality
from hotbed.watch.refreshed import Look, Refreshed
from hotbed.watch.run_folder import RunFolder, SeenRun

_FIRST_SECONDS = 3.0


@dataclass(frozen=True)
class Seen:
    """What the page shows.

    Attributes:
        run: what the run wrote.
        quality: what was measured; None = nobody measures.
        servers: what each server answered, by its address.
    """

    run: Look[SeenRun]
    quality: Look[MeasuredQuality] | None
    servers: Mapping[str, Look[ServerAnswer]]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite are null."""
        plain: dict[str, Any] = _plain(self)
        return plain


class Watched:
    """A run, the measurement of what was served, and servers, each read on a thread of its own.

    Args:
        run: reads the folder of the run.
        quality: the output folder of `hotbed measure`; None = `quality` in the folder of the run,
            once it is there.
        servers: asks each server.
        every_seconds: seconds between two looks at each of them.
    """

    def __init__(
        self,
        run: RunFolder,
        quality: Path | None,
        servers: Sequence[AskedServer],
        every_seconds: float,
    ) -> None:
        self._run = Refreshed(run.read, every_seconds)
        self._is_measured = quality is not None
        measured = MeasuredFolder(quality or run.folder / "quality")
        self._quality = Refreshed(measured.read, every_seconds)
        self._servers = {server.url: Refreshed(server.read, every_seconds) for server in servers}

    def start(self) -> None:
        """Begin to look again and again; wait a while for the first looks."""
        for refreshed in self._all():
            refreshed.start()
        for refreshed in self._all():
            refreshed.wait(_FIRST_SECONDS)

    def close(self) -> None:
        """End all threads."""
        for refreshed in self._all():
            refreshed.close()

    def seen(self) -> Seen:
        """Return what was seen last."""
        quality = self._quality.look
        is_shown = self._is_measured or quality.value is not None
        servers = {url: server.look for url, server in self._servers.items()}
        return Seen(self._run.look, quality if is_shown else None, servers)

    def _all(self) -> list[Refreshed[Any]]:
        return [self._run, self._quality, *self._servers.values()]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime):
        return value.isoformat()
    return value
