# SPDX-License-Identifier: Apache-2.0
"""Write the served folder: each version is on disk before CURRENT names it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.files import is_partial, new_file, writing
from hotbed.frozen import RowDtype
from hotbed.persist.container.format import Link, Reader
from hotbed.persist.container.store import LocalStore
from hotbed.persist.publish.version import request_schema
from hotbed.serving.stores.mapped import (
    FORMAT,
    FORMAT_VERSION,
    POINTER_FILE,
    MappedVersion,
    ModelFolder,
    file_of,
    map_file_of,
    names_a_file,
)
from hotbed.serving.stores.successors import check_same_model, published_at
from hotbed.serving.stores.table_files import TableFiles, write_small

log = logging.getLogger("hotbed.serving")


def write_served(
    folder: ModelFolder,
    reader: Reader,
    before: MappedVersion | None,
    dtype: RowDtype,
    origin: str | None = None,
    damaged: Collection[str] = (),
) -> str:
    """Write the state of `reader` as a version, and return the key of the version.

    Of a delta only what changed since versions that are there is written. CURRENT does not change
    before `make_newest`.

    Args:
        folder: the folder of the model.
        reader: the state.
        before: the version before. It gives the graph where `reader` does not bring one.
        dtype: type of the rows.
        origin: digest of the state that a start loads and that this one was followed from; None
            where it is this state. A state that was followed must be one of the same model.
        damaged: names of files of `before` that are written anew.

    Raises:
        ConfigError: the state does not fit the model, or is one of another model.
        FormatError: a file of the state is bad.
        NotWritten: the disk is full or refuses.
    """
    if LocalStore(folder.path).folders():
        raise ConfigError(
            f"{folder.path}: holds checkpoints, got a model to serve. Choose another folder."
        )
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        spec = _spec(folder, reader, before, dtype, origin, damaged)
        text = json.dumps(spec, ensure_ascii=False).encode()
        key = hashlib.sha256(text).hexdigest()
        _write(folder.path / file_of(key), text)
    return key


def _spec(
    folder: ModelFolder,
    reader: Reader,
    before: MappedVersion | None,
    dtype: RowDtype,
    origin: str | None,
    damaged: Collection[str],
) -> dict[str, Any]:
    """Write the files of a version, and return the content of the version's own file."""
    manifest = reader.manifest
    network = _network(folder, reader, before, damaged)
    if before is not None and origin is not None:
        _check_follows(before, reader, network)
    tables = {}
    for number, name in enumerate(reader.table_names):
        files = TableFiles(folder.path, reader, number, dtype, before, damaged)
        tables[name] = files.write()
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": folder.name,
        "version": manifest.version,
        "digest": manifest.digest,
        "published": published_at(reader),
        "learned": manifest.learned,
        "mended": _mended(manifest.digest, before, damaged),
        "dtype": dtype,
        "configs": {entry.name: entry.config for entry in manifest.tables},
        "chain": [link.manifest.digest for link in reader.links],
        "origin": origin or manifest.digest,
        **network,
        "tables": tables,
    }


def _mended(digest: str, before: MappedVersion | None, damaged: Collection[str]) -> int:
    """Return how often the version of this digest has been mended."""
    if before is None or before.digest != digest:
        return 0
    return before.mended + bool(damaged)


def _check_follows(before: MappedVersion, reader: Reader, network: Mapping[str, Any]) -> None:
    """Raise ConfigError for the state of another model than `before`."""
    place = str(reader.folder)
    graph = network["graph"]
    check_same_model(before, network["schema"], graph, place)
    learned = request_schema(reader.manifest)
    if learned is not None and reader.links[0].manifest.graph is None:
        check_same_model(before, learned, graph, place, of_training=True)


def make_newest(folder: ModelFolder, key: str) -> None:
    """Make CURRENT name a version. Raises NotWritten where the disk refuses."""
    with writing(folder.path):
        _write(folder.path / POINTER_FILE, f"{key}\n".encode())


def _write(path: Path, data: bytes | memoryview) -> None:
    with new_file(path) as file:
        file.write(data)


