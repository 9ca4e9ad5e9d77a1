# SPDX-License-Identifier: Apache-2.0
"""MANIFEST.json as a typed value: its members and its seal; and trees, the values in it.

docs/format.md says what each member means, and `check` whether a manifest contradicts itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NotRequired, Self
from urllib.parse import quote

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, Strict, TypeAdapter, WrapValidator
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from hotbed.embedding.policy import PARTITIONS
from hotbed.errors import PersistError

FORMAT = "hotbed.checkpoint"
FORMAT_VERSION = 3
FLOATS_VERSION = 2  # the version of manifests whose tables all hold floats
DENSE_FILE = "dense.safetensors"
PROGRESS_FILE = "progress.safetensors"
ZEROS = "0" * 64

# --- members ------------------------------------------------------------------------------------


def _rate(run: list[Any]) -> list[Any]:
    step, rate = run
    if type(step) is not int or not 0 <= step < 2**64:
        raise ValueError("a step must be an unsigned 64-bit integer")
    if type(rate) not in (int, float) or not math.isfinite(rate):
        raise ValueError("a learning rate must be finite")
    return run


def _as_written(value: Any, check: Callable[[Any], Any]) -> Any:
    """Check a value and return it with the order and the members that its writer gave it."""
    check(value)
    return value


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Counter = Annotated[int, Strict(), Field(ge=0, lt=2**64)]
Micros = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
Partition = Annotated[int, Strict(), Field(ge=0, lt=PARTITIONS)]
Rate = Annotated[list[Any], Field(min_length=2, max_length=2), AfterValidator(_rate)]
Seconds = Annotated[float, Strict()] | None


class Scalars(TypedDict):
    """What `Table.scalars` returns. Members may be added by the table."""

    step: Counter
    calls: Counter
    watermark: Micros
    watermark_step: NotRequired[Micros]
    timed: Annotated[bool, Strict()] | None
    rates: list[Rate]
    admitted: Counter
    refused: Counter
    evicted: Counter
    evicted_by: NotRequired[dict[str, Counter]]


class OptimizerGroup(TypedDict):
    """A parameter group of an optimizer, with more members than these."""

    params: list[Count]
    tables: NotRequired[list[str]]


OptimizerState = TypedDict(
    "OptimizerState",
    {"class": str, "groups": list[OptimizerGroup], "scalars": dict[str, dict[str, Any]]},
)
"""What `network.flatten` returns for an optimizer, tensors aside."""


_ADAPTERS = dict[type[Any], TypeAdapter[Any]]()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A JSON object in the manifest.

    Members of a newer writer are kept in `unknown`: what copies an entry copies them with it.
    """

    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Build an entry from JSON values. Raises pydantic's ValidationError, a ValueError."""
        if cls not in _ADAPTERS:
            _ADAPTERS[cls] = TypeAdapter(cls)
        entry: Self = _ADAPTERS[cls].validate_python(plain)
        return entry

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values: the inverse of `from_json`."""
        plain = {name: _plain(getattr(self, name)) for name in _names(type(self))}
        return {**plain, **self.unknown}

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: Callable[[Any], CoreSchema]
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(cls._set_apart, handler(source))

    @classmethod
    def _set_apart(cls, plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        names = _names(cls)
        members = {name: value for name, value in plain.items() if name in names}
        unknown = {name: value for name, value in plain.items() if name not in names}
        return {**members, "unknown": unknown}


def _names(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of an entry's members in the order in which they are written."""
    return tuple(member.name for member in fields(cls) if member.name != "unknown")


def _plain(value: Any) -> Any:
    if isinstance(value, Entry):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, kw_only=True)
class FileEntry(Entry):
    """Size and SHA-256 of a file."""

    bytes: Count
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PartEntry(Entry):
    """A file of rows, or of removed ids. `first`, `last`: its partitions, both inclusive."""

    file: str
    first: Partition
    last: Partition
    rows: Count


@dataclass(frozen=True, kw_only=True)
class CandidatesEntry(Entry):
    """The file of the ids that wait for admission."""

    file: str
    rows: Count


@dataclass(frozen=True, kw_only=True)
class SketchEntry(Entry):
    """The file of the sketches that count ids that wait for admission; a row is a generation."""

    file: str
    rows: Count


