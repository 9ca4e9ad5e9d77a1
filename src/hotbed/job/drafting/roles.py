# SPDX-License-Identifier: Apache-2.0
"""Guess the roles of columns: which one is the label, which are times, ids and amounts.

The guess of a column is a line of the job and the reason for it, which a person reads and corrects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from hotbed.job.drafting.line import Line, left_out, plain_id, quoted, share_of
from hotbed.job.drafting.moments import is_time
from hotbed.metrics.baselines import names_an_item
from hotbed.plugins import snake_case

NUM_NEIGHBOURS = 200
"""Most frequent values of a column of whole numbers that tell amounts from names."""

MAX_DEVIATIONS = 10
"""Standard deviations from the mean that a dense feature keeps: one value in ten thousand can have
a hundred.
"""

NUM_BUCKETS = 32
"""Quantiles of an amount with a long tail, each of which has a row of its own."""

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
# Columns that say who chose.
_USERS = re.compile(
    r"(user|uid|member|customer|visitor|account|client|reviewer|viewer|reader|listener)"
    r"(_?(id|idx|key|hash))?"
)
_INDEX = re.compile(r"|Unnamed: \d+(_level_\d+)?|__index_level_\d+__")
_DECIMAL_COMMA = r"^[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+$"
_TRUE = ("true", "t", "yes", "y")
_FALSE = ("false", "f", "no", "n")
# What separates the entries of a list in a text, and what the entries look like.
_LISTS = (
    ("|", r"^[^|;]+(\|[^|;]+)+$"),
    (";", r"^[^|;]+(;[^|;]+)+$"),
    (" ", r"^[A-Za-z_]*\d+( [A-Za-z_]*\d+)+$"),
    (",", r"^[\w-]+(,[\w-]+)+$"),
)
_LABELLED_LISTS = r"^\S+[-:][01]([ ,;|]\S+[-:][01])+$"
# Columns that say which rows train and which test.
_MARKS = re.compile(
    r"(.*_)?(split|k?fold|holdout)(_?(id|no|num|number|idx|index|key|name|type|label))?|"
    r"(is_?|in_?)?(train(ing)?|test(ing)?|val|valid(ation)?)(_?(set|flag|mask|rows?|test|split))?|"
    r"(train_?test|data_?set|sub_?set)(_?(id|name|type))?"
)
_PARTS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
_MOST_PARTS = 100


def find_label(frame: pl.DataFrame) -> tuple[str | None, str]:
    """Return the name of the column to predict, and why it is a guess; "" if its name says it.

    The name is None where no column looks like a label.
    """
    names = [name for name in frame.columns if _can_be_label(frame[name])]
    named = [name for name in names if _LABEL.fullmatch(snake_case(name))]
    binary = [name for name in names if _has_two_values(frame[name])]
    for name in [*(name for name in named if name in binary), *named]:
        return name, ""
    if len(binary) == 1:
        return binary[0], "a guess: no other column has two values"
    if frame.columns[-1] in binary:
        return binary[-1], "a guess: it is the last column, and has two values"
    return None, ""


def _can_be_label(values: pl.Series) -> bool:
    """Return whether a column may be what to predict: not a mark, a moment or a key of rows."""
    return not (is_mark(values) or is_time(values) or _is_key(values))


def _has_two_values(values: pl.Series) -> bool:
    return not values.dtype.is_nested() and values.n_unique() == 2


def is_mark(values: pl.Series) -> bool:
    """Return whether a column says which rows train and which test, by its name or its texts."""
    if values.dtype.is_nested() or values.dtype.is_float() or values.n_unique() > _MOST_PARTS:
        return False
    if _MARKS.fullmatch(snake_case(values.name)):
        return True
    if values.dtype != pl.String:
        return False
    texts = {text.lower() for text in values.drop_nulls().unique()}
    return len(texts) > 1 and texts <= _PARTS


def holds_labels(values: pl.Series) -> bool:
    """Return whether a column holds items with their labels, such as `N1-0 N2-1`."""
    if values.dtype != pl.String:
        return False
    return share_of(values.drop_nulls().str.contains(_LABELLED_LISTS)) > 0.5


def _is_key(values: pl.Series) -> bool:
    """Return whether a column has a different value in each row, as numbers of rows have."""
    entries = values.drop_nulls()
    if len(entries) <= 100:
        return False
    if values.dtype.is_integer() or values.dtype == pl.Binary:
        return entries.n_unique() == len(entries)
    return values.dtype == pl.String and entries.n_unique() > 0.95 * len(entries)


def find_user(frame: pl.DataFrame) -> str | None:
    """Return the name of the column that says who chose, else None."""
    return _named(frame, lambda name: bool(_USERS.fullmatch(snake_case(name))))


def find_item(frame: pl.DataFrame) -> str | None:
    """Return the name of the column that says what was chosen, else None."""
    return _named(frame, names_an_item)


def _named(frame: pl.DataFrame, has_role: Callable[[str], bool]) -> str | None:
    for name in frame.columns:
        values = frame[name]
        names_things = values.dtype.is_integer() or values.dtype == pl.String
        if names_things and has_role(name) and values.n_unique() > 1:
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
        share = share_of(same[name])
        by_chance = share_of(different[name])
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
    """Return whether a column decides the label in each row, as an outcome does.

    Its values do, or that they are missing.
    """
    values = frame[name]
    if len(frame) < 100:
        return False
    if values.null_count() and _decides(frame[label], values.is_null()):
        return True
    if values.dtype.is_nested() or values.n_unique() > MAX_OUTCOMES:
        return False
    return _decides(frame[label], values)


def _decides(labels: pl.Series, values: pl.Series) -> bool:
    pairs = pl.DataFrame([labels.alias("label"), values.alias("value")])
    counts = pairs.group_by("value").agg(pl.col("label").n_unique())
    return bool((counts["label"] == 1).all())


# --- one line a column ----------------------------------------------------------------------------


def label_line(values: pl.Series) -> Line:
    """Return the line of the label, with the share of rows in which it is 1."""
    option, positives, what = _positives(values.drop_nulls())
    text = f"{{kind: label, name: {quoted(values.name)}{option}}}"
    return Line("label", text, what.format(f"{share_of(positives):.1%}"))


def positive_share(values: pl.Series) -> float:
    """Return the share of rows in which the label of `label_line` is 1."""
    return share_of(_positives(values.drop_nulls())[1])


def _positives(entries: pl.Series) -> tuple[str, pl.Series, str]:
    """Return the option of a label in YAML, which entries it makes 1, and a text of their share."""
    if entries.dtype == pl.Boolean:
        return "", entries, "true in {}"
    if entries.dtype == pl.String:
        positive = _positive_of(entries)
        text = "1 where it is this text: {}"
        return f", positive: {quoted(positive)}", entries == positive, text
    numbers = entries.cast(pl.Float64)
    distinct = numbers.unique().sort()
    if set(distinct) <= {0.0, 1.0}:
        return "", entries == 1, "1 in {} of the rows"
    threshold: float = distinct[-1]
    for value in distinct:
        if share_of(numbers >= value) <= 0.5:
            threshold = value
            break
    text = "1 where it is at least this: {} of the rows"
    return f", threshold: {_exact(threshold)}", numbers >= threshold, text


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


def feature_line(values: pl.Series) -> Line:
    """Return the line of a column to predict from; a useless column is left out."""
    name = quoted(values.name)
    plain = plain_id(values.name)
    entries = values.drop_nulls()
    missing = _missing(values)
    if values.dtype.is_nested():
        return Line("id", f"{{kind: id, name: {name}, pooling: mean}}", f"lists{missing}")
    distinct = entries.n_unique()
    why = _useless(values, distinct)
    if why:
        return left_out(values.name, f"{why}{missing}")
    if "weight" in values.name.lower() and values.dtype.is_float():
        why = "left out: looks like the weight of a sample; use it if it is one"
        return Line("left out", f"{{kind: weight, name: {name}}}", why)
    if values.dtype == pl.String:
        return _text_line(name, entries, missing)
    if _is_key(values):
        return Line("left out", plain, "left out: every row has its own number")
    if values.dtype == pl.Boolean:
        return Line("id", plain, f"{distinct:,} different values{missing}")
    if values.dtype.is_integer():
        why = _why_id(values, distinct)
        if why:
            return Line("id", plain, f"{why}{missing}")
    return _dense_line(values)


def _useless(values: pl.Series, distinct: int) -> str:
    """Return why nothing can be learned from a column as it is; "" if something can."""
    entries = values.drop_nulls()
    if _INDEX.fullmatch(values.name):
        return "no name, or that of the index of a data frame"
    if distinct <= 1:
        return "always the same value"
    if is_mark(values):
        return "looks like a mark of train and test rows"
    if has_decimal_commas(values):
        return f"numbers with a decimal comma, such as {entries[0]}; write a point"
    is_id = values.dtype.is_float() and _names_things(values.name)
    if is_id and (entries == entries.floor()).all():
        return f"ids as numbers with a point, such as {entries[0]}; write integers"
    if holds_labels(values):
        return "items with their labels; make one row of each item: see docs/jobs.md"
    return ""


def _text_line(name: str, entries: pl.Series, missing: str) -> Line:
    """Return the line of a column of texts, without those that are missing."""
    plain = plain_id(entries.name)
    for delimiter, pattern in _LISTS:
        if share_of(entries.str.contains(pattern)) > 0.1:
            split = f'{{kind: split, delimiter: "{delimiter}"}}'
            text = f"{{kind: id, name: {name}, pooling: mean, transforms: [{split}]}}"
            joined_by = {" ": "spaces", ",": "commas"}.get(delimiter, delimiter)
            return Line("id", text, f"lists joined by {joined_by}{missing}")
    if _is_key(entries):
        return Line("left out", plain, f"left out: nearly every row has its own text{missing}")
    return Line("id", plain, f"{entries.n_unique():,} different texts{missing}")


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


def _has_long_tail(values: pl.Series) -> bool:
    """Return whether amounts are not negative, and the largest ones are far from the median."""
    entries = values.drop_nulls().cast(pl.Float64).to_numpy()
    median = float(np.quantile(entries, 0.5, method="nearest"))
    return bool(entries.min() >= 0 and entries.max() > 100 * max(median, 1e-9))


def needs_buckets(values: pl.Series) -> bool:
    """Return whether amounts have a long tail, and others than a few small numbers."""
    numbers = values.drop_nulls().cast(pl.Float64).to_numpy()
    return _has_long_tail(values) and bool(numbers.max() > MAX_DEVIATIONS)


def bucket_line(name: str) -> Line:
    """Return the line of an id for each quantile of a column of amounts with a long tail.

    Amounts that are mostly 0 have steps, which one weight of a logarithm cannot follow.
    """
    columns = f"name: {quoted(f'{name}_bucket')}, column: {quoted(name)}"
    transform = f"{{kind: bucketize, bins: {NUM_BUCKETS}}}"
    text = f"{{kind: id, {columns}, transforms: [{transform}]}}"
    return Line("id", text, f"quantiles of {name}, since its tail is long")


def _dense_line(values: pl.Series) -> Line:
    """Return the line of a column of amounts, with the transforms that bound it."""
    entries = values.drop_nulls()
    numbers = entries.cast(pl.Float64).to_numpy()
    low = float(numbers.min())
    high = float(numbers.max())
    why = f"numbers from {low:g} to {high:g}"

    fill = ["{kind: fill_missing, statistic: median}"] if values.null_count() else []
    logarithm = []
    if _has_long_tail(values):
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
