# SPDX-License-Identifier: Apache-2.0
"""Rows of delimited text, against a reader that looks at one character after the other."""

from __future__ import annotations

import io
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.connectors.text.rows import BadLine, RowFormat, WholeRows

pytestmark = pytest.mark.core
LIMIT = 12
FORMAT = RowFormat(ord('"'), ord(","), LIMIT)
TEXTS = st.lists(st.sampled_from(['"', ",", "\n", "\r\n", "a", '""', "bcdefg"]), max_size=30)


def closing(text: str, begin: int, row: int) -> int | None:
    """Return the offset of the quote that closes a field; None where no quote closes it."""
    at = begin
    while at < len(text) and (text[at] != '"' or text[at + 1 : at + 2] == '"'):
        at += 2 if text[at] == '"' else 1
    if "\n" not in text[begin:at] and at < len(text):
        return at
    is_end = text[at + 1 : at + 2] in ("", ",", "\n", "\r")
    return at if at < len(text) and at - row < LIMIT and is_end else None


def rows_of(text: str) -> list[tuple[int, str | None, str]]:
    """Return line, fault and text of each row that is not blank."""
    rows: list[tuple[int, str | None, str]] = []
    row = 0
    while row < len(text):
        at = row
        fault = None
        while at < len(text) and text[at] != "\n":
            begins = at == row or text[at - 1] in ",\n\r"
            if text[at] == '"' and begins:
                close = closing(text, at + 1, row)
                if close is None:
                    fault = "quote"
                    break
                at = close
            at += 1
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if fault is None and end - row > LIMIT:
            fault = "long"
        if text[row:end] != "" and text[row : end + 1] != "\r\n":
            named = at if fault else row
            rows.append((text[:named].count("\n") + 1, fault, text[row:end]))
        row = end + 1
    return rows


@settings(max_examples=5 * settings.default.max_examples)
@given(TEXTS, st.integers(1, 20))
def test_rows_lines_and_bad_lines_are_those_of_a_plain_reader(parts: list[str], size: int) -> None:
    text = "".join(parts)
    bad: list[BadLine] = []

    def replace(line: BadLine) -> bytes:
        bad.append(line)
        return b"#"

    stream = WholeRows(io.BytesIO(text.encode()), FORMAT, replace)
    output = b"".join(iter(lambda: stream.read(size), b"")).decode()
    expected = rows_of(text)
    assert [row for _, _, row in rows_of(output)] == [
        row if fault is None else "#" for _, fault, row in expected
    ]
    assert [line.line for line in bad] == [line for line, fault, _ in expected if fault]
    assert [line.row for line in bad] == [n for n, (_, fault, _) in enumerate(expected) if fault]
    for number, (line, fault, _) in enumerate(expected):
        if fault is None:
            assert stream.line_of(number) == line


@given(
    st.lists(st.sampled_from(["1,2\n", "\n", "\r\n", '"a\n\nb",""\r\n'])),
    st.sampled_from(["", "3,4"]),
    st.booleans(),
)
def test_count_of_rows_is_the_number_that_is_read(
    lines: list[str], last: str, header: bool
) -> None:
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        file.write(("a,b\n" + "".join(lines) + last).encode())
        file.flush()
        source = hb.sources.Csv(file.name, header=header)
        rows = sum(batch.num_rows for batch, _ in source.read())
        assert source.count_rows() == rows