def tidy(folder: ModelFolder, versions: list[MappedVersion]) -> None:
    """Remove the files of all other versions; processes that have one mapped keep it.

    Files of other names are not those of versions, and stay. Files that cannot be removed are kept
    and logged.
    """
    needed = {POINTER_FILE}.union(*(version.files() for version in versions))
    try:
        paths = list(folder.path.iterdir())
    except FileNotFoundError:
        return
    for path in paths:
        is_own = names_a_file(path.name) or is_partial(path.name)
        if path.name in needed or not is_own:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: cannot be removed: %s", path, error)


def _network(
    folder: ModelFolder, reader: Reader, before: MappedVersion | None, damaged: Collection[str]
) -> dict[str, Any]:
    """Write graph and weights of a version; return the members of its file about them.

    The weights are those of `reader`. Graph and schema may be those of the version before.
    """
    full = reader.links[0].manifest
    if full.graph is not None:
        graph = full.graph.to_json()
        onnx = reader.links[0].read(full.graph.file)
        files = {"graph": write_small(folder.path / f"{full.digest[:32]}.onnx", onnx)}
        if full.graph.ids is not None:
            ids = reader.links[0].read(full.graph.ids["file"])
            files["ids"] = write_small(folder.path / f"{full.digest[:32]}.ids.onnx", ids)
        schema = _write_maps(folder, reader.links[0], before, damaged)
    else:
        before = _with_same_tables(reader, before)
        graph = dict(before.graph)
        files = {
            name: before.spec["files"][name] for name in ("graph", "ids") if name in before.blobs
        }
        schema = before.spec["schema"]
    weights = _weights(folder, reader, graph)
    weights_path = folder.path / f"{reader.manifest.digest[:32]}.safetensors"
    files["weights"] = write_small(weights_path, save(weights))
    return {"schema": _newest_schema(schema, reader), "graph": graph, "files": files}


def _write_maps(
    folder: ModelFolder, link: Link, before: MappedVersion | None, damaged: Collection[str]
) -> dict[str, Any]:
    """Write the fitted maps of an exported model; return its schema with their names."""
    plain = link.manifest.schema or {}
    if not plain:
        return plain
    schema = Schema.from_json(plain)
    whole = set[str]()
    if before is not None:
        whole = {fitted.path.name for fitted in before.schema.maps}.difference(damaged)
    names = {}
    for fitted in schema.maps:
        name = map_file_of(fitted.digest)
        path = folder.path / name
        if name not in whole or not path.exists():
            with link.open(fitted.path.as_posix()) as source, new_file(path) as file:
                shutil.copyfileobj(source, file)
        names[fitted.digest] = Path(name)
    if not names:
        return plain
    return schema.with_maps(names).to_json()


def _with_same_tables(reader: Reader, before: MappedVersion | None) -> MappedVersion:
    """Return `before`, whose graph serves a state without one. Raises ConfigError if it cannot."""
    if before is None:
        raise ConfigError(
            f"{reader.folder}: expected an exported model, got a state without a graph. Export "
            "the model first."
        )
    names = reader.table_names
    if set(before.tables) != set(names):
        raise ConfigError(
            f"{reader.folder}: this is the state of another model, got tables {names} instead of "
            f"{sorted(before.tables)}. Export that model and load it."
        )
    return before


def _newest_schema(schema: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """Return a schema with the types and shapes of raw columns that the newest state knows.

    The full may be older than the first event that was learned.
    """
    newest = request_schema(reader.manifest) or {}
    merged = dict(schema)
    for member in ("types", "shapes"):
        entries = {**schema.get(member, {}), **newest.get(member, {})}
        if entries:
            merged[member] = entries
    return merged


def _weights(
    folder: ModelFolder, reader: Reader, graph: Mapping[str, Any]
) -> dict[str, NDArray[np.float32]]:
    """Return the weights of a state by the names that the graph has for them."""
    weights = {}
    for path, dtype, shape, data in reader.tensors():
        name = "network." + path.removeprefix("network/")
        if dtype == "F32" and name in graph["weights"]:
            weights[name] = np.frombuffer(data, np.float32).reshape(shape)
    missing = sorted(set(graph["weights"]) - set(weights))
    if missing:
        raise ConfigError(
            f"{reader.folder}: the graph of model {folder.name!r} needs weights that this version "
            f"lacks, got none for {missing[0]!r}. Export the model again."
        )
    return weights
