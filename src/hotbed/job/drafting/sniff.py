# SPDX-License-Identifier: Apache-2.0
"""Look at delimited text as pandas, spreadsheets and databases write it: delimiter and nulls."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from hotbed.connectors import Csv
from hotbed.connectors.compression import read_full
from hotbed.connectors.files import SAMPLE_BYTES, Section

_DELIMITERS = (",", "\t", ";", "|", "\x01")
_NULLS = (r"\N", "NULL", "null", "NaN", "nan", "NA", "N/A", "#N/A", "<NA>", "None")
_ALWAYS_NULL = (r"\N", "NULL", "<NA>")
"""Texts that no column means; the others mean "missing" only in a column of numbers."""

_NUM_ROWS = 10_000


def sniffed(source: Csv) -> Csv:
    """Return the source with the delimiter of the file, and its texts for "missing"."""
    text = _first_text(source)
    counts = {delimiter: _num_fields(text, delimiter) for delimiter in _DELIMITERS}
    delimiter = max(
        _DELIMITERS, key=lambda character: (counts[character], character == source.delimiter)
    )
    if not counts[delimiter]:
        delimiter = source.delimiter
    nulls = _null_values(_rows(text, delimiter))
    return replace(source, delimiter=delimiter, null_values=(*source.null_values, *nulls))


def first_row(source: Csv) -> list[str]:
    """Return the fields of the first line that is not blank; [] for an empty file."""
    return next(_rows(_first_text(source), source.delimiter), [])


def _first_text(source: Csv) -> str:
    with Section(source.files()[0]).open_text() as stream:
        head = read_full(stream, SAMPLE_BYTES)
    if len(head) == SAMPLE_BYTES:
        head = head[: head.rfind(b"\n") + 1] or head
    return head.decode(source.encoding, errors="replace")


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    return islice((row for row in reader if row), _NUM_ROWS)


def _num_fields(text: str, delimiter: str) -> int:
    """Return the fields of each of the first rows; 0 where these differ or have one field."""
    counts = {len(row) for row in islice(_rows(text, delimiter), 100)}
    if len(counts) != 1 or counts == {1}:
        return 0
    return counts.pop()


def _null_values(rows: Iterator[Sequence[str]]) -> list[str]:
    """Return the texts that mean "missing" in some column."""
    next(rows, None)  # the header
    nulls_of_columns: set[str] = set()
    for column in zip_longest(*rows, fillvalue=""):
        values = set(column) - {""}
        nulls = values.intersection(_NULLS)
        others = values - nulls
        if not (others and all(map(_is_number, others))):
            nulls &= set(_ALWAYS_NULL)
        nulls_of_columns |= nulls
    return [text for text in _NULLS if text in nulls_of_columns]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
