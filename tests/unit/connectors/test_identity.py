# SPDX-License-Identifier: Apache-2.0
"""What happens to which change of a followed file: the content decides, never a time or an inode."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.connectors import Csv, DeadLetters, Follow, Journal, Live
from hotbed.connectors.file_identity import EDGE_BYTES, FileIdentity, name_of, text_of
from hotbed.data import Batch, Dataset, Id, Label, Schema
from hotbed.errors import DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core
SCHEMA = Schema([Label("label"), Id("row")])
HEADER = "row,label\n"


def text(start: int, stop: int) -> str:
    return "".join(f"{row},{row % 2}\n" for row in range(start, stop))


def put(folder: Path, name: str, content: str | bytes) -> None:
    """As a good writer does it: another name first, then a rename."""
    part = folder / f".{name}.part"
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.rename(folder / name)


class Life:
    """A reader of one folder, which may die and come again: `rows` are those of all its lives."""

    def __init__(self, folder: Path, letters: Path | None = None, **keywords: Any) -> None:
        self.folder = folder / "in"
        self.folder.mkdir(exist_ok=True)
        self.rows: list[int] = []
        self._journal = Journal()
        self._letters = letters
        self._position: dict[str, Any] = {}
        self.keywords = keywords
        self._dataset: Dataset | None = None

    def read(self, **keywords: Any) -> Life:
        """Everything that is there now, by a new reader from the position of the last one."""
        self.keywords |= keywords
        settings = dict(self.keywords)
        on_error = settings.pop("on_error", "raise")
        batch_size = settings.pop("batch_size", 1)
        dataset = Dataset(
            Follow(self.folder, **settings), SCHEMA, batch_size, on_error=on_error, prefetch=0
        )
        dataset.live = Live(self._journal, DeadLetters(self._letters), tick_seconds=0.0)
        self.dataset = dataset.resume(self._position)
        return self.go_on(dataset.stream())

    def go_on(self, items: Any) -> Life:
        """The same reader reads on, until nothing is left."""
        self._items = items
        ticks = 0
        for item in items:
            ticks = ticks + 1 if item is None else 0
            if isinstance(item, Batch):
                self.rows += item.ids["row"].values.tolist()
                assert item.position is not None
                self._position = json.loads(json.dumps(item.position.to_json()))
            if ticks == 4:  # a block without rows is a tick as well
                break
        return self

    def poll(self) -> Life:
        """As `read`, without a restart."""
        return self.go_on(self._items)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """A reader that has read current.csv, rows 0 to 3."""
    reader = Life(tmp_path)
    put(reader.folder, "current.csv", HEADER + text(0, 4))
    return reader.read()


def again(life: Life, restart: bool) -> Life:
    return life.read() if restart else life.poll()


both = pytest.mark.parametrize("restart", [False, True], ids=["alive", "restarted"])


def touch(file: Path) -> None:
    os.utime(file, (1, 1))


def copy(file: Path) -> None:
    shutil.copyfile(file, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").rename(file)


def restore(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


@both
@pytest.mark.parametrize("change", [touch, copy, restore])
def test_the_same_content_is_the_same_file(
    life: Life, restart: bool, change: Callable[[Path], None]
) -> None:
    change(life.folder / "current.csv")
    put(life.folder, "other.csv", HEADER + text(4, 6))
    assert again(life, restart).rows == [0, 1, 2, 3, 4, 5]


@both
def test_an_empty_file_is_read_when_it_is_filled(life: Life, restart: bool) -> None:
    (life.folder / "b.csv").write_bytes(b"")
    put(life.folder, "c.csv", "\n")
    assert again(life, restart).rows == [0, 1, 2, 3]
    (life.folder / "b.csv").write_text(HEADER + text(4, 6))
    assert again(life, restart).rows == [0, 1, 2, 3, 4, 5]


def test_empty_files_in_front_do_not_stop_reading(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for name in ("a.csv", "b.jsonl", "c.parquet"):
        put(life.folder, name, "")
    put(life.folder, "d.csv", HEADER + text(0, 2))
    assert Follow(life.folder).schema().names == ["row", "label"]
    assert life.read().rows == [0, 1]


@both
def test_lines_that_are_added_are_read_where_files_may_grow(life: Life, restart: bool) -> None:
    life.keywords["grows"] = True
    life.read()
    for added in (text(4, 6) + "6", ",0\n7", ",1", "\n"):
        with (life.folder / "current.csv").open("a") as file:
            file.write(added)
        again(life, restart)
    assert life.rows == [0, 1, 2, 3, 4, 5, 6, 7]


@both
def test_lines_that_are_added_are_an_error_where_files_may_not_grow(
    life: Life, restart: bool
) -> None:
    with (life.folder / "current.csv").open("a") as file:
        file.write(text(4, 6))
    put(life.folder, "other.csv", HEADER + text(6, 8))
    with pytest.raises(
        DataError, match=r"current.csv: it has 34 bytes, and 26 of them were read before. Set grows"
    ):
        again(life, restart)
    assert life.read(on_error="skip").rows == [0, 1, 2, 3, 6, 7]
    assert life.dataset.skips.counts == {"file": 1}
    assert life.dataset.live.dead_letters.counts == {"changed": 1}
    assert sorted(life.read(grows=True).rows) == [0, 1, 2, 3, 4, 5, 6, 7]


@both
@pytest.mark.parametrize("grows", [False, True])
def test_other_content_under_a_name_is_an_error_or_new_rows(
    life: Life, restart: bool, grows: bool
) -> None:
    life.keywords["grows"] = grows
    life.read()
    put(life.folder, "current.csv", HEADER + text(4, 9))
    put(life.folder, "other.csv", HEADER + text(20, 22))
    with pytest.raises(
        DataError, match=r"current.csv: it holds other content than the 26 bytes that were read"
    ):
        again(life, restart)
    assert life.read(on_error="skip").rows == [0, 1, 2, 3, 20, 21]
    assert life.poll().dataset.skips.counts == {"file": 1}
    assert life.read(on_error="raise", replaced="read").rows == [0, 1, 2, 3, 20, 21, 4, 5, 6, 7, 8]
    put(life.folder, "current.csv", HEADER + text(10, 15))
    assert again(life, restart).rows[11:] == [10, 11, 12, 13, 14]


@both
def test_a_name_is_free_again_when_its_file_was_seen_to_be_gone(life: Life, restart: bool) -> None:
    (life.folder / "current.csv").unlink()
    put(life.folder, "other.csv", HEADER + text(4, 6))
    again(life, restart)
    put(life.folder, "current.csv", HEADER + text(6, 8))
    assert again(life, restart).rows == list(range(8))
    assert set(life.dataset.position["source"]["seen"]) == {"other.csv", "current.csv"}


@pytest.mark.parametrize(
    ("name", "content", "rest", "rows"),
    [
        ("b.csv", HEADER + text(4, 6), "6", [4, 5]),
        ("b.csv", HEADER + "4,0\n", '5,"1\n', [4]),
        ("b.jsonl", '{"row": 4, "label": 1}\n', '{"row": 5, ', [4]),
        ("b.tsv", "", "row\tlab", []),
    ],
)
def test_a_torn_last_line_is_never_learned(
    life: Life, name: str, content: str, rest: str, rows: list[int]
) -> None:
    put(life.folder, name, content + rest)
    with pytest.raises(DataError, match="its last line has no line end and may be torn"):
        life.poll()
    assert life.read(grows=True).rows == [0, 1, 2, 3, *rows]
    assert life.read(grows=False, on_error="skip").rows == [0, 1, 2, 3, *rows]
    assert life.dataset.live.dead_letters.counts == {"changed": 1}


def test_a_last_json_object_without_a_line_end_is_whole(life: Life) -> None:
    put(life.folder, "b.jsonl", '{"row": 4, "label": 1}\n{"row": 5, "label": 1}')
    assert life.poll().rows == [0, 1, 2, 3, 4, 5]
    with (life.folder / "b.jsonl").open("a") as file:
        file.write("\n")
    assert life.poll().rows == [0, 1, 2, 3, 4, 5]
    with (life.folder / "b.jsonl").open("a") as file:
        file.write('{"row": 6, "label": 1}\n')
    assert life.read(grows=True).rows == [0, 1, 2, 3, 4, 5, 6]


def test_a_parquet_file_does_not_grow(life: Life) -> None:
    pq.write_table(pa.table({"row": [4, 5], "label": [0, 1]}), life.folder / ".b")
    whole = (life.folder / ".b").read_bytes()
    put(life.folder, "b.parquet", whole)
    assert life.poll().rows == [0, 1, 2, 3, 4, 5]
    put(life.folder, "b.parquet", whole + b"more")
    with pytest.raises(DataError, match=r"b.parquet: it holds other content"):
        life.read(grows=True)


def test_a_file_without_header_and_with_long_delimiters_grows(tmp_path: Path) -> None:
    form = Csv("", delimiter="::", header=False, columns=["row", "label"])
    life = Life(tmp_path, format=form, pattern="*.dat", grows=True)
    put(life.folder, "a.dat", "0::1\n1::1\n2")
    assert life.read().rows == [0, 1]
    (life.folder / "a.dat").write_text("0::1\n1::1\n2::0\n3::0\n")
    assert life.poll().rows == [0, 1, 2, 3]


def test_content_is_known_by_its_first_and_last_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a"
    data = bytearray(os.urandom(3 * EDGE_BYTES))
    file.write_bytes(data)
    identity = FileIdentity.of(str(file), len(data))
    assert identity.compare(str(file)) == "same"
    for place in (0, EDGE_BYTES - 1, 2 * EDGE_BYTES, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert identity.compare(str(file)) == "other"
    file.write_bytes(data + b"x")
    assert identity.compare(str(file)) == "longer"
    file.write_bytes(data[:-1])
    assert identity.compare(str(file)) == "other"
    file.unlink()
    assert identity.compare(str(file)) == "gone"


@pytest.mark.parametrize(
    "name", ["a.csv", "ä b\n.csv", os.fsdecode(b"b\xff%41.csv"), os.fsdecode(b"\xfe")]
)
def test_names_that_are_not_text_go_through_positions_and_back(name: str) -> None:
    encoded = text_of(name)
    assert name_of(json.loads(json.dumps(encoded).encode())) == name
    assert encoded.encode()


def test_a_name_that_is_not_utf8_is_read_like_any_other(
    life: Life, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, ending in enumerate(("csv", "jsonl", "parquet"), 1):
        path = life.folder / os.fsdecode(b"b\xff." + ending.encode())
        table = pa.table({"row": [4 * number, 4 * number + 1], "label": [0, 1]})
        if ending == "csv":
            path.write_text(HEADER + text(4, 6))
        elif ending == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        else:
            pq.write_table(table, str(tmp_path / "plain"))
            shutil.move(tmp_path / "plain", path)
    assert life.poll().rows == [0, 1, 2, 3, 4, 5, 8, 9, 12, 13]
    (life.folder / os.fsdecode(b"c\xff.csv")).write_text(HEADER + "x,1\n14,1\n")
    with pytest.raises(DecodeError, match=r"c\\udcff.csv.*line 2"):
        life.read()
    assert life.read(on_error="skip").rows[10:] == [14]
    for record in caplog.records:
        assert record.getMessage().encode()  # a log is UTF-8


def test_an_unchanged_file_is_looked_at_once(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    original = FileIdentity.of

    def of(path: str, size: int, rows: int = 0) -> FileIdentity:
        looks.append(path)
        return original(path, size, rows)

    os.utime(life.folder / "current.csv", (1, 1))
    monkeypatch.setattr(FileIdentity, "of", of)
    life.poll().poll().poll()
    assert len(looks) == 1
    touch_again = (life.folder / "current.csv", (2, 2))
    os.utime(*touch_again)
    life.poll().poll()
    assert len(looks) == 2


def test_a_seen_file_that_does_not_settle_is_not_forgotten(tmp_path: Path) -> None:
    life = Life(tmp_path, settle_seconds=3600.0)
    put(life.folder, "a.csv", HEADER + text(0, 4))
    os.utime(life.folder / "a.csv", (1, 1))
    assert life.read().rows == [0, 1, 2, 3]
    os.utime(life.folder / "a.csv")
    life.poll()
    os.utime(life.folder / "a.csv", (1, 1))
    assert life.poll().rows == [0, 1, 2, 3]


def test_a_position_of_an_older_version_is_completed(life: Life) -> None:
    put(life.folder, "b.csv", HEADER + text(4, 6))
    old = {"block": 1, "file": None, "size": 0, "row": 0, "seen": ["current.csv"], "now": 5}
    source = {**old, "schema": life.dataset.position["source"]["schema"]}
    position = {**life.dataset.position.to_json(), "source": source}
    dataset = Dataset(Follow(life.folder), SCHEMA, 1, prefetch=0).resume(position)
    dataset.live = replace(dataset.live, tick_seconds=0.0)
    items = dataset.stream()
    rows = [item.ids["row"].values.tolist() for item in islice(items, 2) if item is not None]
    assert rows == [[4], [5]]
    assert {len(value[1]) for value in dataset.position["source"]["seen"].values()} == {32}
    put(life.folder, "current.csv", HEADER + text(30, 40))
    with pytest.raises(DataError, match="other content"):
        list(items)


# --- a bad file stopped the stream ----------------------------------------------------------------

GOOD = HEADER + text(4, 8)


def torn_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"row": [4, 5], "label": [0, 1]}), sink)
    return bytes(sink.getvalue())[:-20]


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("b.csv", HEADER + "x,1\n" + text(4, 8), DecodeError),  # the source raises
        ("b.csv", HEADER + "5,\n" + text(4, 8), DecodeError),  # the encoder raises
        ("b.csv", "row,other\n5,1\n", SchemaError),
        ("b.csv", HEADER + text(4, 7) + "7", DataError),
        ("b.jsonl", "{}\n", DecodeError),
        ("b.parquet", torn_parquet(), DecodeError),
    ],
)
@pytest.mark.parametrize("remedy", ["corrected", "removed", "grown"])
def test_a_file_that_stopped_the_stream_can_be_corrected_or_removed(
    life: Life, name: str, bad: str | bytes, error: type[Exception], remedy: str
) -> None:
    life.keywords["batch_size"] = 1
    put(life.folder, name, bad)
    put(life.folder, "c.csv", HEADER + text(20, 22))
    for _ in range(2):
        with pytest.raises(error, match=rf"{name}|'label'"):
            life.read()
    (life.folder / name).unlink()
    if remedy != "removed":
        put(life.folder, "b.csv", GOOD)
    if remedy == "grown":
        life.read()
        with (life.folder / "b.csv").open("a") as file:
            file.write(text(8, 9))
        assert sorted(life.read(grows=True).rows) == [*range(9), 20, 21]
        return
    expected = [0, 1, 2, 3, *([] if remedy == "removed" else [4, 5, 6, 7]), 20, 21]
    assert life.read().rows == expected
    assert life.read().rows == expected


@pytest.mark.parametrize("content", ["", GOOD], ids=["removed", "corrected"])
def test_what_became_of_a_bad_file_is_decided_once(life: Life, content: str) -> None:
    """A run that dies after the decision, before it is in a checkpoint, decides the same."""
    put(life.folder, "b.csv", HEADER + "x,1\n")
    put(life.folder, "c.csv", HEADER + text(20, 24))
    with pytest.raises(DecodeError):
        life.read()
    (life.folder / "b.csv").unlink()
    if content:
        put(life.folder, "b.csv", content)
    died_at = life._position
    expected = life.read().rows[4:]
    put(life.folder, "a.csv", HEADER + text(30, 34))  # first by name, but not decided then
    life._position = died_at
    assert life.read().rows[4 + len(expected) :] == [*expected, 30, 31, 32, 33]


def test_a_bad_file_is_left_out_under_skip_also_after_it_stopped_the_stream(life: Life) -> None:
    put(life.folder, "b.parquet", torn_parquet())
    put(life.folder, "c.csv", HEADER + text(20, 22))
    with pytest.raises(DecodeError):
        life.read()
    assert life.read(on_error="skip").rows == [0, 1, 2, 3, 20, 21]
    assert life.dataset.live.dead_letters.counts == {"torn": 1}


def test_rows_of_a_corrected_file_that_were_learned_are_not_read_again(tmp_path: Path) -> None:
    """The bad row lies beyond what is read at once, so that rows before it were handed out."""
    life = Life(tmp_path, batch_size=10_000)
    lines = [f"{row},{row % 2},{'x' * 40}\n" for row in range(200_000)]
    whole = "row,label,more\n" + "".join(lines)
    bad = whole.replace("\n150000,0,", "\nx150000,0,")
    put(life.folder, "a.csv", bad)
    with pytest.raises(DecodeError, match="line 150002"):
        life.read()
    learned = len(life.rows)
    assert 0 < learned < 150_000
    put(life.folder, "a.csv", whole)
    assert life.read().rows == list(range(200_000))
    assert life.read().rows == list(range(200_000))


def test_a_file_at_hand_that_is_replaced_is_named_and_restored_or_left_out(life: Life) -> None:
    content = HEADER + text(4, 12)
    life.keywords["batch_size"] = 4
    put(life.folder, "b.csv", content)
    assert next(life._items) is not None  # its block is on record, and some of it read
    put(life.folder, "b.csv", HEADER + text(30, 34))
    for _ in range(2):
        with pytest.raises(
            DataError, match="changed before it was read to its end: it had 44 bytes and it has"
        ):
            life.read()
    put(life.folder, "b.csv", content)
    assert life.read().rows == list(range(12))


def test_the_rest_of_a_file_at_hand_that_is_replaced_is_left_out_under_skip(
    life: Life, tmp_path: Path
) -> None:
    put(life.folder, "b.csv", HEADER + text(4, 12))
    assert next(life._items) is not None
    put(life.folder, "b.csv", HEADER + text(30, 34))
    assert life.read(on_error="skip").rows == [0, 1, 2, 3, 30, 31, 32, 33]
    assert life.dataset.live.dead_letters.counts == {"changed": 1}


# --- bad rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad", "payload"),
    [
        ("b.csv", b"abc,1", '{"row": "abc", "label": "1"}'),
        ("b.csv", b"6,1,7", "6,1,7"),
        ("b.csv", b'6,"1', '6,"1'),
        ("b.csv", b"\xff\xfe,1", '{"row": "\\\\xff\\\\xfe", "label": "1"}'),
        ("b.csv", b"6," + b"1" * 5_000_000, "6," + "1" * 198),
        ("b.jsonl", b'{"row": "abc", "label": 1}', '{"row": "abc", "label": 1}'),
        ("b.jsonl", b'{"row": 6, "lab', '{"row": 6, "lab'),
    ],
)
def test_one_bad_row_is_one_dead_letter_with_its_place(
    tmp_path: Path, name: str, bad: bytes, payload: str
) -> None:
    life = Life(tmp_path, on_error="skip", letters=tmp_path / "dead.jsonl")
    good = [HEADER.encode() + b"4,0", b"5,1\n8,"]
    if name.endswith("jsonl"):
        good = [b'{"row": 4, "label": 0}', b'{"row": 5, "label": 1}\n{"row": 8}']
    put(life.folder, "a.csv", HEADER + text(0, 4))
    put(life.folder, name, good[0] + b"\n" + bad + b"\n" + good[1] + b"\n")
    put(life.folder, "c.csv", HEADER + text(20, 22))
    for _ in range(2):  # reading again writes nothing twice
        life = Life(tmp_path, on_error="skip", letters=tmp_path / "dead.jsonl")
        assert life.read().rows == [0, 1, 2, 3, 4, 5, 20, 21]
        assert life.dataset.skips.total == 2
        letters = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
        assert [letter["place"] for letter in letters] == [
            {"file": name, "row": row} for row in (2, 4)
        ]
        assert letters[0]["payload"] == payload


def test_a_line_that_is_too_long_is_named(tmp_path: Path) -> None:
    life = Life(tmp_path)
    put(life.folder, "a.csv", HEADER + text(0, 4) + "9" * 5_000_000 + "\n")
    with pytest.raises(DecodeError, match=r"a.csv, line 6: longer than 2097152 bytes, got b'9999"):
        life.read()


@pytest.mark.parametrize("bad", ["oops,1", "7,", '7,"1'])
def test_errors_count_the_lines_of_a_file_that_grows(tmp_path: Path, bad: str) -> None:
    """Of a value that cannot be read or encoded, and of a quote; blank lines are lines."""
    life = Life(tmp_path, grows=True)
    blank = "\n" * (1 << 21)  # an open quote waits for no more text than a row may have
    put(life.folder, "a.csv", 'row,label\n0,"0"\n\n"1",1\r\n')
    life.read()
    with (life.folder / "a.csv").open("a") as file:
        file.write(f"\n2,1\n3,0\n{bad}\n{text(10, 40)}{blank}")
    with pytest.raises(DecodeError, match=r"in/a\.csv, line 8[:,]"):
        life.read()
    assert life.read(on_error="skip").rows == [0, 1, 2, 3, *range(10, 40)]


def test_a_row_whose_quote_is_open_waits_where_files_grow(tmp_path: Path) -> None:
    life = Life(tmp_path, grows=True)
    put(life.folder, "a.csv", HEADER + '0,1\n1,"0')
    assert life.read().rows == [0]
    with (life.folder / "a.csv").open("a") as file:
        file.write('"\n2,1\n')
    assert life.poll().rows == [0, 1, 2]