@dataclass(frozen=True, kw_only=True)
class TableEntry(Entry):
    """A table. `rows`: of the state, which are those of a delta's whole chain."""

    name: str
    config: dict[str, Any]
    rows: Count
    scalars: Annotated[Scalars, WrapValidator(_as_written)]
    parts: tuple[PartEntry, ...]
    removed: tuple[PartEntry, ...] = ()
    candidates: CandidatesEntry | None
    sketch: SketchEntry | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values, with `sketch` only where a sketch has begun."""
        plain = super().to_json()
        if self.sketch is None:
            del plain["sketch"]
        return plain

    @property
    def all_parts(self) -> tuple[PartEntry, ...]:
        """Parts of rows, then those of removed ids."""
        return (*self.parts, *self.removed)


@dataclass(frozen=True, kw_only=True)
class DenseEntry(Entry):
    """The dense part. `file`: None without tensors; `optimizers`: by name."""

    file: str | None
    optimizers: dict[str, Annotated[OptimizerState, WrapValidator(_as_written)]]


@dataclass(frozen=True, kw_only=True)
class ProgressEntry(Entry):
    """What a run keeps besides model and tables. `tree`, `random`: trees of `encode`."""

    file: str | None
    tree: dict[str, Any]
    random: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OpenRowsEntry(Entry):
    """What a join of streams held open. A delta has the rows that came since its parent.

    `opened`: how many rows each log ever had; `oldest`: the earliest time of rows that count, in
    microseconds; `files`: of the logs that have rows.
    """

    opened: dict[str, Count]
    oldest: Micros
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class GraphEntry(Entry):
    """Inputs and outputs of an ONNX graph; see `hotbed.persist.publish.version.OnnxGraph`."""

    file: str
    lookups: list[dict[str, Any]]
    weights: list[str]
    dense: list[str]
    outputs: list[str]
    ids: dict[str, Any] | None = None
    lengths: dict[str, Count] | None = None
    shares_histories: bool | None = None
    columns_together: list[list[str]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values, without the optional ones that are None."""
        plain = super().to_json()
        for name in ("ids", "lengths", "shares_histories", "columns_together"):
            if plain[name] is None:
                del plain[name]
        return plain

    @property
    def files(self) -> list[str]:
        """Names of its files."""
        return [self.file] if self.ids is None else [self.file, str(self.ids["file"])]


@dataclass(frozen=True, kw_only=True)
class ChainEntry(Entry):
    """A state that a delta needs."""

    folder: str
    digest: Digest


