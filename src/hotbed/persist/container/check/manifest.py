# SPDX-License-Identifier: Apache-2.0
"""Checks of a manifest: its members, and whether they contradict each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from pydantic import ValidationError

from hotbed import config
from hotbed.data.schema import Schema
from hotbed.embedding.table import MAX_DIM, Table
from hotbed.errors import FormatError, HotbedError, VersionError
from hotbed.persist.container.manifest import FORMAT, FORMAT_VERSION, ZEROS, Manifest, TableEntry
from hotbed.persist.container.store import ADVICE, MANIFEST_FILE, number_of

MAX_DEPTH = 100
_DIGEST_MEMBER = b'"digest": "'
NOT_BUILT = (  # errors of constructors with the arguments of a manifest that was changed
    HotbedError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


def unsealed(data: bytes, place: str) -> Manifest:
    """Return the manifest in `data`, once its digest and everything that it says were checked.

    Raises:
        FormatError: it is torn, changed, or not as docs/format.md says; the message names `place`.
        VersionError: it is of a format version that this build does not read.
    """
    start = data.rfind(_DIGEST_MEMBER) + len(_DIGEST_MEMBER)
    digest = data[start : start + 64]
    hashed = data[:start] + ZEROS.encode() + data[start + 64 :]
    if hashlib.sha256(hashed).hexdigest().encode() != digest:
        raise FormatError(
            f"{place}: torn or changed since it was written, got "
            f"{digest.decode(errors='replace')!r} as its digest. {ADVICE}"
        )
    try:
        plain = config.parse_json(data)
    except ValueError as error:
        raise FormatError(f"{place}: not JSON, got {error}. {ADVICE}") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise FormatError(
            f"{place}: not the manifest of a Hotbed checkpoint, got "
            f"{data[:40].decode(errors='replace')!r}. "
            "Give another path."
        )
    version = plain.get("format_version")
    if type(version) is not int or not 0 < version <= FORMAT_VERSION:
        raise VersionError(
            f"{place}: this build reads format versions up to {FORMAT_VERSION}, got format version "
            f"{version!r:.20}. Use the Hotbed version that wrote it, or a newer one."
        )
    return checked_manifest(plain, place)


def checked_manifest(plain: Mapping[str, Any], place: str) -> Manifest:
    """Build a manifest from JSON values, and check that it does not contradict itself.

    Args:
        plain: the JSON object, its digest included.
        place: where the manifest lies, for messages. Files are not read.

    Raises:
        FormatError: a member is not as docs/format.md says; the message names it.
    """
    _check_nesting(plain, place)
    required = ("format_version", "files", "digest")
    missing = [name for name in required if name not in plain]
    if missing:
        raise format_error(place, f"{missing[0]}: missing", list(plain))
    members = {name: value for name, value in plain.items() if name != "format"}
    try:
        manifest = Manifest.from_json(members)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        member = ".".join(str(step) for step in first["loc"]) or "the manifest"
        raise format_error(place, f"{member}: {first['msg']}", first["input"]) from error
    _check_paths(manifest, place)
    _check_parent(manifest, place)
    _check_files(manifest, place)
    names = [entry.name for entry in manifest.tables]
    if len(set(names)) != len(names):
        raise format_error(place, "tables: two have one name", names)
    for entry in manifest.tables:
        _check_table(manifest.kind, entry, place)
    return manifest


def check_links(manifests: Sequence[Manifest], place: str) -> None:
    """Raise FormatError unless the manifests are those of one chain, the full first."""
    first = manifests[0]
    digests: list[str] = []
    for number, manifest in enumerate(manifests):
        expected = "delta" if number else "full"
        if manifest.kind != expected:
            raise format_error(place, "chain: a full comes first, then deltas", manifest.kind)
        if [link.digest for link in manifest.chain] != digests:
            raise format_error(
                place, "chain: a state in it rests on another chain", manifest.digest
            )
        digests.append(manifest.digest)
        names = sorted(entry.name for entry in manifest.tables)
        if names != sorted(entry.name for entry in first.tables):
            raise format_error(place, "chain: its states have other tables", names)
        if manifest.contents != first.contents:
            raise format_error(place, "chain: its states have other contents", manifest.contents)


def check_descriptions(manifest: Manifest, place: str) -> None:
    """Raise FormatError unless the schema and the configs of the tables can be built."""
    plain = manifest.schema
    if plain is not None:
        schema = _built("schema", lambda: Schema.from_json(plain), place)
        if manifest.graph is not None:
            _check_maps(schema, manifest, place)
    model = manifest.model or {}
    configs = model.get("given_tables") or {}
    for entry in manifest.tables:
        name = entry.name
        if isinstance(configs, dict) and configs.get(name, entry.config) != entry.config:
            raise format_error(
                place, f"table {name!r}: the model describes another one", configs[name]
            )
        built_config(entry, place)
        _check_config(entry, place)


def _check_maps(schema: Schema, manifest: Manifest, place: str) -> None:
    """Raise FormatError unless the fitted maps of what servers start from are its own files."""
    for fitted in schema.maps:
        name = fitted.path.as_posix()
        entry = manifest.files.get(name)
        if entry is None or entry.sha256 != fitted.digest:
            raise format_error(place, "schema: a fitted map is another file than its digest", name)


def built_config(entry: TableEntry, place: str) -> dict[str, Any]:
    """Return the values of a table's config, each built by the type hint of its own parameter.

    Raises:
        FormatError: a value cannot be built, or a key is unknown.
    """
    where = f"table {entry.name!r}"
    parameters = config.parameters(Table)

    def build_values() -> dict[str, Any]:
        unknown = sorted(entry.config.keys() - parameters.keys())
        if unknown:
            raise ValueError(f"unknown keys {unknown}")
        values = {}
        for key, value in entry.config.items():
            values[key] = config.build(value, parameters[key].annotation, f"{where}.{key}")
        return values

    values: dict[str, Any] = _built(where, build_values, place)
    return values


def _check_config(entry: TableEntry, place: str) -> None:
    """Build an empty table, wherever its rows would lie: the native core has limits of its own."""
    where = f"table {entry.name!r}"
    values = {key: value for key, value in entry.config.items() if key != "tier"}
    _built(where, lambda: config.build(values, Table, where), place)


def _built(part: str, build: Callable[[], Any], place: str) -> Any:
    try:
        return build()
    except NOT_BUILT as error:
        message = f"{place}: {part} cannot be built, got {error}. {ADVICE}"
        raise FormatError(message) from error


def _check_nesting(plain: Any, place: str) -> None:
    """Check depth and text, which Python's own walks, encoders and paths would trip over."""
    level = [plain]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value)
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, str) and not value.isascii():
                _check_text(value, place)
        if not inner:
            return
        level = inner
    raise format_error(place, f"it is nested more than {MAX_DEPTH} deep", "")


