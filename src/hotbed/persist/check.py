# SPDX-License-Identifier: Apache-2.0
"""The one validator of docs/format.md: what a digest cannot tell of a manifest and of row files.

Loading, verifying, following and serving all read through it, so that they refuse the same.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hotbed import config
from hotbed.data.schema import Schema
from hotbed.embedding.hashing import partition
from hotbed.embedding.policy import PARTITIONS, evictions, kept_columns
from hotbed.embedding.rule import Adagrad
from hotbed.embedding.snapshot import COLUMN_TYPES
from hotbed.embedding.table import MAX_DIM, Table
from hotbed.errors import FormatError, HotbedError
from hotbed.persist.store import ADVICE, number_of

MAX_DEPTH = 100
_MAGIC = b"ARROW1\0\0"
_HEADER = 2  # number of the field `header` in Arrow's flatbuffer table Message
_COMPRESSION = 3  # number of the field `compression` in its table RecordBatch
_NOT_ARROW = (pa.ArrowException, OSError, EOFError, StopIteration, UnicodeDecodeError, struct.error)
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
_ROWS_AT_ONCE = 1 << 16  # bounds the memory of a check, whatever the size of a batch
_PLACE_TYPES = {"partition": pa.uint8(), "id": pa.int64()}
_WAITING_TYPES = {**_PLACE_TYPES, "count": pa.uint32(), "last_seen": pa.int64()}

# --- the manifest -----------------------------------------------------------------------------


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
        raise _bad(place, what, first["input"]) from error
    _check_paths(manifest, place)
    _check_chain(manifest, place)
    _check_files(manifest, place)
    names = [entry["name"] for entry in manifest["tables"]]
    if len(set(names)) != len(names):
        raise _bad(place, "tables: two have one name", names)
    for entry in manifest["tables"]:
        _check_parts(manifest["kind"], entry, place)


def check_links(manifests: list[Mapping[str, Any]], place: str) -> None:
    """Raise FormatError unless the manifests are those of one chain, the full first."""
    chain: list[Any] = []
    for number, manifest in enumerate(manifests):
        if manifest["kind"] != ("full" if number == 0 else "delta"):
            raise _bad(place, "chain: a full comes first, then deltas", manifest["kind"])
        if [link["digest"] for link in manifest.get("chain", ())] != chain:
            raise _bad(place, "chain: a state in it rests on another chain", manifest["digest"])
        chain.append(manifest["digest"])
        names = {entry["name"] for entry in manifest["tables"]}
        if names != {entry["name"] for entry in manifests[0]["tables"]}:
            raise _bad(place, "chain: its states have other tables", sorted(names))
        if manifest.get("contents") != manifests[0].get("contents"):
            raise _bad(place, "chain: its states have other contents", manifest.get("contents"))


def check_descriptions(manifest: Mapping[str, Any], place: str) -> None:
    """Raise FormatError unless the schema and the configs of the tables can be built."""
    if manifest["schema"] is not None:
        _built("schema", lambda: Schema.from_json(manifest["schema"]), place)
    given = (manifest["model"] or {}).get("given_tables") or {}
    for entry in manifest["tables"]:
        name = entry["name"]
        if isinstance(given, dict) and given.get(name, entry["config"]) != entry["config"]:
            raise _bad(place, f"table {name!r}: the model describes another one", given[name])
        row_types(entry, "state", place)
        _check_config(entry, place)


def _check_config(entry: Mapping[str, Any], place: str) -> None:
    """Build an empty table, wherever its rows would lie: the native core has limits of its own."""
    where = f"table {entry['name']!r}"
    values = {key: value for key, value in entry["config"].items() if key != "tier"}
    _built(where, lambda: config.build(values, Table, where), place)


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
    raise _bad(place, f"it is nested more than {MAX_DEPTH} deep", "")


def _check_text(value: str, place: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _bad(place, "a text is not Unicode", ascii(value)) from error


def _check_paths(manifest: Mapping[str, Any], place: str) -> None:
    """Names of files stay inside the folder, names of states are those of folders beside it."""
    for name in manifest["files"]:
        paths = (PurePosixPath(name), PureWindowsPath(name))
        leaves = any(path.root or path.drive or ".." in path.parts for path in paths)
        if leaves or "\0" in name:
            raise _bad(place, "a file outside of the checkpoint", name)
    for link in manifest.get("chain", ()):
        number_of(link["folder"])


def _check_chain(manifest: Mapping[str, Any], place: str) -> None:
    chain = manifest.get("chain", [])
    if (manifest["kind"] == "delta") != bool(chain):
        raise _bad(place, f"chain: a {manifest['kind']} with {len(chain)} states before it", chain)
    if chain and chain[-1]["digest"] != manifest["parent"]:
        raise _bad(place, "parent: it is not the last of the chain", manifest["parent"])


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
            raise _bad(place, "files: a part refers to a file not listed in MANIFEST.json", name)
        if names.count(name) > 1:
            raise _bad(place, "files: two parts refer to one file", name)


def _check_parts(kind: str, entry: Mapping[str, Any], place: str) -> None:
    where = f"table {entry['name']!r}"
    dim = entry["config"].get("dim")
    if type(dim) is not int or not 1 <= dim <= MAX_DIM:
        raise _bad(place, f"{where}: dim must be from 1 to {MAX_DIM}", dim)
    if entry["config"].get("name") != entry["name"]:
        raise _bad(place, f"{where}: its config has another name", entry["config"].get("name"))
    for parts in (entry["parts"], entry.get("removed", [])):
        last = -1
        for part in parts:
            if not last < part["first"] <= part["last"]:
                raise _bad(place, f"{where}: partitions of its parts must rise", part)
            last = part["last"]
    rows = sum(part["rows"] for part in entry["parts"])
    if rows > entry["rows"] or (kind == "full" and (rows < entry["rows"] or entry.get("removed"))):
        raise _bad(place, f"{where}: {entry['rows']} rows, other than its parts have", rows)


def _bad(place: str, what: str, value: Any) -> FormatError:
    return FormatError(f"{place}: {what} — received {value!r:.120} — {ADVICE}")


def _built(what: str, make: Callable[[], Any], place: str) -> Any:
    try:
        return make()
    except _NOT_BUILT as error:
        text = f"{place}: {what} cannot be built — received {error} — {ADVICE}"
        raise FormatError(text) from error


# --- rows -------------------------------------------------------------------------------------


def arrow_batches(data: memoryview, place: str) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow IPC file, without copying.

    Raises FormatError, naming the file, for anything else, and for compressed buffers, which could
    be a thousand times larger in memory.
    """
    try:
        if bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise pa.ArrowInvalid("it does not begin as one")
        with pa.ipc.open_file(pa.py_buffer(data)) as file:
            schema = file.schema
            names = schema.names  # decoded here, where a name that is not UTF-8 is caught
            num_batches = file.num_record_batches
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data[len(_MAGIC) :]))
        if messages.read_next_message().type != "schema" or not names:
            raise pa.ArrowInvalid("it does not begin with a schema of columns")
        for _ in range(num_batches):
            message = messages.read_next_message()
            if message.type != "record batch":
                raise pa.ArrowInvalid(f"a message is a {message.type}")
            if _is_compressed(memoryview(message.metadata)):
                raise pa.ArrowInvalid("its buffers are compressed")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate()
            yield batch
    except _NOT_ARROW as error:
        text = f"{place}: no Arrow IPC file of rows — received {error} — {ADVICE}"
        raise FormatError(text) from error


