# SPDX-License-Identifier: Apache-2.0
"""MANIFEST.json: its members, its seal and the checks of both; and trees, nested values in it.

A digest tells that a manifest is as its writer sealed it. The checks here tell what a digest cannot.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, NotRequired
from urllib.parse import quote

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hotbed import config
from hotbed.data.schema import Schema
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.table import MAX_DIM, Table
from hotbed.errors import FormatError, HotbedError, PersistError, VersionError
from hotbed.persist.store import ADVICE, number_of

FORMAT = "hotbed.checkpoint"
FORMAT_VERSION = 2
DENSE_FILE = "dense.safetensors"
PROGRESS_FILE = "progress.safetensors"
MAX_DEPTH = 100
_ZEROS = "0" * 64
_NOT_BUILT = (
    HotbedError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _rate(run: list[Any]) -> list[Any]:
    step, rate = run
    if type(step) is not int or not 0 <= step < 2**64:
        raise ValueError("a step must be an unsigned 64-bit integer")
    if type(rate) not in (int, float) or not math.isfinite(rate):
        raise ValueError("a learning rate must be finite")
    return run


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Counter = Annotated[int, Field(ge=0, lt=2**64)]
Partition = Annotated[int, Field(ge=0, lt=PARTITIONS)]
Rate = Annotated[list[Any], Field(min_length=2, max_length=2), AfterValidator(_rate)]
Seconds = float | None


class File(TypedDict):
    bytes: Count
    sha256: Digest


class Part(TypedDict):
    file: str
    first: Partition
    last: Partition
    rows: Count


class Waiting(TypedDict):
    file: str
    rows: Count


class Scalars(TypedDict):
    step: Counter
    calls: Counter
    watermark: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    timed: bool | None
    rates: list[Rate]
    admitted: Counter
    refused: Counter
    evicted: Counter


class TableEntry(TypedDict):
    name: str
    config: dict[str, Any]
    rows: Count
    scalars: Scalars
    parts: list[Part]
    removed: NotRequired[list[Part]]
    candidates: Waiting | None


class Group(TypedDict):
    params: list[Count]
    tables: NotRequired[list[str]]


Optimizer = TypedDict(
    "Optimizer",
    {"class": str, "groups": list[Group], "scalars": dict[str, dict[str, Any]]},
)


class Dense(TypedDict):
    file: str | None
    optimizers: dict[str, Optimizer]


class Progress(TypedDict):
    file: str | None
    tree: dict[str, Any]
    random: dict[str, Any]


class GraphEntry(TypedDict):
    file: str
    lookups: list[dict[str, Any]]
    weights: list[str]
    dense: list[str]
    outputs: list[str]


class ChainLink(TypedDict):
    folder: str
    digest: Digest


class Manifest(TypedDict):
    format_version: int
    package_version: str
    kind: Literal["full", "delta"]
    contents: NotRequired[Literal["state", "values"]]
    version: Count
    parent: Digest | None
    chain: NotRequired[list[ChainLink]]
    source: NotRequired[Digest]
    published: NotRequired[Seconds]
    learned: NotRequired[Seconds]
    caught: NotRequired[Seconds]
    graph: NotRequired[GraphEntry]
    model: dict[str, Any] | None
    schema: dict[str, Any] | None
    positions: dict[str, Any]
    counters: dict[str, Count]
    dense: Dense | None
    progress: NotRequired[Progress | None]
    tables: list[TableEntry]
    files: dict[str, File]
    digest: Digest


# --- the seal -----------------------------------------------------------------------------------


def sealed(members: Mapping[str, Any]) -> tuple[str, str]:
    """Manifest text whose last member is the SHA-256 of the text with 64 zeros in its place."""
    if "digest" in members:
        raise PersistError(
            "digest: a reserved member of the manifest — received one — leave it out"
        )
    names = {"format": FORMAT, "format_version": FORMAT_VERSION}
    text = json.dumps({**names, **members, "digest": _ZEROS}, indent=1, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, _, tail = text.rpartition(_ZEROS)
    return head + digest + tail, digest


def unsealed(data: bytes, place: str) -> dict[str, Any]:
    """The manifest in `data`, once its digest and everything that it says of itself was checked."""
    at = data.rfind(b'"digest": "') + len(b'"digest": "')
    digest = data[at : at + 64]
    if hashlib.sha256(data[:at] + _ZEROS.encode() + data[at + 64 :]).hexdigest().encode() != digest:
        raise FormatError(
            f"{place}: torn or changed since it was written — its own digest does not fit — "
            f"{ADVICE}"
        )
    try:
        manifest: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{place}: not JSON that can be read — received {error} — {ADVICE}"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FormatError(
            f"{place}: not a manifest of a Hotbed checkpoint — received {data[:40]!r} — give "
            "another path"
        )
    version = manifest.get("format_version")
    if type(version) is not int or version not in (FORMAT_VERSION - 1, FORMAT_VERSION):
        raise VersionError(
            f"{place}: format version {version!r:.20} — this build reads {FORMAT_VERSION} — "
            "use the Hotbed version that wrote it, or a newer one"
        )
    check_manifest(manifest, place)
    return manifest


# --- checks -------------------------------------------------------------------------------------


@functools.cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Manifest)


def check_manifest(manifest: Any, place: str) -> None:
    """Raise FormatError, naming the member, unless a manifest is as docs/format.md says.

    `place`: of the manifest's file. Files are not read.
    """
    _check_nesting(manifest, place)
    try:
        _adapter().validate_python(manifest, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(step) for step in first["loc"])
        what = f"{name}: {first['msg']}" if name else first["msg"]
        raise format_error(place, what, first["input"]) from error
    _check_paths(manifest, place)
    _check_chain(manifest, place)
    _check_files(manifest, place)
    names = [entry["name"] for entry in manifest["tables"]]
    if len(set(names)) != len(names):
        raise format_error(place, "tables: two have one name", names)
    for entry in manifest["tables"]:
        _check_parts(manifest["kind"], entry, place)


def check_links(manifests: list[Mapping[str, Any]], place: str) -> None:
    """Raise FormatError unless the manifests are those of one chain, the full first."""
    chain: list[Any] = []
    for number, manifest in enumerate(manifests):
        if manifest["kind"] != ("full" if number == 0 else "delta"):
            raise format_error(place, "chain: a full comes first, then deltas", manifest["kind"])
        if [link["digest"] for link in manifest.get("chain", ())] != chain:
            raise format_error(
                place, "chain: a state in it rests on another chain", manifest["digest"]
            )
        chain.append(manifest["digest"])
        names = {entry["name"] for entry in manifest["tables"]}
        if names != {entry["name"] for entry in manifests[0]["tables"]}:
            raise format_error(place, "chain: its states have other tables", sorted(names))
        if manifest.get("contents") != manifests[0].get("contents"):
            raise format_error(
                place, "chain: its states have other contents", manifest.get("contents")
            )


def check_descriptions(manifest: Mapping[str, Any], place: str) -> None:
    """Raise FormatError unless the schema and the configs of the tables can be built."""
    if manifest["schema"] is not None:
        built("schema", lambda: Schema.from_json(manifest["schema"]), place)
    given = (manifest["model"] or {}).get("given_tables") or {}
    for entry in manifest["tables"]:
        name = entry["name"]
        if isinstance(given, dict) and given.get(name, entry["config"]) != entry["config"]:
            raise format_error(
                place, f"table {name!r}: the model describes another one", given[name]
            )
        built_config(entry, place)
        _check_config(entry, place)


def built_config(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the values of a table's config, each built by the type hint of its own parameter.

    Raises:
        FormatError: A value cannot be built, or a key is unknown.
    """
    where = f"table {entry['name']!r}"
    hints = config.parameters(Table)

    def values() -> dict[str, Any]:
        unknown = sorted(entry["config"].keys() - hints.keys())
        if unknown:
            raise ValueError(f"unknown keys {unknown}")
        return {
            key: config.build(value, hints[key].annotation, f"{where}.{key}")
            for key, value in entry["config"].items()
        }

    plain: dict[str, Any] = built(where, values, place)
    return plain


