# SPDX-License-Identifier: Apache-2.0
"""Csv: types that lose nothing, errors that name the line, real files of every dialect."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import hotbed as hb
from hotbed import config
from hotbed.connectors import Csv, Jsonl, Libsvm, ReadPlan, Skips, Source
from hotbed.connectors.endings import source_for
from hotbed.connectors.files import FileSource
from hotbed.connectors.text.rows import FIRST_BYTES, BadLine, RowFormat, WholeRows
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core
CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def write(folder: Path, text: str, name: str = "a.csv") -> Path:
    (folder / name).write_text(text, newline="")
    return folder / name


def column(source: Csv, name: str) -> list[object]:
    return [value for batch, _ in source.read() for value in batch.column(name).to_pylist()]


def types(source: Csv) -> dict[str, str]:
    return {field.name: str(field.type) for field in source.schema()}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-2", "0"], "int64"),
        (["9223372036854775807", "-9223372036854775808"], "int64"),
        (["1", "18446744073709551615"], "uint64"),
        (["1", "1.5", "-2e3"], "double"),
        (["007", "12"], "string"),
        (["05db9164", "68e12345"], "string"),
        (["-1", "18446744073709551615"], "string"),
        (["99999999999999999999"], "string"),
        (["+5"], "double"),
        (["2014-10-21", "2014-10-22"], "string"),
        (["true", "false"], "string"),
        (["", ""], "string"),
        (["", "3"], "int64"),
    ],
)
def test_inferred_types_lose_nothing(tmp_path: Path, values: list[str], kind: str) -> None:
    file = write(tmp_path, "x,y\n" + "".join(f"{value},a\n" for value in values))
    assert types(Csv(file))["x"] == kind


def test_crlf_leaves_no_trace_in_the_last_column(tmp_path: Path) -> None:
    assert column(Csv(write(tmp_path, "a,b\r\n1,x\r\n2,\r\n")), "b") == ["x", None]


def test_quotes_hold_delimiters_newlines_and_quotes(tmp_path: Path) -> None:
    file = write(tmp_path, 'a,b\n1,"x, ""y""\nz"\n2,w\n')
    assert column(Csv(file), "b") == ['x, "y"\nz', "w"]


def test_quotes_may_be_ordinary_characters(tmp_path: Path) -> None:
    file = write(tmp_path, '1\t"open\n2\tclosed"\n')
    assert column(Csv(file, delimiter="\t", header=False, columns=["n", "t"], quote=None), "t") == [
        '"open',
        'closed"',
    ]


def test_null_texts_are_those_declared(tmp_path: Path) -> None:
    file = write(tmp_path, "a,b\nNA,NA\n,3\n")
    source = Csv(file, null_values=["NA"])
    assert column(source, "a") == [None, ""]
    assert column(source, "b") == [None, 3]


def test_compressed_files_are_read_by_their_ending(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("a\n1\n2\n")
    assert column(Csv(tmp_path / "a.csv.gz"), "a") == [1, 2]


def test_columns_rename_declare_and_name(tmp_path: Path) -> None:
    file = write(tmp_path, "a,b\n1,2\n")
    assert types(Csv(file, columns=["x", "y"])) == {"x": "int64", "y": "int64"}
    assert types(Csv(file, columns={"b": "string"})) == {"a": "int64", "b": "string"}
    assert types(Csv(file, header=False)) == {"f0": "string", "f1": "string"}
    assert types(Csv(file, header=False, columns={"x": "string", "y": None})) == {
        "x": "string",
        "y": "string",
    }
    with pytest.raises(SchemaError, match=r"declared columns \['c'\] are absent"):
        Csv(file, columns={"c": "string"}).schema()


def test_long_delimiters_and_other_encodings_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes("1::Amélie::x\n2::B::y\n".encode("latin-1"))
    source = Csv(
        tmp_path / "a.dat",
        delimiter="::",
        header=False,
        columns=["n", "t", "u"],
        encoding="latin-1",
    )
    assert column(source, "t") == ["Amélie", "B"]


@pytest.mark.parametrize(
    ("bad", "line", "name", "said"),
    [
        ("x7,1", 30_002, "a", "got 'x7', which is not int64"),
        ("1,2,3", 30_002, None, "Expected 2 columns, got 3"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_column(
    tmp_path: Path, bad: str, line: int, name: str | None, said: str
) -> None:
    lines = [f"{i},{'y' * 60}" for i in range(30_000)]
    file = write(tmp_path, "\n".join(["a,b", *lines, bad, "5,6", ""]))
    with pytest.raises(DecodeError, match=said) as caught:
        column(Csv(file), "a")
    assert (caught.value.file, caught.value.row, caught.value.column) == (str(file), line, name)
    assert f"{file}, line {line}" in str(caught.value)


def test_a_bad_number_names_its_column_when_only_some_are_read(tmp_path: Path) -> None:
    source = Csv(write(tmp_path, "a,b,c\n1,2,3\n1,x,3\n"), columns={"b": "int64"})
    with pytest.raises(DecodeError) as caught:
        list(source.read(plan=ReadPlan(columns=("b", "c"))))
    assert (caught.value.row, caught.value.column) == (3, "b")


def test_bad_lines_are_skipped_counted_and_logged_where_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"{i},2.5" for i in range(100_000)]
    lines[70_000:70_000] = ["oops,1", "1,2,3", "3,worse"]
    source, skips = (
        Csv(write(tmp_path, "\n".join(["a,b", *lines])), columns={"a": "int64", "b": "float64"}),
        Skips(),
    )
    kept = [
        value
        for batch, _ in source.read(plan=ReadPlan(skips=skips))
        for value in batch.column("a").to_pylist()
    ]
    assert kept == list(range(100_000))
    assert skips.counts == {"fields": 1, "value": 2}
    assert "skipped (value)" in caplog.text


def test_a_line_torn_within_a_character_costs_no_other_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.csv"
    torn = "2,上海".encode()[:-1]
    rows = [b"n,city,label", "1,北京,1".encode(), torn, "3,广州,0".encode(), b"4,x\xff,1"]
    file.write_bytes(b"\r\n".join(rows) + b"\r\n")
    with pytest.raises(DecodeError, match=r"a.csv, line 3: .*Expected 3 columns, got 2"):
        column(Csv(file), "city")
    skips = Skips()
    batches = list(Csv(file).read(plan=ReadPlan(skips=skips)))
    assert [value for batch, _ in batches for value in batch["city"].to_pylist()] == [
        "北京",
        "广州",
    ]
    assert "line 3: 2 fields, not UTF-8" in caplog.text
    assert "line 5, column 'city'" in caplog.text


def test_an_integer_too_large_is_an_error_not_a_float(tmp_path: Path) -> None:
    lines = ["a", *map(str, range(300_000)), "10013378798301872145"]
    file = write(tmp_path, "\n".join(lines))
    with pytest.raises(DecodeError, match="10013378798301872145") as caught:
        column(Csv(file), "a")
    assert caught.value.row == 300_002
    assert column(Csv(file, columns={"a": "uint64"}), "a")[-1] == 10013378798301872145


def test_a_file_of_other_columns_is_an_error_with_its_name(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a,b\n1,2\n", "1.csv"), write(tmp_path, "a,c\n1,2\n", "2.csv")
    with pytest.raises(SchemaError, match=str(second)):
        column(Csv([first, second]), "a")


def test_blank_lines_before_the_header_are_passed_over(tmp_path: Path) -> None:
    """However many: none of the first reads holds a row."""
    file = write(tmp_path, "\n" * (3 * FIRST_BYTES) + "x\n1\n2\n")
    assert column(Csv(file, columns={"x": "int64"}), "x") == [1, 2]


def test_a_file_of_one_row_without_a_line_end_has_this_row(tmp_path: Path) -> None:
    files = [write(tmp_path, "1,2\n3,4\n", "1.csv"), write(tmp_path, "5,6", "2.csv")]
    for first in (0, 1):
        source = Csv(files[first:], header=False)
        assert column(source, "f0") == [1, 3, 5][2 * first :]
        assert source.count_rows() == len(column(source, "f0"))


def test_a_header_without_a_line_end_has_columns_and_no_rows(tmp_path: Path) -> None:
    source = Csv(write(tmp_path, "x,y"))
    assert source.schema().names == ["x", "y"]
    assert column(source, "x") == []


def test_first_rows_of_a_long_file_come_in_a_short_batch(tmp_path: Path) -> None:
    line = "x" * 99 + "\n"
    file = write(tmp_path, "x\n" + line * (64 * FIRST_BYTES // len(line)))
    batch, _ = next(Csv(file).read())
    assert batch.num_rows < FIRST_BYTES / len(line)


def test_an_empty_file_holds_no_rows_wherever_it_stands(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "", "1.csv"),
        write(tmp_path, "a,b\n1,2\n", "2.csv"),
        write(tmp_path, "\n", "3.csv"),
    ]
    assert column(Csv(files), "a") == [1]


def test_wrong_arguments_are_named() -> None:
    for arguments, path in [({"delimiter": ""}, "delimiter"), ({"quote": "''"}, "quote")]:
        with pytest.raises(ConfigError, match=f"^{path}"):
            Csv("a.csv", **arguments)
    with pytest.raises(ConfigError, match=r"columns\.x.*'int32'"):
        Csv("a.csv", columns={"x": "int32"})


@pytest.mark.parametrize("delimiter", [",", "\t", "::"])
@pytest.mark.parametrize("skips", [None, Skips()])
def test_two_columns_of_one_name_are_an_error_where_they_are_read_until_renamed(
    delimiter: str, skips: Skips | None, tmp_path: Path
) -> None:
    text = "a,b,a\n1,2,3\n4,5,6\n7,8,9\n".replace(",", delimiter)
    source = Csv(write(tmp_path, text), delimiter=delimiter)
    with pytest.raises(SchemaError, match=r"the columns \['a'\] appear twice"):
        list(source.read(plan=ReadPlan(("a", "b"), skips=skips)))
    batches = [part.read(plan=ReadPlan(("b",), skips=skips)) for part in (source, *source.parts(2))]
    values = [[value for batch, _ in rows for value in batch["b"].to_pylist()] for rows in batches]
    assert values[0] == values[1] + values[2] == [2, 5, 8]
    assert column(replace(source, columns=["a", "b", "c"]), "c") == [3, 6, 9]


def test_globs_are_sorted_and_must_match(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path, f"x\n{name}\n", f"{name}.csv")
    assert column(Csv(str(tmp_path / "*.csv")), "x") == ["a", "b", "c"]
    with pytest.raises(DataError, match=r"nothing\*.*matches nothing"):
        Csv(str(tmp_path / "nothing*")).schema()


def test_resuming_with_other_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "x\n1\n", "b.csv")
    source = Csv(str(tmp_path / "*.csv"))
    position = list(source.read())[-1][1]
    write(tmp_path, "x\n1\n", "a.csv")
    with pytest.raises(DataError, match=r"file 0 was 'b\.csv' and is now 'a\.csv'"):
        list(source.read(position))


def test_a_source_is_built_from_its_configuration() -> None:
    source = Csv("a.tsv", delimiter="\t", header=False, columns={"x": "string", "y": None}).slice(
        0.0, 0.5
    )
    assert config.build(config.describe(source), Source) == source


def test_criteo_is_read_with_missing_values_and_hex_hashes(shared_data: Path) -> None:
    file = shared_data / "criteo" / "kaggle_head10001.tsv"
    source = Csv(file, delimiter="\t", header=False, columns=CRITEO)
    assert {kind for name, kind in types(source).items() if name[0] == "C"} == {"string"}
    assert {kind for name, kind in types(source).items() if name[0] == "I"} == {"int64"}
    table = pa.Table.from_batches([batch for batch, _ in source.read()])
    raw = [line.split("\t") for line in file.read_text().splitlines()]
    assert table.num_rows == len(raw) == 10_001
    for place, name in enumerate(CRITEO):
        assert table[name].null_count == sum(row[place] == "" for row in raw)
    assert table["C26"].to_pylist() == [row[39] or None for row in raw]


@pytest.mark.parametrize(
    ("path", "rows", "some"),
    [
        ("ml_latest_small/ratings.csv", 100_836, {"rating": "double", "timestamp": "int64"}),
        ("frappe_x1r/valid.csv", 57_722, {"label": "int64", "user": "int64"}),
        (
            "avazu/stream_20141021.csv",
            15_237,
            {"id": "uint64", "site_id": "string", "hour": "string"},
        ),
        (
            "rees46/2019-Oct.head.csv",
            17_434,
            {"user_session": "string", "price": "double", "category_id": "int64"},
        ),
        ("criteo/deepctr_sample_200.csv", 200, {"I3": "double", "C1": "string"}),
        ("obd/bts_men.csv", 10_000, {"click": "int64", "propensity_score": "double"}),
        ("mltag_x1t/valid.csv", 20_062, {"tag_id": "int64"}),
    ],
)
def test_real_files_are_read_whole(
    shared_data: Path, path: str, rows: int, some: dict[str, str]
) -> None:
    source = Csv(shared_data / path)
    assert some.items() <= types(source).items()
    assert source.count_rows() == rows


def test_real_files_of_odd_dialects_are_read(shared_data: Path) -> None:
    folder = shared_data / "ml1m_u2999"
    users = Csv(
        folder / "users.dat",
        delimiter="::",
        header=False,
        columns=["user", "gender", "age", "job", "zip"],
    )
    assert column(users, "gender")[:3] == ["F", "M", "M"]
    movies = Csv(
        folder / "movies.dat",
        delimiter=";",
        header=False,
        columns=["m", "t", "g"],
        encoding="latin-1",
    )
    assert column(movies, "t")[0] == "Toy Story (1995)"
    behaviors = Csv(
        shared_data / "mind" / "behaviors.tsv",
        delimiter="\t",
        header=False,
        quote=None,
        columns=["impression", "user", "time", "history", "candidates"],
    )
    assert behaviors.count_rows() == 5_000


GOOD = [f"{number},x" for number in range(40)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("delimiter", [",", "\t", "::"])
@pytest.mark.parametrize(
    ("bad", "place"),
    [
        (['7,"5 inch disc'], 20),
        (['7,"5 inch disc'], 40),
        (['"7,x'], 0),
        (['7,"5 inch', *GOOD[:3], '7,"7 inch'], 20),  # one does not close the other
        (['7,"a"",b'], 20),
        (['7,"5 inch', *GOOD[:3], '1,"a,""b"""'], 20),  # nor does a field that is quoted
    ],
)
def test_a_quote_that_never_closes_costs_its_line_only(
    tmp_path: Path, bad: list[str], place: int, delimiter: str, line_end: str
) -> None:
    """Also in a compressed file: nothing after the line is lost, and nothing is read as its rest."""
    lines = [*GOOD[:place], *bad, *GOOD[place:]]
    text = line_end.join(["n,t", *lines, ""]).replace(",", delimiter)
    with gzip.open(tmp_path / "a.csv.gz", "wb") as file:
        file.write(text.encode())
    source = Csv(tmp_path / "a.csv.gz", delimiter=delimiter)
    with pytest.raises(DecodeError, match="a quote opens and is never closed") as caught:
        column(source, "n")
    assert caught.value.row == place + 2
    skips = Skips()
    aside: list[tuple[int, int | None]] = []
    plan = ReadPlan(
        skips=skips, aside=lambda rows: aside.extend((row.number, row.line) for row in rows)
    )
    values = [value for batch, _ in source.read(plan=plan) for value in batch["n"].to_pylist()]
    unclosed = [number for number, line in enumerate(lines) if line in ('7,"7 inch', bad[0])]
    assert aside == [(number + 1, number + 2) for number in unclosed]
    rows = [line for number, line in enumerate(lines) if number not in unclosed]
    assert values == [int(line.split(",")[0]) for line in rows]