def _is_compressed(metadata: memoryview) -> bool:
    """Whether the header of a record batch names a compression; Arrow verified the flatbuffer."""
    message = struct.unpack_from("<I", metadata, 0)[0]
    header = _field(metadata, message, _HEADER)
    if header is None:
        return False
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _field(metadata, batch, _COMPRESSION) is not None


def _field(data: memoryview, table: int, number: int) -> int | None:
    """Where a flatbuffer table has a field; None where it does not have it."""
    offsets = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, offsets)[0]:
        return None
    offset = struct.unpack_from("<H", data, offsets + slot)[0]
    return table + offset if offset else None


def row_types(entry: Mapping[str, Any], contents: str, place: str) -> dict[str, pa.DataType]:
    """Columns that the row files of a table must have, by the table's config in the manifest.

    `contents`: of the manifest; published values have neither state nor policies. Raises
    FormatError for a config that cannot be built.
    """
    where = f"table {entry['name']!r}"
    hints = config.parameters(Table)

    def values() -> dict[str, Any]:
        unknown = sorted(entry["config"].keys() - hints.keys())
        if unknown:
            raise ValueError(f"unknown keys {unknown}")
        return {
            key: config.build(value, hints[key].annotation, f"{where}.{key}")
            for key, value in entry["config"].items()  # each by its own hint
        }

    built = _built(where, values, place)
    dim = int(built["dim"])
    types = {**_PLACE_TYPES, "value": pa.list_(pa.float32(), dim)}
    if contents == "values":
        return types
    rule = built.get("rule") or Adagrad()
    width = rule.state_width(dim)
    if width:
        types["state"] = pa.list_(pa.float32(), width)
    for name in kept_columns(built.get("admit"), evictions(built.get("evict"))):
        types[name] = COLUMN_TYPES[name]
    if rule.scope == "catch_up":
        types["updated"] = COLUMN_TYPES["updated"]
    return types


