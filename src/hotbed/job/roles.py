# SPDX-License-Identifier: Apache-2.0
"""Guess the roles of columns: which one is the label, which are times, ids and amounts.

The guess of a column is a line of the job and the reason for it, which a person reads and corrects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from hotbed.job.file import parse_value

NUM_NEIGHBOURS = 200
"""Most frequent values of a column of whole numbers that tell amounts from names."""

MAX_DEVIATIONS = 10
"""Standard deviations from the mean that a dense feature keeps: one value in ten thousand can have
a hundred.
"""

SAME_VALUE = 0.95
"""Share of neighbouring rows of an item that have one value, if the column follows the item."""

_PLACE = "\0place"
_GAP = "\0gap"
_PAIR = "\0pair"

MAX_OUTCOMES = 20
"""Different values of a column that may be another outcome, such as the opposite of the label."""

_LABEL = re.compile(
    r"(is_?)?"
    r"(label|clk|click(ed)?|target|y|liked?|buy|bought|purchased?|conver(sion|ted)|"
    r"rating|stars|score)"
)
_TIME = re.compile(r"(.*_)?(time(_?stamp)?|ts|at|date|datetime|created|hour)", re.IGNORECASE)
_NAMES = re.compile(
    r"(.*_)?"
    r"(id|code|type|category|user|item|movie|film|product|ad|campaign|site|app|device|shop|store|"
    r"brand|city|country|region|zip|session)"
    r"(_.*)?|.*(Id|ID)"
)
# Criteo and its relatives call integer categories C1 to C26.
_CATEGORIES = re.compile(r"C\d+|cat(egorical)?_?\d*|.*_(cat|idx|index|key|hash)", re.IGNORECASE)
_AMOUNTS = re.compile(
    r"(.*_)?"
    r"(num|number|count|cnt|sum|total|avg|mean|age|price|cost|amount|income|salary|wage|gains?|"
    r"losse?s?|dividends?|revenue|balance|duration|seconds|minutes|hours|days|weeks|months|years?|"
    r"length|len|size|width|height|weight|distance|rate|ratio|percent|pct|rank)"
    r"(_.*)?|I\d+",
    re.IGNORECASE,
)
# Columns that say who chose, and what was chosen.
_USERS = re.compile(
    r"(user|uid|member|customer|visitor|account|client|reviewer|viewer|reader|listener)"
    r"(_?(id|idx|key|hash))?"
)
_ITEMS = re.compile(
    r"(item|iid|product|movie|film|article|news|song|track|video|book|game|ad|ad_?group|listing|"
    r"offer|post|recipe|sku|asin|goods|artist|app)"
    r"(_?(id|idx|key|hash))?"
)
_INDEX = re.compile(r"|Unnamed: \d+(_level_\d+)?|__index_level_\d+__")
_DECIMAL_COMMA = r"^[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+$"
_TRUE = ("true", "t", "yes", "y")
_FALSE = ("false", "f", "no", "n")
_LISTS = re.compile(r"^[^|;]+(\|[^|;]+)+$")
_ISO_DATE = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$"

# Unit of a time since 1970, and the smallest and largest value that is a time of our days.
_EPOCHS = (("s", 1e8, 1e10), ("ms", 1e11, 1e13), ("us", 1e14, 1e16), ("ns", 1e17, 1e19))
_MICROSECONDS = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1e-3}

_WORDS_OF_YAML = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")

Role = Literal["label", "time", "id", "dense", "left out"]


@dataclass(frozen=True)
class Line:
    """A column of a drafted job: its role, its text in YAML, and the reason."""

    role: Role
    text: str
    why: str


def find_label(frame: pl.DataFrame) -> str | None:
    """Return the name of the column to predict; None where no column looks like one."""
    named = [name for name in frame.columns if _LABEL.fullmatch(name.lower())]
    binary = [name for name in frame.columns if _has_two_values(frame[name])]
    for name in named:
        if name in binary:
            return name
    if named:
        return named[0]
    last = frame.columns[-1]
    if len(binary) == 1 or last in binary:
        return binary[-1]
    return None


def _has_two_values(values: pl.Series) -> bool:
    return not values.dtype.is_nested() and values.n_unique() == 2


def find_time(frame: pl.DataFrame, label: str) -> str | None:
    """Return the name of the first column of times, else None."""
    for name in frame.columns:
        if name == label:
            continue
        values = frame[name]
        if values.dtype.is_temporal() or (_TIME.fullmatch(name) and _unit(values)):
            return name
    return None


def find_user(frame: pl.DataFrame) -> str | None:
    """Return the name of the column that says who chose, else None."""
    return _named(frame, _USERS)


def find_item(frame: pl.DataFrame) -> str | None:
    """Return the name of the column that says what was chosen, else None."""
    return _named(frame, _ITEMS)


def _named(frame: pl.DataFrame, names: re.Pattern[str]) -> str | None:
    for name in frame.columns:
        values = frame[name]
        is_key = values.dtype.is_integer() or values.dtype == pl.String
        if is_key and names.fullmatch(name.lower()) and values.n_unique() > 1:
            return name
    return None


def follow_item(
    frame: pl.DataFrame,
    item: str,
    others: Sequence[str],
    user: str | None = None,
    time: str | None = None,
) -> list[str]:
    """Return the columns among `others` that belong to the item, also where they change over time.

    Such a column has the same value in nearly all pairs of neighbouring rows of an item, and more
    often than in neighbouring rows of different items. Pairs of one user say nothing about this,
    and with times, only the closer half of the pairs counts: the value may have changed in the
    other half. Without such pairs, no column follows the item.
    """
    if time is not None:
        frame = frame.sort(time, maintain_order=True)
    in_time = frame.with_row_index(_PLACE)
    neighbours = _repeats(in_time, item, others, user)
    of_items = _repeats(in_time.sort(item, maintain_order=True), item, others, user)
    same = of_items.filter(pl.col(item))
    if time is not None:
        same = same.filter(pl.col(_GAP) <= pl.col(_GAP).median())
    different = neighbours.filter(~pl.col(item))
    following: list[str] = []
    for name in others:
        share = _share(same[name])
        by_chance = _share(different[name])
        if share >= SAME_VALUE and 1 - share <= (1 - by_chance) / 2:
            following.append(name)
    return following


def _repeats(
    rows: pl.DataFrame, item: str, others: Sequence[str], user: str | None
) -> pl.DataFrame:
    """Return for each row which columns repeat the row before, without rows of the same user."""
    names = [item, *others]
    repeats = [(pl.col(name).rle_id().diff().cast(pl.Int64) == 0).alias(name) for name in names]
    is_other_user = pl.lit(True)
    if user is not None:
        is_other_user = pl.col(user).ne_missing(pl.col(user).shift(1))
    gap = pl.col(_PLACE).cast(pl.Int64).diff().alias(_GAP)
    return rows.select(gap, is_other_user.alias(_PAIR), *repeats).slice(1).filter(pl.col(_PAIR))


def gives_away(frame: pl.DataFrame, label: str, name: str) -> bool:
    """Return whether the values of a column decide the label in each row, as an outcome does."""
    values = frame[name]
    if values.dtype.is_nested() or values.n_unique() > MAX_OUTCOMES or len(frame) < 100:
        return False
    labels = frame.group_by(name).agg(pl.col(label).n_unique().alias("num labels"))
    return bool((labels["num labels"] == 1).all())


def _unit(values: pl.Series) -> str | None:
    """Return the unit that makes these numbers or texts times of our days, else None."""
    if values.dtype.is_temporal():
        return "us"
    entries = values.drop_nulls()
    if not len(entries):
        return None
    if values.dtype.is_numeric():
        low = _quantile(entries, 0.0)
        high = _quantile(entries, 1.0)
        for unit, least, most in _EPOCHS:
            if least <= low and high < most:
                return unit
    elif values.dtype == pl.String and entries.head(100).str.contains(_ISO_DATE).all():
        return "iso"
    return None


def _quantile(values: pl.Series, share: float) -> float:
    return float(values.cast(pl.Float64).quantile(share, "nearest") or 0)


# --- one line a column ----------------------------------------------------------------------------


def label_line(values: pl.Series) -> Line:
    """Return the line of the label, with the share of rows in which it is 1."""
    entries = values.drop_nulls()
    name = quoted(values.name)
    if values.dtype == pl.Boolean:
        return Line("label", f"{{kind: label, name: {name}}}", f"true in {_share(entries):.1%}")
    if values.dtype == pl.String:
        positive = _positive_of(entries)
        text = f"{{kind: label, name: {name}, positive: {quoted(positive)}}}"
        return Line("label", text, f"1 where it is this text: {_share(entries == positive):.1%}")
    numbers = entries.cast(pl.Float64)
    distinct = numbers.unique().sort()
    if set(distinct) <= {0.0, 1.0}:
        share = _share(entries == 1)
        return Line("label", f"{{kind: label, name: {name}}}", f"1 in {share:.1%} of the rows")
    threshold: float = distinct[-1]
    for value in distinct:
        if _share(numbers >= value) <= 0.5:
            threshold = value
            break
    share = _share(numbers >= threshold)
    text = f"{{kind: label, name: {name}, threshold: {_exact(threshold)}}}"
    return Line("label", text, f"1 where it is at least this: {share:.1%} of the rows")


def _exact(number: float) -> str:
    """Return a number with all of its digits, a whole one without a fraction."""
    if number.is_integer():
        return str(int(number))
    return repr(number)


def _positive_of(texts: pl.Series) -> str:
    """Return the text of positives: "true" or "yes" beside its opposite, else the rarest one."""
    counts = texts.value_counts().sort("count", texts.name)
    choices = [str(text) for text in counts[texts.name]]
    for true, false in zip(_TRUE, _FALSE, strict=True):
        for choice in choices:
            if {text.lower() for text in choices} == {true, false} and choice.lower() == true:
                return choice
    return choices[0]


def has_decimal_commas(values: pl.Series) -> bool:
    """Return whether a column holds numbers with a decimal comma, as texts."""
    entries = values.drop_nulls()
    return values.dtype == pl.String and bool(entries.str.contains(_DECIMAL_COMMA).all())


def time_line(values: pl.Series) -> Line:
    """Return the line of the time of events, with the first and the last one."""
    unit = _unit(values)
    entries = values.drop_nulls()
    if values.dtype.is_numeric():
        factor = _MICROSECONDS[unit or "s"]
        entries = (entries * factor).cast(pl.Int64).cast(pl.Datetime("us"))
    option = "" if values.dtype.is_temporal() else f", unit: {unit}"
    text = f"{{kind: time, name: {quoted(values.name)}{option}}}"
    ordered = entries.sort()
    return Line("time", text, f"{ordered[0]} to {ordered[-1]}")


def feature_line(values: pl.Series) -> Line:
    """Return the line of a column to predict from; a useless column is left out."""
    name = quoted(values.name)
    plain = f"{{kind: id, name: {name}}}"
    entries = values.drop_nulls()
    missing = _missing(values)
    if values.dtype.is_nested():
        return Line("id", f"{{kind: id, name: {name}, pooling: mean}}", f"lists{missing}")
    if _INDEX.fullmatch(values.name):
        return Line("left out", name, "left out: no name, or that of the index of a data frame")
    distinct = entries.n_unique()
    if distinct <= 1:
        return Line("left out", name, f"left out: always the same value{missing}")
    if "weight" in values.name.lower() and values.dtype.is_float():
        why = "left out: looks like the weight of a sample; use it if it is one"
        return Line("left out", f"{{kind: weight, name: {name}}}", why)
    if has_decimal_commas(values):
        why = f"left out: numbers with a decimal comma, such as {entries[0]}; write a point"
        return Line("left out", name, why)
    if values.dtype == pl.String:
        return _text_line(name, entries, missing)
    if (
        values.dtype.is_float()
        and _names_things(values.name)
        and (entries == entries.floor()).all()
    ):
        why = f"left out: ids as numbers with a point, such as {entries[0]}; write integers"
        return Line("left out", plain, why)
    if values.dtype.is_integer() and distinct == len(values) > 100:
        return Line("left out", plain, "left out: every row has its own number")
    if values.dtype == pl.Boolean:
        return Line("id", plain, f"{distinct:,} different values{missing}")
    if values.dtype.is_integer():
        why = _why_id(values, distinct)
        if why:
            return Line("id", plain, f"{why}{missing}")
    return _dense_line(values)


def _text_line(name: str, entries: pl.Series, missing: str) -> Line:
    """Return the line of a column of texts, without those that are missing."""
    distinct = entries.n_unique()
    plain = f"{{kind: id, name: {name}}}"
    if _share(entries.str.contains(_LISTS.pattern)) > 0.1:
        split = '{kind: split, delimiter: "|"}'
        text = f"{{kind: id, name: {name}, pooling: mean, transforms: [{split}]}}"
        return Line("id", text, f"lists joined by |{missing}")
    if distinct > 0.95 * len(entries) and len(entries) > 100:
        return Line("left out", plain, f"left out: nearly every row has its own text{missing}")
    return Line("id", plain, f"{distinct:,} different texts{missing}")


def _names_things(name: str) -> bool:
    return bool(_NAMES.fullmatch(name) or _CATEGORIES.fullmatch(name))


def _why_id(values: pl.Series, distinct: int) -> str:
    """Return why whole numbers are names of things; "" where they are amounts."""
    text = f"{distinct:,} different values"
    if distinct <= 100 or _names_things(values.name):
        return text
    if _AMOUNTS.fullmatch(values.name) or _looks_like_amount(values.drop_nulls()):
        return ""
    return f"{text}, frequent ones anywhere among them; {{kind: dense}} if they are amounts"


def _looks_like_amount(values: pl.Series) -> bool:
    """Return whether most values are 0, or neighbouring numbers are about equally frequent.

    Counts and measures are so. Numbers that name things are frequent or rare whatever their
    neighbours are.
    """
    counts = values.rename("value").value_counts()
    if counts["count"].to_numpy().max() > 0.5 * len(values):
        return True
    frequent = counts.sort("count", "value", descending=[True, False]).head(NUM_NEIGHBOURS)
    ranks = frequent.sort("value")["count"].rank().to_numpy()
    if not np.ptp(ranks):
        return True
    return float(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) > 0.5


def _dense_line(values: pl.Series) -> Line:
    """Return the line of a column of amounts, with the transforms that bound it."""
    entries = values.drop_nulls()
    numbers = entries.cast(pl.Float64).to_numpy()
    low = _quantile(entries, 0.0)
    median = float(np.quantile(numbers, 0.5, method="nearest"))
    high = _quantile(entries, 1.0)
    why = f"numbers from {low:g} to {high:g}"

    fill = ["{kind: fill_missing, statistic: median}"] if values.null_count() else []
    logarithm = []
    if low >= 0 and high > 100 * max(median, 1e-9):
        logarithm = ["log"]
        numbers = np.log1p(numbers)
    spread = float(numbers.std()) or 1.0
    farthest = float(np.abs(numbers - numbers.mean()).max()) / spread
    if farthest <= MAX_DEVIATIONS:
        steps = [*fill, *logarithm, "normalize"]
    elif low >= -MAX_DEVIATIONS and high <= MAX_DEVIATIONS:
        steps = fill
        why += "; nearly always the same, so they stay as they are"
    else:
        clip = f"{{kind: clip, low: -{MAX_DEVIATIONS}, high: {MAX_DEVIATIONS}}}"
        steps = [*fill, *logarithm, "normalize", clip]

    transforms = f", transforms: [{', '.join(steps)}]" if steps else ""
    text = f"{{kind: dense, name: {quoted(values.name)}{transforms}}}"
    return Line("dense", text, f"{why}{_missing(values)}")


def _missing(values: pl.Series) -> str:
    if not values.null_count():
        return ""
    return f", {values.null_count() / len(values):.1%} missing"


def _share(true: pl.Series) -> float:
    return float(true.sum()) / max(len(true), 1)


def quoted(text: str) -> str:
    """Return text as YAML reads it back: bare where that is safe."""
    is_word = re.fullmatch(r"[A-Za-z_./][\w./-]*", text)
    if is_word and parse_value(text) == text and text.lower() not in _WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False)