def test_a_header_whose_quote_never_closes_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, 'n,"t\n1,x\n2,y\n')
    with pytest.raises(DecodeError, match="line 1: a quote opens and is never closed"):
        column(Csv(file), "n")
    good = write(tmp_path, "n,t\n5,z\n", "0.csv")
    skips = Skips()
    batches = Csv([good, file, good]).read(plan=ReadPlan(skips=skips))
    assert [value for batch, _ in batches for value in batch["n"].to_pylist()] == [5, 5]
    assert skips.counts == {"file": 1}


def test_a_quote_that_never_closes_takes_no_memory() -> None:
    text = b'1,"' + b"x" * 61 + b"\n" + (b"x" * 63 + b"\n") * 100_000
    bad: list[int] = []

    def replace(line: BadLine) -> bytes:
        bad.append(line.line)
        return b"#"

    stream = WholeRows(io.BytesIO(text), RowFormat(ord('"'), ord(","), 1 << 14), replace)
    tracemalloc.start()
    num_rows = 0
    while part := stream.read(1 << 15):
        num_rows += bytes(part).count(b"\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert bad == [1]
    assert num_rows == 100_001
    assert peak < 1 << 18


# Rows that take more lines than one, and lines that are no rows: the bad row is on line 12.
MANY_LINES = 'y,n,t\n1,2,"a\nb\nc"\n\n0,3,x\n"1","4","\n""q""\n"\r\n\r\n0,5,x\n{bad}\n1,6,"z\nz"\n'


@pytest.mark.parametrize(
    ("bad", "name", "said"),
    [
        ("0,oops,x", "n", "oops"),
        ("0,7", None, "Expected 3 columns, got 2|2 fields instead of 3"),
        ('0,7,"x', None, "never closed"),
    ],
)
def test_errors_count_the_lines_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str, name: str | None, said: str
) -> None:
    file = write(tmp_path, MANY_LINES.format(bad=bad))
    source = Csv(file, columns={"n": "int64"})
    with pytest.raises(DecodeError, match=said) as caught:
        column(source, "n")
    assert (caught.value.row, caught.value.column) == (12, name)
    assert [
        value
        for batch, _ in source.read(plan=ReadPlan(skips=Skips()))
        for value in batch["n"].to_pylist()
    ] == [2, 3, 4, 5, 6]
    assert f"{file}, line 12" in caplog.text