def checked_rows(
    batches: Iterator[pa.RecordBatch],
    part: Mapping[str, Any],
    types: Mapping[str, pa.DataType],
    place: str,
) -> Iterator[pa.RecordBatch]:
    """The batches of a part, each checked when it is taken: columns, partitions, order, number."""
    rows = 0
    last: tuple[int, int] | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        _check_columns(batch, types, place)
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            last = _check_order(batch.slice(start, _ROWS_AT_ONCE), part, last, place)
        rows += batch.num_rows
        yield batch
    if rows != part["rows"]:
        raise _bad(place, f"it has {rows} rows, the manifest says otherwise", part["rows"])


def _check_order(
    rows: pa.RecordBatch, part: Mapping[str, Any], last: tuple[int, int] | None, place: str
) -> tuple[int, int]:
    """Check that rows follow `last`, the (partition, id) before them; return their own last."""
    partitions = rows.column("partition").to_numpy()
    ids = rows.column("id").to_numpy()
    if not np.array_equal(partitions, partition(ids)):
        raise _bad(place, "an id lies in a partition that is not its own", int(ids[0]))
    first = (int(partitions[0]), int(ids[0]))
    if not _rise(partitions, ids) or (last is not None and first <= last):
        raise _bad(place, "rows out of order, or two of one id", first)
    end = (int(partitions[-1]), int(ids[-1]))
    if first[0] < part["first"] or end[0] > part["last"]:
        raise _bad(place, "rows of other partitions than the manifest says", first[0])
    return end


def checked_candidates(
    batches: Iterator[pa.RecordBatch], entry: Mapping[str, Any], place: str
) -> Iterator[pa.RecordBatch]:
    """The batches of what waits for admission, each checked when it is taken."""
    admit = config.build(entry["config"].get("admit"), config.parameters(Table)["admit"].annotation)
    width = getattr(admit, "sketch_width", 0)
    rows = 0
    known = [np.empty(0, np.int64)]
    for batch in batches:
        if not batch.num_rows:
            continue
        _check_columns(batch, _WAITING_TYPES, place)
        partitions = batch.column("partition").to_numpy()
        ids = batch.column("id").to_numpy()
        if width:
            if len(ids) != 4 * width or (partitions != partitions[0]).any():
                raise _bad(place, f"a sketch has {4 * width} counters a partition", len(ids))
        else:
            if not np.array_equal(partitions, partition(ids)):
                raise _bad(place, "an id lies in a partition that is not its own", int(ids[0]))
            known.append(ids)
        rows += batch.num_rows
        yield batch
    waiting = np.concatenate(known)
    if len(np.unique(waiting)) != len(waiting):
        raise _bad(place, "an id waits twice", len(waiting))
    expected = entry["candidates"]["rows"]
    if rows != expected:
        raise _bad(place, f"it has {rows} rows, the manifest says otherwise", expected)


def _rise(partitions: NDArray[np.uint8], ids: NDArray[np.int64]) -> bool:
    same = partitions[1:] == partitions[:-1]
    rising = (partitions[1:] > partitions[:-1]) | (same & (ids[1:] > ids[:-1]))
    return bool(rising.all())


def _check_columns(batch: pa.RecordBatch, types: Mapping[str, pa.DataType], place: str) -> None:
    names = batch.schema.names
    missing = [name for name in types if name not in names]
    if missing:
        raise _bad(place, f"columns {missing} are missing", names)
    if len(set(names)) != len(names):
        raise _bad(place, "two columns have one name", names)
    for name in names:
        expected = types.get(name, COLUMN_TYPES.get(name))
        column = batch.column(name)
        if expected is not None and column.type != expected:
            raise _bad(place, f"column {name!r} must be {expected}", str(column.type))
        nulls = column.null_count
        if pa.types.is_fixed_size_list(column.type):
            nulls += column.flatten().null_count
        if nulls:
            raise _bad(place, f"column {name!r} has nulls", nulls)
