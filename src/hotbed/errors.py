# SPDX-License-Identifier: Apache-2.0
"""Every error that Hotbed raises on purpose.

HotbedError
├── ConfigError (ValueError)        a value, key or combination in the configuration is wrong
├── DataError (ValueError)          the input data is wrong
│   ├── SchemaError                 a column is missing, or its type does not fit its role
│   ├── DecodeError                 a file holds bytes that cannot be read (file, row, column)
│   └── RequestTooLarge             a request to a server has more entries than it scores
├── TableError                      an embedding table rejects an operation
│   ├── TableFull                   a batch holds more unique ids than the table may keep
│   ├── RowShapeError (ValueError)  ids, slots, rows or gradients have the wrong shape or dtype
│   ├── NonFiniteGradient           a gradient is NaN or infinite (table, id)
│   └── StorageError                rows on a disk (`hb.Ssd`) cannot be written or read
│       ├── StorageFull             the disk has no room; nothing has changed
│       ├── StorageFailed           a write failed: the table takes no more
│       └── RecordLost              a row cannot be read, or is not what was written
├── PersistError                    a checkpoint cannot be written or read
│   ├── FormatError                 a file is torn, foreign or fails its digest
│   ├── VersionError                this build does not read the format version of a file
│   ├── NotWritten                  a folder cannot be written: a full disk, missing rights
│   ├── StoreAway                   an object store does not answer; try again later
│   ├── DeltaGap                    the states between the current one and a delta are missing
│   └── ForkedLineage               a delta belongs to a run that branched off earlier
├── ServingError                    a server cannot answer
│   ├── NotServed                   the model, or that version of it, is not loaded
│   ├── Overloaded                  too many requests wait; try again later
│   ├── Unauthorized                the token is missing or wrong
│   └── StoreError                  a store of rows did not answer in time, or at all
├── DeviceError (RuntimeError)      a device of the network failed, or its memory is full
├── RankLost (RuntimeError)         the connection to another process of the job is lost
└── MissingExtra (ImportError)      an optional dependency is not installed

A message says where the error is, what is wrong, which value was received and what to do.
"""

from __future__ import annotations

import contextlib
import os
import traceback

__all__ = [
    "ConfigError",
    "DataError",
    "DecodeError",
    "DeltaGap",
    "DeviceError",
    "ForkedLineage",
    "FormatError",
    "HotbedError",
    "MissingExtra",
    "NonFiniteGradient",
    "NotServed",
    "NotWritten",
    "Overloaded",
    "PersistError",
    "RankLost",
    "RecordLost",
    "RequestTooLarge",
    "RowShapeError",
    "SchemaError",
    "ServingError",
    "StorageError",
    "StorageFailed",
    "StorageFull",
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
    """Return `text` with characters escaped that UTF-8 cannot hold, such as odd file names have."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class HotbedError(Exception):
    """Base of every deliberate error."""

    def __init__(self, *arguments: object) -> None:
        texts = [printable(part) if isinstance(part, str) else part for part in arguments]
        super().__init__(*texts)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter show: the user's call, and the message.

        With the environment variable HOTBED_TRACEBACK all frames are shown.
        """
        if os.environ.get("HOTBED_TRACEBACK"):
            return traceback.format_exception(self)
        package = os.path.dirname(__file__)
        notebook = f"{os.sep}IPython{os.sep}"
        of_decorators = contextlib.__file__
        shown = []
        for frame in traceback.extract_tb(self.__traceback__):
            if frame.filename.startswith(package):
                break
            if notebook not in frame.filename and frame.filename != of_decorators:
                shown.append(frame)
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


class RequestTooLarge(DataError):
    """A request is larger than a server takes: send fewer candidates, or shorter lists."""


class TableError(HotbedError):
    """An embedding table rejects an operation."""


class TableFull(TableError):
    """A batch needs more rows than the table's eviction policy lets it keep."""


class RowShapeError(TableError, ValueError):
    """Ids, slots, rows or gradients have the wrong shape or dtype, or rows are not finite."""


class NonFiniteGradient(TableError):
    """A gradient is NaN or infinite; nothing was updated. Attributes: `table`, `id`."""

    def __init__(self, message: str, table: str = "", id: int | None = None) -> None:
        super().__init__(message)
        self.table = table
        self.id = id


class StorageError(TableError):
    """Rows of a table on a disk cannot be written or read; the last checkpoint is whole.

    The message names the file, and of a row that is lost its extent, block, table and id.
    """


class StorageFull(StorageError):
    """The disk has no room for the rows of a batch; nothing has changed."""


class StorageFailed(StorageError):
    """A write to the disk failed: the table takes no more changes; resume from a checkpoint."""


class RecordLost(StorageError):
    """A row on the disk cannot be read, or is not what was written; resume from a checkpoint."""


class PersistError(HotbedError):
    """A checkpoint cannot be written or read."""


class NotWritten(PersistError):
    """A folder cannot be written, for example on a full disk; its files may still be readable."""


class FormatError(PersistError):
    """A file is torn, foreign, or fails its digest; the message names it."""


class VersionError(PersistError):
    """A file's format version is not one that this build reads."""


class StoreAway(PersistError):
    """An object store does not answer; its objects may be whole."""


class DeltaGap(PersistError):
    """A delta cannot be applied yet: states between the current one and the delta are missing."""


class ForkedLineage(PersistError):
    """A delta does not descend from the current state; the next full of its run resolves this."""


class ServingError(HotbedError):
    """A server cannot answer a request; the request itself may be right."""


class NotServed(ServingError):
    """A model, or that version of it, is not loaded."""


class Overloaded(ServingError):
    """Too many requests wait; the same request may succeed later."""


class Unauthorized(ServingError):
    """The token is missing or wrong; a second try with the same token fails as well."""


class StoreError(ServingError):
    """A store of rows does not answer in time, or no longer has the requested version."""


class DeviceError(HotbedError, RuntimeError):
    """A device on which a network computes failed in a step, or its memory is full."""


class RankLost(HotbedError, RuntimeError):
    """The connection to another process of the job is lost: it is gone, stopped or late."""


class MissingExtra(HotbedError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""