def test_a_row_that_cannot_be_encoded_is_named_by_its_line_also_after_a_resume(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, MANY_LINES.format(bad="7,7,x"))
    data = hb.Dataset(Csv(file), hb.Schema([hb.Label("y"), hb.Id("n")]), batch_size=2)
    data.restrict_labels(["y"])
    with pytest.raises(DecodeError, match=r"a\.csv, line 12: .* got 7"):
        list(data)
    after_two_rows = next(iter(Csv(file).read(batch_rows=2)))[1]
    assert str(Csv(file).locate(after_two_rows, 1)) == f"{file}, line 6"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.CSV.GZ", "a.csv.Zst", "a.tsv"])
@pytest.mark.parametrize("codec", ["gzip", "bz2", "zstd", "lz4", None])
def test_compressed_files_are_known_by_their_content(
    tmp_path: Path, name: str, codec: str | None
) -> None:
    sep = "\t" if ".tsv" in name else ","
    data = f"n{sep}t\n1{sep}x\n2{sep}y\n".encode()
    with pa.output_stream(str(tmp_path / name), compression=codec) as stream:
        stream.write(data)
    source = source_for(str(tmp_path / name))
    assert isinstance(source, Csv)
    if codec is None and name.lower().endswith((".gz", ".zst")):
        with pytest.raises(DecodeError, match=r"its name says \w+, and its content is not \w+"):
            column(source, "n")
        return
    assert column(source, "n") == [1, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("n,t\n1,x\n".encode("utf-16"), "it is UTF-16 text, .* encoding='utf-16'"),
        ("n,t\n1,x\n".encode("utf-16-le"), "not UTF-8 text, perhaps UTF-16"),
        ("n,t\n1,x\n".encode("utf-32"), "it is UTF-32 text"),
        (b"PK\x03\x04....", "a zip archive or an Excel file"),
        (b"\xfd7zXZ\x00....", "compressed with xz"),
        (b"PAR1....", r"a Parquet file.* hb\.sources\.Parquet"),
        (b"a.csv".ljust(257, b"\0") + b"ustar\0", "a tar archive"),
        (b"SQLite format 3\0", "a SQLite database"),
    ],
)
@pytest.mark.parametrize("kind", [Csv, Jsonl, Libsvm])
def test_what_cannot_be_read_as_text_is_refused_by_name(
    tmp_path: Path, kind: type[FileSource], content: bytes, said: str
) -> None:
    """Also where it is compressed."""
    (tmp_path / "plain").write_bytes(content)
    with gzip.open(tmp_path / "packed", "wb") as file:
        file.write(content)
    for name in ("plain", "packed"):
        with pytest.raises(DecodeError, match=f"{name}: it is .*{said.removeprefix('it is ')}"):
            list(kind(tmp_path / name).read())


