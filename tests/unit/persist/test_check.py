# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of somebody who knows how to seal them: loading refuses what verifying refuses, by the file's name, and
the other way round."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors import SafetensorError, safe_open
from schedule import in_soak

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.errors import FormatError, HotbedError
from hotbed.persist.container.check import rows as rows_check
from hotbed.persist.container.format import open_checkpoint, read_newest
from hotbed.persist.state.chain import Replica
from hotbed.persist.state.checkpoint import State, save
from hotbed.persist.upkeep.inspect import verify

ZEROS = "0" * 64
TABLES = ("tag", "user")
Change = Callable[["Crafted"], None]


class Crafted:
    """A full and a delta on it, copied; what is changed in the full or the delta is sealed again."""

    def __init__(self, good: Path, root: Path) -> None:
        shutil.copytree(good, root)
        self.root = root
        self.folders = sorted(root.glob("checkpoint-*"))
        self.manifests = [
            json.loads((folder / "MANIFEST.json").read_text()) for folder in self.folders
        ]
        self.full = self.manifests[0]

    def path(self, name: str, number: int = 0) -> Path:
        return self.folders[number] / name

    def entry(self, name: str = "user", number: int = 0) -> Any:
        return next(entry for entry in self.manifests[number]["tables"] if entry["name"] == name)

    def rewrite(
        self, change: Callable[[pa.Table], pa.Table], name: str = "user", **options: Any
    ) -> None:
        """The rows of a table's part in the full, changed."""
        part = self.entry(name)["parts"][0]
        path = self.path(part["file"])
        rows = change(pa.ipc.open_file(path.read_bytes()).read_all())
        with pa.ipc.new_file(
            str(path), rows.schema, options=pa.ipc.IpcWriteOptions(**options)
        ) as sink:
            sink.write_table(rows)
        part["rows"] = self.entry(name)["rows"] = rows.num_rows

    def seal(self) -> None:
        digests: dict[str, str] = {}
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            if isinstance(manifest, dict):
                self._measure(folder, manifest)
                for link in manifest["chain"] if isinstance(manifest.get("chain"), list) else ():
                    if isinstance(link, dict):
                        link["digest"] = digests.get(str(link.get("digest")), link.get("digest"))
                if isinstance(manifest.get("parent"), str):
                    manifest["parent"] = digests.get(manifest["parent"], manifest["parent"])
            before = manifest.pop("digest", ZEROS) if isinstance(manifest, dict) else ZEROS
            text, digest = sealed(manifest)
            digests[str(before)] = digest
            (folder / "MANIFEST.json").write_text(text, errors="surrogatepass")
        data = (self.folders[-1] / "MANIFEST.json").read_bytes()
        (self.root / "CURRENT").write_text(
            f"{self.folders[-1].name} {hashlib.sha256(data).hexdigest()}\n"
        )

    def _measure(self, folder: Path, manifest: dict[str, Any]) -> None:
        files = manifest.get("files")
        for name, entry in files.items() if isinstance(files, dict) else ():
            path = folder / name
            if isinstance(entry, dict) and "\0" not in name and path.is_file():
                data = path.read_bytes()
                entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def sealed(manifest: Any) -> tuple[str, str]:
    text = json.dumps({**manifest, "digest": ZEROS}, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    head, _, tail = text.rpartition(ZEROS)
    return head + digest + tail, digest


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream's full and delta: rows, removed ids, ids that wait, times, counts, scores, dense tensors, progress."""
    root = tmp_path_factory.mktemp("good") / "model"
    draw = np.random.default_rng(0)
    rows = {"y": draw.integers(0, 2, 400), "t": np.arange(400)}
    rows |= {name: draw.integers(0, 150, 400) for name in TABLES}
    schema = hb.Schema([hb.Label("y"), hb.Time("t"), hb.Id("user"), hb.Id("tag")])
    expiring = hb.MinCount(2, expire_seconds=1000)
    tables = {
        "user": hb.Table(
            "user",
            2,
            rule=hb.Adam(),
            admit=expiring,
            evict=[hb.Ttl(seconds=120), hb.Lfu(5000, 100)],
        ),
        "tag": hb.Table("tag", 3, rule=hb.RowwiseAdagrad(), evict=hb.Lru(2000), dtype="bfloat16"),
    }
    model = hb.RecModel(hb.models.DNN(schema, tables, hidden=[2]), "bce", "adam", {"auc"})
    for steps in (4, 8):
        saves = hb.callbacks.Checkpoint(root, every_steps=2, full_every=3, keep=1, wait=True)
        data = hb.Dataset(hb.sources.Memory(rows), schema, 50, prefetch=0)
        model.online_train(
            data, [hb.callbacks.Evict(step_interval=1), saves], progress=False, max_steps=steps
        )
    reader = open_checkpoint(root)
    assert [link.manifest.kind for link in reader.links] == ["full", "delta"]
    assert all(
        entry.parts and entry.removed and entry.candidates for entry in reader.manifest.tables[1:]
    )
    return root


def outcome(read: Callable[[], Any]) -> str:
    try:
        read()
    except HotbedError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def outcomes(root: Path) -> dict[str, str]:
    """What loading, verifying and following say of a checkpoint: "" = taken. Other errors than Hotbed's are raised."""
    return {
        "load": outcome(lambda: hb.load(root)),
        "verify": outcome(lambda: verify(root)),
        "follow": outcome(lambda: Replica().apply(open_checkpoint(root))),
    }


def changed(*path: Any, to: Any) -> Change:
    """Sets a member of the full's manifest; `DELETED` removes it."""

    def change(crafted: Crafted) -> None:
        holder: Any = crafted.full
        for step in path[:-1]:
            holder = holder[step]
        if to is DELETED:
            del holder[path[-1]]
        else:
            holder[path[-1]] = to

    return change


DELETED = object()


def rows(change: Callable[[pa.Table], pa.Table], **options: Any) -> Change:
    return lambda crafted: crafted.rewrite(change, **options)


def cast(name: str, kind: pa.DataType) -> Change:
    return rows(
        lambda table: table.set_column(
            table.schema.get_field_index(name), name, table[name].cast(kind)
        )
    )


def without(name: str) -> Change:
    return rows(lambda table: table.drop_columns([name]))


def with_null(table: pa.Table) -> pa.Table:
    ids = table["id"].to_pylist()
    return table.set_column(1, "id", pa.array([None, *ids[1:]], pa.int64()))


def moved(table: pa.Table) -> pa.Table:
    """All rows in the partitions of other ids, and in order."""
    return table.set_column(0, "partition", pa.array(np.sort(table["partition"].to_numpy() ^ 0x55)))


def narrow(table: pa.Table) -> pa.Table:
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(table.num_rows, np.float32)), 1)
    return table.set_column(2, "value", values)


