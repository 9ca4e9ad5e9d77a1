# SPDX-License-Identifier: Apache-2.0
"""Every error that Hotbed raises on purpose.

HotbedError
├── ConfigError (ValueError)           a value, key or combination in the configuration is wrong
├── DataError (ValueError)             the input data is wrong
│   ├── SchemaError                    a column is missing or has a type its role cannot take
│   └── DecodeError                    a file holds bytes that cannot be read (file, row, column)
├── TableError                         an embedding table refuses an operation
│   ├── TableFull                      a batch holds more unique ids than the table may keep
│   ├── RowShapeError (ValueError)     ids, slots, rows or gradients have the wrong shape or dtype
│   └── NonFiniteGradient              a gradient is NaN or infinite (table, id)
├── PersistError                       a checkpoint cannot be written or read
│   ├── FormatError                    a file is torn, foreign or fails its digest
│   ├── VersionError                   a file has a format version that this build does not read
│   ├── NotWritten                     a folder cannot be written: a full disk, missing rights
│   ├── StoreAway                      an object store does not answer; try again later
│   ├── DeltaGap                       a delta does not follow the state at hand: deltas between, or the full, are missing
│   └── ForkedLineage                  a delta belongs to a run that branched off from the state at hand
├── ServingError                       a server cannot answer
│   ├── NotServed                      the model, or that version of it, is not loaded
│   ├── Overloaded                     too many requests wait; try again later
│   ├── Unauthorized                   the server refuses the token, or wants one
│   └── StoreError                     rows did not come from where they are kept, or not in time
└── MissingExtra (ImportError)         an optional dependency is not installed

A message says what happened, what was received and what to do.
"""

from __future__ import annotations

import os
import traceback

__all__ = [
    "ConfigError",
    "DataError",
    "DecodeError",
    "DeltaGap",
    "ForkedLineage",
    "FormatError",
    "HotbedError",
    "MissingExtra",
    "NonFiniteGradient",
    "NotServed",
    "NotWritten",
    "Overloaded",
    "PersistError",
    "RowShapeError",
    "SchemaError",
    "ServingError",
    "StoreAway",
    "StoreError",
    "TableError",
    "TableFull",
    "Unauthorized",
    "VersionError",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def printable(text: str) -> str:
    """Return `text` with what UTF-8 cannot hold escaped, such as the bytes of an odd file name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class HotbedError(Exception):
    """Base of every deliberate error."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(printable(part) if isinstance(part, str) else part for part in arguments)
        )

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter show: the user's call, and the message.

        With the environment variable HOTBED_TRACEBACK all frames are shown.
        """
        if os.environ.get("HOTBED_TRACEBACK"):
            return traceback.format_exception(self)
        frames = traceback.extract_tb(self.__traceback__)
        package = os.path.dirname(__file__)
        inside = [frame.filename.startswith(package) for frame in frames]
        own = frames[: inside.index(True)] if True in inside else frames
        shown = [frame for frame in own if f"{os.sep}IPython{os.sep}" not in frame.filename]
        return [*traceback.format_list(shown), f"{type(self).__name__}: {self}"]


class ConfigError(HotbedError, ValueError):
    """A configured value is wrong; the message starts with its dotted path."""


class DataError(HotbedError, ValueError):
    """Input data cannot be used."""


class SchemaError(DataError):
    """A column is missing or its type does not fit its role."""


class DecodeError(DataError):
    """Bytes of a source cannot be decoded.

    Attributes: `file`, `row` (1-based line or row, None if unknown), `column` (None if unknown).
    """

    def __init__(
        self, message: str, file: str = "", row: int | None = None, column: str | None = None
    ) -> None:
        super().__init__(message)
        self.file = file
        self.row = row
        self.column = column


class TableError(HotbedError):
    """An embedding table refuses an operation."""


class TableFull(TableError):
    """A batch needs more rows than the table's eviction policy lets it keep."""


class RowShapeError(TableError, ValueError):
    """Ids, slots, rows or gradients have the wrong shape or dtype."""


class NonFiniteGradient(TableError):
    """A gradient is NaN or infinite; nothing was updated. Attributes: `table`, `id`."""

    def __init__(self, message: str, table: str = "", id: int | None = None) -> None:
        super().__init__(message)
        self.table = table
        self.id = id


class PersistError(HotbedError):
    """A checkpoint cannot be written or read."""


class NotWritten(PersistError):
    """A folder cannot be written, as where the disk is full; what is in it may still be read."""


class FormatError(PersistError):
    """A file is torn, foreign, or fails its digest; the message names it."""


class VersionError(PersistError):
    """A file's format version is not one that this build reads."""


class StoreAway(PersistError):
    """An object store does not answer; what it holds may be whole."""


class DeltaGap(PersistError):
    """A delta cannot be applied yet: what lies between the state at hand and it is missing."""


class ForkedLineage(PersistError):
    """A delta descends from another state than the one at hand; the next full of its run recovers."""


class ServingError(HotbedError):
    """A server cannot answer a request that may well be right."""


class NotServed(ServingError):
    """A model, or that version of it, is not loaded."""


class Overloaded(ServingError):
    """Too many requests wait; the same one may succeed later."""


class Unauthorized(ServingError):
    """The server wants a token and got none, or a wrong one; another try with the same one fails as
    well.
    """


class StoreError(ServingError):
    """A store of rows does not answer, not in time, or no longer has the version that was asked
    for.
    """


class MissingExtra(HotbedError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""