def _check_config(entry: Mapping[str, Any], place: str) -> None:
    """Build an empty table, wherever its rows would lie: the native core has limits of its own."""
    where = f"table {entry['name']!r}"
    values = {key: value for key, value in entry["config"].items() if key != "tier"}
    built(where, lambda: config.build(values, Table, where), place)


def _check_nesting(manifest: Any, place: str) -> None:
    """Depth and text: what Python's own walks, encoders and paths can take."""
    level = [manifest]
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


def _check_paths(manifest: Mapping[str, Any], place: str) -> None:
    """Names of files stay inside the folder, names of states are those of folders beside it."""
    for name in manifest["files"]:
        paths = (PurePosixPath(name), PureWindowsPath(name))
        leaves = any(path.root or path.drive or ".." in path.parts for path in paths)
        if leaves or "\0" in name:
            raise format_error(place, "a file outside of the checkpoint", name)
    for link in manifest.get("chain", ()):
        number_of(link["folder"])


def _check_chain(manifest: Mapping[str, Any], place: str) -> None:
    chain = manifest.get("chain", [])
    if (manifest["kind"] == "delta") != bool(chain):
        raise format_error(
            place, f"chain: a {manifest['kind']} with {len(chain)} states before it", chain
        )
    if chain and chain[-1]["digest"] != manifest["parent"]:
        raise format_error(place, "parent: it is not the last of the chain", manifest["parent"])