def with_number(name: str, number: float) -> Callable[[pa.Table], pa.Table]:
    """Return a change of the last number in a column of vectors."""

    def change(table: pa.Table) -> pa.Table:
        column = table.column(name).combine_chunks()
        numbers = column.flatten().to_numpy().copy()
        numbers[-1] = number
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(numbers), column.type.list_size)
        return table.set_column(table.column_names.index(name), name, vectors)

    return change


def bomb(crafted: Crafted) -> None:
    rows = pa.table({"partition": np.zeros(10**6, np.uint8), "id": np.zeros(10**6, np.int64)})
    crafted.rewrite(lambda _: rows, compression="zstd")


def longer(crafted: Crafted) -> None:
    """Lengths in the Arrow file a thousand times what there is."""
    entry = crafted.entry()
    part = entry["parts"][0]
    path = crafted.path(part["file"])
    length = struct.pack("<q", part["rows"])
    path.write_bytes(path.read_bytes().replace(length, struct.pack("<q", part["rows"] * 1000)))
    part["rows"] = entry["rows"] = part["rows"] * 1000


def unnamed(crafted: Crafted) -> None:
    """A column whose name is not UTF-8."""
    path = crafted.path(crafted.entry()["parts"][0]["file"])
    path.write_bytes(path.read_bytes().replace(b"value", b"\xffalue"))


def listed_twice(crafted: Crafted) -> None:
    crafted.entry()["parts"].append(crafted.entry()["parts"][0])


def torn_tensors(crafted: Crafted) -> None:
    for number in (0, 1):
        crafted.path("dense.safetensors", number).write_bytes(b"\xff" * 64)