def test_utf16_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes('"n",t\n1,"ä\nb"\n'.encode("utf-16"))
    assert column(Csv(tmp_path / "a.csv", encoding="utf-16"), "t") == ["ä\nb"]
    (tmp_path / "b.csv").write_bytes('"n",t\n1,"ä\nb"\n'.encode("utf-8-sig"))
    assert column(Csv(tmp_path / "b.csv"), "n") == [1]


def test_value_that_is_no_plain_integer_does_not_change_ids(tmp_path: Path) -> None:
    """Behind the first MiB and in later files, 007 is an error in a column that began as integers."""
    rows = [f"{row},{'y' * 60}" for row in range(20_000)]
    first = write(tmp_path, "\n".join(["id,b", *rows, "007,z", "8,z", ""]))
    rest = write(tmp_path, "id,b\n5,z\n", name="rest.csv")
    later = write(tmp_path, "id,b\n9,z\n0x10,z\n", name="later.csv")
    for source, line, text in ((Csv(first), 20_002, "007"), (Csv([rest, later]), 3, "0x10")):
        with pytest.raises(DecodeError, match=rf"column 'id': .* got '{text}'.* declare") as caught:
            list(source.read())
        assert (caught.value.row, caught.value.column) == (line, "id")
    skips = Skips()
    batches = Csv([first, later]).read(plan=ReadPlan(columns=("id",), skips=skips))
    assert [i for b, _ in batches for i in b.column("id").to_pylist()] == [*range(20_000), 8, 9]
    assert skips.counts == {"value": 2}
    declared = Csv([first, later], columns={"id": "string"}).read(plan=ReadPlan(columns=("id",)))
    texts = [text for batch, _ in declared for text in batch.column("id").to_pylist()]
    assert texts[-4:] == ["007", "8", "9", "0x10"]


def test_first_file_without_values_does_not_decide_types(tmp_path: Path) -> None:
    header = write(tmp_path, "id,b,c\n", name="0.csv")
    nulls = write(tmp_path, "id,b,c\n,x,\n", name="1.csv")
    values = write(tmp_path, "id,b,c\n7,y,\n", name="2.csv")
    source = Csv([header, nulls, values])
    assert source.schema() == pa.schema(
        [("id", pa.int64()), ("b", pa.string()), ("c", pa.string())]
    )
    rows = [row for batch, _ in source.read() for row in batch.to_pylist()]
    assert rows == [{"id": None, "b": "x", "c": None}, {"id": 7, "b": "y", "c": None}]
