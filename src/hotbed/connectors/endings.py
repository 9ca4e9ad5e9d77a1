# SPDX-License-Identifier: Apache-2.0
"""Which source reads a file, by the ending of its name."""

from __future__ import annotations

import os
from typing import Any

from hotbed.connectors.compression import ending_of
from hotbed.connectors.files import FileSource
from hotbed.connectors.parquet import Parquet
from hotbed.connectors.source import Source
from hotbed.connectors.text.delimited import Csv
from hotbed.connectors.text.jsonl import Jsonl
from hotbed.connectors.text.libsvm import Libsvm
from hotbed.errors import ConfigError

FILE_KINDS: tuple[Any, ...] = (Csv, Jsonl, Libsvm, Parquet)
"""Every kind of file source whose files have an ending of their own; a new one is added here."""


def source_for(path: str) -> FileSource | None:
    """Return the source that reads a file, by the ending of its name; None = unknown ending."""
    ending = ending_of(path)
    for kind in FILE_KINDS:
        if ending in kind.endings:
            source: FileSource = kind(path, **kind.endings[ending])
            return source
    return None


def check_source(source: Any, where: str = "dataset.source") -> None:
    """Raise ConfigError, with the source to use instead, if `source` is not a Source."""
    if isinstance(source, Source):
        return
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        advice = "Give a value of hb.sources, such as hb.sources.Memory(columns)."
        raise ConfigError(f"{where}: not a source, got {kind}. {advice}")
    path = os.fspath(source)
    name = type(source_for(path) or Csv(path)).__name__
    raise ConfigError(f"{where}: not a source, got {path!r}. Give hb.sources.{name}({path!r}).")