def nested(crafted: Crafted) -> None:
    value: Any = 1
    for _ in range(400):
        value = [value]
    crafted.full["positions"]["x"] = value


CASES: dict[str, Change] = {
    **{
        f"no {name}": changed(name, to=DELETED)
        for name in ("tables", "files", "positions", "dense", "kind", "digest_")
    },
    "files a list": changed("files", to=[]),
    "tables a number": changed("tables", to=5),
    "an odd kind": changed("kind", to="weird"),
    "a delta without a chain": changed("kind", to="delta"),
    "a version that is a truth": changed("format_version", to=True),
    "nested": nested,
    "not Unicode": changed("positions", "x", to="\ud800"),
    "a dim that is too large": changed("tables", 1, "config", "dim", to=1 << 40),
    "another dim": changed("tables", 1, "config", "dim", to=9),
    "a count beyond the core's": changed("tables", 1, "config", "admit", "count", to=10**30),
    "a table other than the model's": changed("tables", 1, "config", "default", to=0.75),
    "an unknown rule": changed("tables", 1, "config", "rule", to={"kind": "weird"}),
    "a negative counter": changed("tables", 1, "scalars", "step", to=-1),
    "a rate that is text": changed("tables", 1, "scalars", "rates", to=[["1", 0.1]]),
    "a file of another part": lambda crafted: crafted.entry()["candidates"].update(
        file=crafted.entry()["parts"][0]["file"]
    ),
    "a part listed twice": listed_twice,
    "a part that begins late": changed("tables", 1, "parts", 0, "first", to=200),
    "rows twice": rows(lambda table: pa.concat_tables([table, table])),
    "rows of other partitions": rows(moved),
    **{
        f"no {name}": without(name)
        for name in ("partition", "id", "value", "state", "last_seen", "count", "score")
    },
    "ids that are numbers": cast("id", pa.float64()),
    "ids that are text": cast("id", pa.string()),
    "ids of 32 bits": cast("id", pa.int32()),
    "an id that is null": rows(with_null),
    "values of another width": rows(narrow),
    "a value that is nan": rows(with_number("value", np.nan)),
    "a state that is infinite": rows(with_number("state", np.inf)),
    "compressed": bomb,
    "lengths beyond the file": longer,
    "a column whose name is no text": unnamed,
    "tensors that are none": torn_tensors,
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a batch are checked in more than one piece."""
    monkeypatch.setattr(rows_check, "_NUMBERS_AT_ONCE", 5)


@pytest.mark.parametrize("case", CASES)
def test_a_crafted_checkpoint_is_refused_by_the_name_of_its_file(
    good: Path, tmp_path: Path, case: str
) -> None:
    crafted = Crafted(good, tmp_path / "model")
    if case == "no digest_":
        crafted.full["digest_"] = 1  # a member that nobody knows: the copy itself is taken
    CASES[case](crafted)
    crafted.seal()
    told = outcomes(crafted.root)
    if case == "no digest_":
        assert set(told.values()) == {""}
        return
    for reader, message in told.items():
        assert message.startswith(("FormatError", "VersionError")), (reader, message)
        assert any(f"{folder.name}/" in message for folder in crafted.folders), (reader, message)


def test_a_model_that_no_memory_can_hold_is_refused_by_the_name_of_the_manifest(
    good: Path, tmp_path: Path
) -> None:
    crafted = Crafted(good, tmp_path / "model")
    crafted.manifests[1]["model"]["network"]["hidden"] = [10**9, 10**9]
    crafted.seal()
    with pytest.raises(FormatError, match=r"MANIFEST.json: its model cannot be built"):
        hb.load(crafted.root)


def test_a_read_that_races_with_retention_reads_the_state_that_became_newest(
    tmp_path: Path,
) -> None:
    save(tmp_path, State(version=1))
    versions: list[int] = []

    def read(reader: Any) -> int:
        versions.append(reader.manifest.version)
        if len(versions) < 3:
            save(tmp_path, State(version=len(versions) + 1))  # retention removes what is being read
        assert bytes(reader.store.read(f"{Path(reader.folder).name}/MANIFEST.json"))
        return versions[-1]

    assert read_newest(tmp_path, read) == 3
    assert versions == [1, 2, 3]


def test_a_read_of_a_torn_state_that_stays_newest_is_not_repeated(tmp_path: Path) -> None:
    calls: list[Any] = []
    save(tmp_path, State())

    def read(reader: Any) -> None:
        calls.append(reader)
        raise FormatError("torn")

    with pytest.raises(FormatError, match="torn"):
        read_newest(tmp_path, read)
    assert len(calls) == 1


# --- fuzzing ------------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all members of nested values."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


ODD = [None, True, -1, 0, 1, 255, 256, 2**31, 2**63, 2**64, 10**30, 0.5, float("nan"), 1e308, "", "x", "\0", "../x",
       [], {}, [[]], {"kind": "x"}, ["x"], [1, 2]]  # fmt: skip


def fuzzed_manifest(crafted: Crafted, draw: random.Random) -> tuple[Any, ...]:
    """One to three members changed; returns the first step of each path."""
    touched = []
    for _ in range(draw.randint(1, 3)):
        manifest = draw.choice(crafted.manifests)
        *path, last = draw.choice(list(places(manifest)))
        holder: Any = manifest
        for step in path:
            holder = holder[step]
        how = draw.randrange(3)
        if how == 0:
            holder[last] = copy.deepcopy(draw.choice(ODD))
        elif how == 1:
            del holder[last]
        else:
            other: Any = manifest
            for step in draw.choice(list(places(manifest))):
                other = other[step]
            holder[last] = copy.deepcopy(other)
        touched.append((*path, last)[0])
    return tuple(touched)


def fuzzed_file(crafted: Crafted, draw: random.Random) -> tuple[Any, ...]:
    """Bytes of one file changed, cut, repeated or taken from another file; returns ("dense",)
    where the dense part can still be read and describes other tensors.
    """
    paths = sorted(
        path
        for folder in crafted.folders
        for path in folder.rglob("*")
        if path.suffix in (".arrow", ".safetensors")
    )
    path = draw.choice(paths)
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(data))
        how = draw.randrange(4)
        if how == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            data[at : at + 8] = struct.pack(
                "<q", draw.choice([-1, 0, 1, 7, 2**16, 2**31, 2**40, 2**62])
            )
        elif how == 2:
            data[at : at + 16] = data[(start := draw.randrange(len(data))) : start + 16]
        elif len(data) > 100:
            del data[at : at + draw.randint(1, 64)]
    shapes = dense_shapes(path)
    path.write_bytes(data)
    return ("dense",) if dense_shapes(path) not in (shapes, None) else ()


def dense_shapes(path: Path) -> dict[str, Any] | None:
    """Names, types and shapes of a safetensors file; None for other and for unreadable files.

    Only a network can reject a readable file whose tensors have other names or shapes.
    """
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, "np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except SafetensorError:
        return None


def fuzz(good: Path, root: Path, seed: int) -> None:
    draw = random.Random(seed)
    crafted = Crafted(good, root)
    touched = draw.choice([fuzzed_manifest, fuzzed_file])(crafted, draw)
    crafted.seal()
    told = outcomes(root)
    of_the_model = {"model", "schema", "dense", "contents"} & set(
        touched
    )  # what only a network can tell
    if not told["load"]:
        assert not told["verify"], (seed, told)
    elif not of_the_model:
        assert told["verify"], (seed, told)
    for message in told.values():
        assert not message or "checkpoint-" in message or str(root) in message, (seed, told)
    shutil.rmtree(root)


@pytest.mark.parametrize("seed", in_soak(range(4), quick={0, 1}))
def test_whatever_is_changed_and_sealed_again_is_taken_or_refused_by_all(
    good: Path, tmp_path: Path, seed: int
) -> None:
    for number in range(8):
        fuzz(good, tmp_path / "model", seed * 1000 + number)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_whatever_is_changed_for_minutes_is_taken_or_refused_by_all(
    good: Path, tmp_path: Path
) -> None:
    """Five minutes, or HOTBED_FUZZ_SECONDS; a failure names its seed."""
    seed = int(os.environ.get("HOTBED_FUZZ_SEED", "1000000"))
    deadline = time.monotonic() + float(os.environ.get("HOTBED_FUZZ_SECONDS", "300"))
    first = seed
    while time.monotonic() < deadline:
        fuzz(good, tmp_path / "model", seed)
        seed += 1
    print(f"{seed - first} checkpoints, seeds {first} to {seed - 1}")