def _check_files(manifest: Mapping[str, Any], place: str) -> None:
    names: list[str] = []
    for entry in manifest["tables"]:
        names += [part["file"] for part in (*entry["parts"], *entry.get("removed", ()))]
        if entry["candidates"] is not None:
            names.append(entry["candidates"]["file"])
    for member in ("dense", "progress", "graph"):
        part = manifest.get(member) or {}
        if part.get("file") is not None:
            names.append(part["file"])
    for name in names:
        if name not in manifest["files"]:
            raise format_error(
                place, "files: a part refers to a file not listed in MANIFEST.json", name
            )
        if names.count(name) > 1:
            raise format_error(place, "files: two parts refer to one file", name)


def _check_parts(kind: str, entry: Mapping[str, Any], place: str) -> None:
    where = f"table {entry['name']!r}"
    dim = entry["config"].get("dim")
    if type(dim) is not int or not 1 <= dim <= MAX_DIM:
        raise format_error(place, f"{where}: dim must be from 1 to {MAX_DIM}", dim)
    if entry["config"].get("name") != entry["name"]:
        raise format_error(
            place, f"{where}: its config has another name", entry["config"].get("name")
        )
    for parts in (entry["parts"], entry.get("removed", [])):
        last = -1
        for part in parts:
            if not last < part["first"] <= part["last"]:
                raise format_error(place, f"{where}: partitions of its parts must rise", part)
            last = part["last"]
    rows = sum(part["rows"] for part in entry["parts"])
    if rows > entry["rows"] or (kind == "full" and (rows < entry["rows"] or entry.get("removed"))):
        raise format_error(place, f"{where}: {entry['rows']} rows, other than its parts have", rows)


def format_error(place: str, what: str, value: Any) -> FormatError:
    return FormatError(f"{place}: {what} — received {value!r:.120} — {ADVICE}")


def built(what: str, make: Callable[[], Any], place: str) -> Any:
    try:
        return make()
    except _NOT_BUILT as error:
        text = f"{place}: {what} cannot be built — received {error} — {ADVICE}"
        raise FormatError(text) from error


# --- trees --------------------------------------------------------------------------------------


Arrays = dict[str, NDArray[Any]]


def encode(tree: Any, name: str = "") -> tuple[Any, Arrays]:
    """A nested value as JSON and the arrays in it, by the path that leads to them.

    dict, list, tuple, None, bool, int, float, str, bytes, and NumPy arrays and scalars of numbers
    or booleans come back as they were. Raises PersistError naming the path of anything else.

    >>> encode({"auc": [0.5, (1, 2)]})
    ({'auc': [0.5, {'$tuple': [1, 2]}]}, {})
    """
    arrays: Arrays = {}
    return _encoded(tree, name, arrays), arrays


def decode(plain: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """The inverse of `encode`."""
    if isinstance(plain, list):
        return [decode(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1 and (mark := next(iter(plain))).startswith("$"):
        value = plain[mark]
        match mark:
            case "$array":
                return arrays[value]
            case "$scalar":
                return arrays[value][()]
            case "$tuple":
                return tuple(decode(item, arrays) for item in value)
            case "$float":
                return float(value)
            case "$bytes":
                return bytes.fromhex(value)
            case "$pairs":
                return {decode(key, arrays): decode(item, arrays) for key, item in value}
    return {key: decode(item, arrays) for key, item in plain.items()}


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as the bytes of a safetensors file."""
    data: bytes = safetensors.numpy.save(dict(arrays))
    return data


def unpacked(data: memoryview | bytes) -> Arrays:
    """The inverse of `packed`."""
    arrays: Arrays = safetensors.numpy.load(bytes(data))
    return arrays


def _encoded(value: Any, path: str, arrays: Arrays) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise _refused(path, f"an array of {array.dtype}")
        # a copy, little-endian: the caller may go on writing into its own; 0-dim arrays stay 0-dim
        arrays[path] = array.astype(array.dtype.newbyteorder("<"), copy=True, order="C")
        return {"$array" if isinstance(value, np.ndarray) else "$scalar": path}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{path}/{number}", arrays) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {
                key: _encoded(item, f"{path}/{quote(key, safe='')}", arrays)
                for key, item in value.items()
            }
        pairs = enumerate(value.items())
        return {
            "$pairs": [
                [_encoded(key, f"{path}/{n}.key", arrays), _encoded(item, f"{path}/{n}", arrays)]
                for n, (key, item) in pairs
            ]
        }
    raise _refused(path, type(value).__name__)


def _refused(path: str, what: str) -> PersistError:
    return PersistError(
        f"{path or 'state'}: cannot be saved — received {what} — keep numbers, text, bytes, "
        "lists, tuples, "
        "dicts and NumPy arrays of numbers there"
    )
