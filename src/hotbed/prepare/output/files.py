# SPDX-License-Identifier: Apache-2.0
"""The files of an output: Parquet parts, dead letters, metadata and the workflow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.connectors.hugectr.file_list import write_file_list
from hotbed.connectors.prepared import WORKFLOW_FILE, sealed
from hotbed.data.schema import Schema
from hotbed.files import DIGESTS, MARK_FILE, digest_of, new_file, sync_folder
from hotbed.prepare.output.layout import sizes_of
from hotbed.prepare.partitions import PARTS

METADATA_FILE = "_metadata.json"
FILE_LIST = "_file_list.txt"
LETTERS_FOLDER = "dead_letters"


@dataclass(frozen=True)
class WrittenFile:
    """A file of the output: its name there, its rows, bytes and digests (hex)."""

    file: str
    rows: int
    bytes: int
    sha256: str
    xxh3: str


class PartWriter:
    """Writes one Parquet file of the output, and takes its digests while it writes."""

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self._name = name
        self._file = _HashedFile(folder / name)
        self._parquet = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._num_rows = 0

    def write(self, rows: pa.Table) -> None:
        """Append rows, as one row group."""
        self._num_rows += rows.num_rows
        self._parquet.write_table(rows)

    def close(self) -> WrittenFile:
        """Return the facts of the file, which is on disk."""
        self._parquet.close()
        num_bytes, digests = self._file.finish()
        return WrittenFile(self._name, self._num_rows, num_bytes, **digests)


class _HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A task that a cluster runs again finds the file of the first run.
        self._file = open(path, "wb")  # noqa: SIM115 - closed by `finish`
        self._hashes = {kind: make() for kind, make in DIGESTS.items()}
        self._num_bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        self._file.write(piece)
        for digest in self._hashes.values():
            digest.update(piece)
        self._num_bytes += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        """Do nothing: the file is on disk when `finish` returns."""

    def close(self) -> None:
        self.closed = True

    def finish(self) -> tuple[int, dict[str, str]]:
        """Return bytes and digests (hex, by kind) once the file is on disk."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        return self._num_bytes, {kind: hashed.hexdigest() for kind, hashed in self._hashes.items()}


def write_workflow(
    folder: Path,
    job: Mapping[str, Any],
    prepared: Schema,
    raw: Schema,
    source: Mapping[str, Any],
    files: Iterable[Mapping[str, WrittenFile]],
    counts: Mapping[str, Any],
) -> None:
    """Write the metadata of each part, and the workflow, which makes the output whole.

    Args:
        folder: of the output.
        job: the preparation, as plain values.
        prepared: the schema of the prepared files.
        raw: the fitted schema over raw rows, whose maps are in `folder`.
        source: the digest of the source and of its files.
        files: of each partition, by part.
        counts: of rows that were added or left out.
    """
    sizes = sizes_of(raw)
    of_partitions = list(files)
    parts: dict[str, Any] = {}
    for part in PARTS:
        written = [
            partition_files[part] for partition_files in of_partitions if part in partition_files
        ]
        if written:
            parts[part] = {
                "rows": sum(file.rows for file in written),
                "files": [asdict(file) for file in written],
            }
            _write_metadata(folder / part, written, prepared, sizes)
    paths = {fitted.digest: fitted.path.relative_to(folder) for fitted in raw.maps}
    workflow = {
        "prepare": job,
        "source": source,
        "schema": prepared.to_json(),
        "raw": raw.with_maps(paths).to_json(),
        "sizes": sizes,
        "parts": parts,
        "files": _other_files(folder, parts),
        "counts": {part: facts["rows"] for part, facts in parts.items()} | dict(counts),
    }
    _write_json(folder / WORKFLOW_FILE, sealed(workflow))


def _write_metadata(
    folder: Path, files: Sequence[WrittenFile], prepared: Schema, sizes: Mapping[str, int]
) -> None:
    """Write what readers of NVTabular's output expect beside Parquet files: their names and rows.

    The sizes of vocabularies are added. Names are without a folder, so that the output can move.
    """
    places = {
        name: place for place, name in enumerate(pq.read_schema(_path(folder, files[0])).names)
    }

    def listed(columns: Iterable[Any]) -> list[dict[str, Any]]:
        names = [column.name for column in columns]
        return [{"col_name": name, "index": places[name]} for name in names]

    stats: list[dict[str, Any]] = []
    for file in files:
        stats.append({"file_name": Path(file.file).name, "num_rows": file.rows})
    metadata = {
        "data_paths": [],
        "file_stats": stats,
        "cats": listed(prepared.ids),
        "conts": listed(prepared.dense),
        "labels": listed(prepared.labels),
        "sizes": dict(sizes),
    }
    _write_json(folder / METADATA_FILE, metadata)
    write_file_list(folder / FILE_LIST, [facts["file_name"] for facts in stats])


def _path(folder: Path, file: WrittenFile) -> Path:
    return folder / Path(file.file).name


def _other_files(folder: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return bytes and SHA-256 of all files but those of the parts, by their names."""
    of_parts = {entry["file"] for facts in parts.values() for entry in facts["files"]}
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            sync_folder(path)
        elif name not in of_parts and name != MARK_FILE:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[name] = {"bytes": path.stat().st_size, "sha256": digest_of(path)}
    return files


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with new_file(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())
