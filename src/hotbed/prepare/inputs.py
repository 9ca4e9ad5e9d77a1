# SPDX-License-Identifier: Apache-2.0
"""The input files of a preparation, which must stay as they are while it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hotbed.connectors.file_identity import text_of
from hotbed.connectors.files import FileSource
from hotbed.connectors.memory import Memory
from hotbed.connectors.prepared import Prepared
from hotbed.connectors.source import Source
from hotbed.errors import DataError
from hotbed.files import digest_of
from hotbed.objects import Identity, is_url

_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class _State:
    """What the file system says of a file: any change of it differs in one of these."""

    size: int
    modified: int
    inode: int
    changed: int

    @staticmethod
    def of(path: str) -> _State | Identity:
        """Return what is said of a file; of an object it is its identity."""
        if is_url(path):
            return Identity.of(path)
        facts = os.stat(path)
        return _State(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns)


@dataclass(frozen=True)
class Inputs:
    """The files of a source as they were when a preparation began.

    `states`: by path. `digests`: SHA-256 by path. `source`: the source, of these files alone.
    """

    source: Source
    states: Mapping[str, _State | Identity]
    digests: Mapping[str, str]

    def check(self) -> None:
        """Check that no file has changed since.

        Raises:
            DataError: a file was replaced, written, or removed.
        """
        for path, before in self.states.items():
            try:
                now = _State.of(path)
                if now == before or self._is_same(path, before, now):
                    continue
                sizes = f"{now.size:,} bytes instead of {before.size:,}"
                difference = f"{sizes}, or another content"
            except FileNotFoundError:
                difference = "no such file"
            raise DataError(
                f"{path}: the file changed while it was prepared, got {difference}. Prepare again "
                "once nothing writes it."
            )

    def _is_same(self, path: str, before: _State | Identity, now: _State | Identity) -> bool:
        """Return whether a file has its content: a new link or other rights change it, too."""
        if isinstance(before, Identity) or isinstance(now, Identity):
            return False
        is_written = dataclasses.replace(now, changed=before.changed) != before
        return not is_written and digest_of_input(path) == self.digests[path]

    def to_json(self) -> dict[str, Any]:
        """Return the digest of the source, and of each file, as plain values."""
        files = []
        for path, digest in self.digests.items():
            size = self.states[path].size
            files.append({"file": text_of(path), "bytes": size, "sha256": digest})
        plain = json.dumps(_described(self.source, self.digests), sort_keys=True, default=str)
        return {"sha256": hashlib.sha256(plain.encode()).hexdigest(), "files": files}

    def require(self, expected: Mapping[str, Any]) -> None:
        """Check that the source is the one that `to_json` described.

        Raises:
            DataError: files or options differ.
        """
        content = self.to_json()
        if content["sha256"] == expected["sha256"]:
            return
        before = [entry["sha256"] for entry in expected["files"]]
        other = [entry["file"] for entry in content["files"] if entry["sha256"] not in before]
        difference = f"{len(content['files'])} files instead of {len(before)}, or other options"
        if other:
            difference = f"another content of {other[0]!r}"
        raise DataError(
            f"apply: training=True needs the source that was prepared, got {difference}. Give that "
            "source; or leave training out, and all rows become the part `valid`."
        )


def fixed(source: Source) -> Source:
    """Return a source whose globs are replaced by the files that they match now."""
    if isinstance(source, FileSource):
        return dataclasses.replace(source, path=source.files())
    changes: dict[str, Any] = {}
    for name, value in _inner(source):
        changes[name] = (
            fixed(value) if isinstance(value, Source) else [fixed(source) for source in value]
        )
    if not changes:
        return source
    return dataclasses.replace(source, **changes)  # type: ignore[type-var]  # it has fields


def files_of(source: Source) -> list[str]:
    """Return all files that a source reads, those of side tables too; each once."""
    if isinstance(source, Prepared):
        source = source._files
    files: dict[str, None] = {}
    if isinstance(source, FileSource):
        files.update(dict.fromkeys(source.files()))
    for _, value in _inner(source):
        for part in [value] if isinstance(value, Source) else value:
            files.update(dict.fromkeys(files_of(part)))
    return list(files)


def digest_of_input(path: str) -> str:
    """Return the SHA-256 of a file; of an object, that of its size and its tag or version."""
    if is_url(path):
        return hashlib.sha256(str(Identity.of(path)).encode()).hexdigest()
    return digest_of(path)


def states_of(paths: Iterable[str]) -> dict[str, _State | Identity]:
    """Return what the file system says of files."""
    return {path: _State.of(path) for path in paths}


def _inner(source: Source) -> Iterator[tuple[str, Source | Sequence[Source]]]:
    """Yield the fields of a source that hold other sources."""
    for name in _field_names(source):
        value = getattr(source, name)
        is_several = isinstance(value, (list, tuple)) and len(value) > 0
        if isinstance(value, Source) or (
            is_several and all(isinstance(item, Source) for item in value)
        ):
            yield name, value


def _described(source: Source, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what decides about the rows of a source: options, and digests instead of paths."""
    plain: dict[str, Any] = {"kind": type(source).__name__}
    if isinstance(source, Memory):
        return {**plain, "rows": _table_digest(source.table)}
    if isinstance(source, (FileSource, Prepared)):
        plain["content"] = [digests[path] for path in files_of(source)]
    inner = dict(_inner(source))
    for name in _field_names(source):
        value = getattr(source, name)
        if name in inner:
            several = [value] if isinstance(value, Source) else value
            plain[name] = [_described(source, digests) for source in several]
        elif name != "path":
            plain[name] = value
    return plain


def _field_names(source: object) -> list[str]:
    """Return the names of a source's fields; none for a class of a user that is not a dataclass."""
    if not dataclasses.is_dataclass(source):
        return []
    return [field.name for field in dataclasses.fields(source)]


def _table_digest(table: pa.Table) -> str:
    """Return a digest of names, types and values that does not depend on the chunks."""
    digest = hashlib.sha256(str(table.schema.remove_metadata()).encode())
    for begin in range(0, table.num_rows, _BATCH_ROWS):
        piece = table.slice(begin, _BATCH_ROWS).combine_chunks()
        for batch in piece.to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()