@dataclass(frozen=True, kw_only=True)
class HeldEntry(Entry):
    """Why a gate held a state. `rule`: its name; `reason`: a sentence with the numbers."""

    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Manifest(Entry):
    """Everything that MANIFEST.json says; `files` and `digest` are set when it is sealed.

    `held`: why a gate did not publish the state; None if it may be published. `forced`: of a
    published version, why it was published although its state was held.
    """

    format_version: Annotated[int, Strict()] = FLOATS_VERSION
    package_version: str
    kind: Literal["full", "delta"]
    contents: Literal["state", "values"] = "state"
    version: Count
    parent: Digest | None
    chain: tuple[ChainEntry, ...] = ()
    source: Digest | None = None
    published: Seconds = None
    learned: Seconds = None
    caught: Seconds = None
    graph: GraphEntry | None = None
    model: dict[str, Any] | None
    schema: dict[str, Any] | None
    positions: dict[str, Any]
    counters: dict[str, Count]
    dense: DenseEntry | None
    progress: ProgressEntry | None = None
    open_rows: OpenRowsEntry | None = None
    tables: tuple[TableEntry, ...]
    compacted: Any = None
    held: tuple[HeldEntry, ...] | None = None
    forced: str | None = None
    files: dict[str, FileEntry] = field(default_factory=dict)
    digest: Digest = ZEROS

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values, in the order in which they are written."""
        plain = super().to_json()
        order = _ORDER_OF_STATES if self.contents == "state" else _ORDER_OF_VALUES
        members = {name: plain[name] for name in order if _is_written(name, plain[name])}
        head = {"format": FORMAT, "format_version": self.format_version}
        tail = {"files": plain["files"], "digest": self.digest}
        return {**head, **members, **self.unknown, **tail}

    def with_files(self, files: Mapping[str, FileEntry]) -> tuple[bytes, Manifest]:
        """Seal the manifest with the entries of all files; return its text and the sealed value."""
        has_whole = any(table.config.get("dtype") == "int32" for table in self.tables)
        version = FORMAT_VERSION if has_whole else FLOATS_VERSION
        complete = replace(self, format_version=version, files=dict(files))
        text, digest = sealed(complete.to_json())
        return text.encode(), replace(complete, digest=digest)


# Manifests that hold the same have the same bytes, whatever Hotbed wrote them.
_ORDER_OF_STATES = (
    "package_version",
    "contents",
    "version",
    "parent",
    "model",
    "schema",
    "positions",
    "counters",
    "kind",
    "chain",
    "dense",
    "progress",
    "open_rows",
    "tables",
    "compacted",
    "held",
)
_ORDER_OF_VALUES = (
    "package_version",
    "version",
    "model",
    "schema",
    "counters",
    "graph",
    "kind",
    "contents",
    "parent",
    "chain",
    "source",
    "published",
    "learned",
    "caught",
    "positions",
    "dense",
    "progress",
    "open_rows",
    "tables",
    "compacted",
    "held",
    "forced",
)
_WRITTEN_IF_KNOWN = {
    *("graph", "source", "published", "learned", "caught", "open_rows", "compacted"),
    *("held", "forced"),
}


def _is_written(name: str, value: Any) -> bool:
    return value is not None or name not in _WRITTEN_IF_KNOWN


# --- the seal -----------------------------------------------------------------------------------


def sealed(members: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of a manifest, and its digest.

    The digest is the last member: the SHA-256 of the text with 64 zeros in its place.
    """
    plain = {name: value for name, value in members.items() if name != "digest"}
    text = json.dumps({**plain, "digest": ZEROS}, indent=1, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    before, _, after = text.rpartition(ZEROS)
    return before + digest + after, digest


# --- trees --------------------------------------------------------------------------------------

Arrays = dict[str, NDArray[Any]]
"""Arrays by the path that leads to them in a tree."""


def encode(tree: Any, name: str = "") -> tuple[Any, Arrays]:
    """Return a nested value as JSON, and the arrays in it.

    Dicts, lists, tuples, None, booleans, numbers, text, bytes, and NumPy arrays and scalars of
    numbers or booleans come back from `decode` as they were.

    Raises:
        PersistError: the tree holds something else; the message names its path.

    >>> encode({"auc": [0.5, (1, 2)]})
    ({'auc': [0.5, {'$tuple': [1, 2]}]}, {})
    """
    arrays: Arrays = {}
    return _encoded(tree, name, arrays), arrays


def decode(plain: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return the nested value that `encode` made into `plain` and `arrays`."""
    if isinstance(plain, list):
        return [decode(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next(iter(plain), "")
    if len(plain) > 1 or not mark.startswith("$"):
        return {key: decode(item, arrays) for key, item in plain.items()}
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
    return {mark: decode(value, arrays)}


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return arrays as the bytes of a safetensors file."""
    data: bytes = safetensors.numpy.save(dict(arrays))
    return data


def unpacked(data: bytes) -> Arrays:
    """Return the arrays in the bytes of a safetensors file: the inverse of `packed`."""
    arrays: Arrays = safetensors.numpy.load(data)
    return arrays


def _encoded(value: Any, path: str, arrays: Arrays) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return _encoded_array(value, path, arrays)
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
        return _encoded_mapping(value, path, arrays)
    raise _not_encoded(path, type(value).__name__)


def _encoded_array(value: Any, path: str, arrays: Arrays) -> dict[str, str]:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _not_encoded(path, f"an array of {array.dtype}")
    # a copy: the caller may write into its own array; 0-dim arrays stay 0-dim
    arrays[path] = array.astype(array.dtype.newbyteorder("<"), copy=True, order="C")
    return {"$array" if isinstance(value, np.ndarray) else "$scalar": path}


def _encoded_mapping(value: Mapping[Any, Any], path: str, arrays: Arrays) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {
            key: _encoded(item, f"{path}/{quote(key, safe='')}", arrays)
            for key, item in value.items()
        }
    pairs = []
    for number, (key, item) in enumerate(value.items()):
        plain_key = _encoded(key, f"{path}/{number}.key", arrays)
        pairs.append([plain_key, _encoded(item, f"{path}/{number}", arrays)])
    return {"$pairs": pairs}


def _not_encoded(path: str, kind: str) -> PersistError:
    return PersistError(
        f"{path or 'state'}: cannot be saved, got {kind}. Keep numbers, text, bytes, lists, "
        "tuples, dicts and NumPy arrays of numbers there."
    )