def _check_text(value: str, place: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise format_error(place, "a text is not Unicode", ascii(value)) from error


def _check_paths(manifest: Manifest, place: str) -> None:
    """Names of files stay inside the folder; names of states are those of folders next to it."""
    for name in manifest.files:
        paths = (PurePosixPath(name), PureWindowsPath(name))
        leaves = any(path.root or path.drive or ".." in path.parts for path in paths)
        if leaves or "\0" in name:
            raise format_error(place, "a file outside of the checkpoint", name)
    for link in manifest.chain:
        number_of(link.folder)


def _check_parent(manifest: Manifest, place: str) -> None:
    chain = manifest.chain
    if (manifest.kind == "delta") != bool(chain):
        problem = f"chain: a {manifest.kind} with {len(chain)} states before it"
        raise format_error(place, problem, [link.folder for link in chain])
    if chain and chain[-1].digest != manifest.parent:
        raise format_error(place, "parent: it is not the last of the chain", manifest.parent)


def _check_files(manifest: Manifest, place: str) -> None:
    names: list[str] = []
    for entry in manifest.tables:
        names += [part.file for part in entry.all_parts]
        if entry.candidates is not None:
            names.append(entry.candidates.file)
        if entry.sketch is not None:
            names.append(entry.sketch.file)
    for member in (manifest.dense, manifest.progress):
        if member is not None and member.file is not None:
            names.append(member.file)
    if manifest.open_rows is not None:
        names += manifest.open_rows.files.values()
    if manifest.graph is not None:
        names += manifest.graph.files
    for name in names:
        if name not in manifest.files:
            problem = f"files: a part refers to a file not listed in {MANIFEST_FILE}"
            raise format_error(place, problem, name)
        if names.count(name) > 1:
            raise format_error(place, "files: two parts refer to one file", name)


def _check_table(kind: str, entry: TableEntry, place: str) -> None:
    where = f"table {entry.name!r}"
    dim = entry.config.get("dim")
    if type(dim) is not int or not 1 <= dim <= MAX_DIM:
        raise format_error(place, f"{where}: dim must be from 1 to {MAX_DIM}", dim)
    if entry.config.get("name") != entry.name:
        name = entry.config.get("name")
        raise format_error(place, f"{where}: its config has another name", name)
    for parts in (entry.parts, entry.removed):
        last = -1
        for part in parts:
            if not last < part.first <= part.last:
                problem = f"{where}: partitions of its parts must rise"
                raise format_error(place, problem, part.to_json())
            last = part.last
    rows = sum(part.rows for part in entry.parts)
    incomplete = kind == "full" and (rows < entry.rows or len(entry.removed) > 0)
    if rows > entry.rows or incomplete:
        raise format_error(place, f"{where}: {entry.rows} rows, unlike its parts", rows)


def format_error(place: str, problem: str, value: Any) -> FormatError:
    """Return the error about a value in a file of a checkpoint."""
    return FormatError(f"{place}: {problem}, got {value!r:.120}. {ADVICE}")
