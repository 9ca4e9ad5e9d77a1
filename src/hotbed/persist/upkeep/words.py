# SPDX-License-Identifier: Apache-2.0
"""What the ids of a table stand for, in the schema of another job and in the one here.

A row belongs to a word, such as a film's name. With the transform `Map`, its id is the place of the
word in a vocabulary, and another vocabulary has the word at another place: rows that are taken over
get the id that their word has here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.config import describe, kind_of
from hotbed.data.arrow_types import Type
from hotbed.data.columns import ids_of
from hotbed.data.schema import Id, Schema
from hotbed.data.transforms import Map, Shift, Transform
from hotbed.data.transforms.base import not_fitted
from hotbed.errors import PersistError

IdArray = NDArray[np.int64]
_HOW_WORDS_ARE_CHOSEN = ("min_count", "max_size", "joint")
_UNKNOWN = 0
"""The id of all words that a vocabulary does not have."""


@dataclass(frozen=True)
class Numbering:
    """The last steps of an id feature: words -> ids. A word is known by its own id.

    Args:
        words: ids of the words, int64 [n], in the order of the vocabulary. The first word has the
            id 1. None: a word is its own id.
        shift: what is added to the ids.
    """

    words: IdArray | None
    shift: int

    @staticmethod
    def of(transforms: Sequence[Transform]) -> Numbering | None:
        """Return the numbering of the last transforms of a feature; None for other transforms."""
        words: IdArray | None = None
        shift = 0
        for place, transform in enumerate(transforms):
            if isinstance(transform, Map) and place == 0:
                words = _words(transform)
            elif isinstance(transform, Shift):
                shift += transform.by
            else:
                return None
        return Numbering(words, shift)

    def words_of(self, ids: IdArray) -> tuple[IdArray, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the words of ids, whether the id has one, and whether it stands for all others."""
        places = ids - np.int64(self.shift)
        if self.words is None:
            return places, np.ones(len(ids), bool), np.zeros(len(ids), bool)
        has_word = (places >= 1) & (places <= len(self.words))
        words = np.zeros(len(ids), np.int64)
        words[has_word] = self.words[places[has_word] - 1]
        return words, has_word, places == _UNKNOWN

    def ids_of(self, words: IdArray) -> tuple[IdArray, NDArray[np.bool_]]:
        """Return the ids of words, and whether the word has one of its own."""
        if self.words is None:
            return words + np.int64(self.shift), np.ones(len(words), bool)
        # a word that a vocabulary names twice has its first place
        sorted_words, places = np.unique(self.words, return_index=True)
        if not len(sorted_words):
            return np.zeros(len(words), np.int64), np.zeros(len(words), bool)
        nearest = np.minimum(np.searchsorted(sorted_words, words), len(sorted_words) - 1)
        return places[nearest] + 1 + np.int64(self.shift), sorted_words[nearest] == words


@dataclass(frozen=True)
class Renumbering:
    """The ids of one feature there, as ids here."""

    feature: str
    there: Numbering
    here: Numbering

    def apply(self, ids: IdArray) -> tuple[IdArray, NDArray[np.bool_]]:
        """Return the ids here, and whether the id has one: its word is known here.

        The row of all unknown words stays the row of all unknown words.
        """
        words, has_word, stands_for_others = self.there.words_of(ids)
        renumbered, is_known = self.here.ids_of(words)
        is_known &= has_word
        if self.here.words is not None and stands_for_others.any():
            renumbered[stands_for_others] = _UNKNOWN + self.here.shift
            is_known |= stands_for_others
        return renumbered, is_known

    def shares_words(self) -> bool:
        """Return whether the vocabularies have a word in common; True where one is not listed."""
        if self.there.words is None or self.here.words is None or not len(self.there.words):
            return True
        return bool(self.here.ids_of(self.there.words)[1].any())


@dataclass(frozen=True)
class Translation:
    """The ids of a table there, as ids of a table here, by its features."""

    table: str
    parts: tuple[Renumbering, ...]

    def apply(self, ids: IdArray) -> tuple[IdArray, NDArray[np.bool_]]:
        """Return the ids here, int64 [n], and whether the row of each is taken, bool [n].

        Raises:
            PersistError: an id stands for two words, of two features; the message names them.
        """
        result = np.zeros(len(ids), np.int64)
        is_taken = np.zeros(len(ids), bool)
        for number, part in enumerate(self.parts):
            renumbered, is_known = part.apply(ids)
            differs = is_taken & is_known & (result != renumbered)
            if differs.any():
                others = [before.feature for before in self.parts[:number]]
                raise PersistError(
                    f"warm start: id {ids[differs][0]} of table {self.table!r} stands for a value "
                    f"of {part.feature!r} and for another one of {others}, got two ids for its "
                    f"row here. {_advice(part.feature, self.table)}"
                )
            result[is_known] = renumbered[is_known]
            is_taken |= is_known
        return result, is_taken

    def check(self, ids: IdArray) -> int:
        """Check that every row finds its place; return the number of rows that are taken.

        Args:
            ids: all ids of the table there, int64 [n].

        Raises:
            PersistError: two rows get one id here, or none has a word that is known here.
        """
        renumbered, is_taken = self.apply(ids)
        taken_ids = renumbered[is_taken]
        features = [part.feature for part in self.parts]
        if len(np.unique(taken_ids)) != len(taken_ids):
            raise PersistError(
                f"warm start: rows of table {self.table!r} become one row here, got the features "
                f"{features}, whose ids overlap here. Give each of them a table of its own, or "
                f"{_left_out(self.table)}."
            )
        shares = [part.shares_words() for part in self.parts]
        if len(ids) and (not len(taken_ids) or not all(shares)):
            raise PersistError(
                f"warm start: no word of {features} is known here, got vocabularies without a "
                f"word in common for table {self.table!r}. Read the column as the same type, text "
                f"or integers, or {_left_out(self.table)}."
            )
        return len(taken_ids)


def translation_of(
    there: Schema | None, source: str, here: Schema | None, table: str, *, is_computed: bool = False
) -> Translation | None:
    """Return how the ids of the table `source` there become ids of `table` here.

    None: they stay as they are, because both schemas make the same ids of the same values.

    Args:
        there: the schema of the job that learned the rows.
        source: the table there.
        here: the schema of the data here.
        table: the table here.
        is_computed: whether a model computes the ids of the table from any of the features.

    Raises:
        PersistError: they make other ids, from which the values cannot be recovered: a hash,
            bucket or combination differs. The message names the feature and the transform. Or
            only the schema there is known.
    """
    if there is None:
        return None
    is_bound = not is_computed and _is_named(there, source) and _is_named(here, table)
    features = _features(there, source if is_bound else None)
    if not features:
        return None
    if here is None:
        raise PersistError(
            f"warm start: what the ids of table {source!r} stand for is written in the schema "
            f"there, of the features {[feature.name for feature in features]}, got no schema here "
            "to compare it with. Give schema=, the schema of the data here."
        )
    parts = []
    changed = False
    for old, new in _pairs(features, _features(here, table if is_bound else None), table):
        part = _renumbering(old, new, source)
        changed = changed or part is not None
        parts.append(part or Renumbering(old.name, *_same(old)))
    if not changed:
        return None
    if not is_bound:
        names = [part.feature for part in parts if part.there is not part.here]
        raise PersistError(
            f"warm start: the features {names} have other vocabularies here, got table {table!r}, "
            "of which the schema does not say what its ids are made of. "
            f"{_advice(names[0], source)}"
        )
    return Translation(source, tuple(parts))


def types_there(there: Schema, here: Schema, tables: Mapping[str, str]) -> dict[str, Type]:
    """Return the types that raw columns here must have, since rows were learned from such values.

    Args:
        there: the schema of the rows.
        here: the schema of the data that are learned next.
        tables: Table here -> table there.
    """
    types: dict[str, Type] = {}
    if there.raw is not None or here.raw is not None:
        return types  # prepared rows hold numbers, whatever the raw ones held
    for table, source in tables.items():
        if not (_is_named(there, source) and _is_named(here, table)):
            continue
        for old, new in _pairs(_features(there, source), _features(here, table), table):
            if old.source in there.types:
                types[new.source] = there.types[old.source]
    return types


def _pairs(there: Sequence[Id], here: Sequence[Id], table: str) -> list[tuple[Id, Id]]:
    """Return the features there, each with the one here that has the same values."""
    by_name = {feature.name: feature for feature in here}
    pairs = [(old, by_name[old.name]) for old in there if old.name in by_name]
    if pairs:
        return pairs
    chains = {_chain(feature) for feature in there}
    own_chains = {_chain(feature) for feature in here}
    if chains == own_chains or len(chains) == len(own_chains) == 1:
        return [(there[0], here[0])] if len(chains) == 1 else []
    raise PersistError(
        f"warm start: table {table!r} has the features {[f.name for f in here]}, got "
        f"{[f.name for f in there]} there, with other transforms. Give them the names there, or "
        f"{_left_out(table)}."
    )


def _renumbering(old: Id, new: Id, source: str) -> Renumbering | None:
    """Return how ids of a feature change; None if they do not.

    Raises:
        PersistError: the new ids cannot be computed from the old ones.
    """
    shared = 0
    for before, after in zip(old.transforms, new.transforms, strict=False):
        if _plain(before) != _plain(after):
            break
        shared += 1
    rest = old.transforms[shared:]
    own_rest = new.transforms[shared:]
    if not rest and not own_rest:
        return None
    there = Numbering.of(rest)
    here = Numbering.of(own_rest)
    if there is None or here is None:
        raise PersistError(
            f"warm start: the transforms of {old.name!r} in table {source!r} differ, "
            f"{_shown(rest)} there, got {_shown(own_rest)}. Its values would get the rows of "
            f"others. {_advice(old.name, source)}"
        )
    return Renumbering(old.name, there, here)


def _same(feature: Id) -> tuple[Numbering, Numbering]:
    """Return the numbering of a feature that has not changed: its ids stay."""
    last = len(feature.transforms)
    while last and isinstance(feature.transforms[last - 1], Shift):
        last -= 1
    if last and isinstance(feature.transforms[last - 1], Map):
        numbering = Numbering.of(feature.transforms[last - 1 :])
        assert numbering is not None
        return numbering, numbering
    return Numbering(None, 0), Numbering(None, 0)


def _features(schema: Schema, table: str | None) -> list[Id]:
    """Return the features of a table; None: all features."""
    of_rows = schema.raw or schema
    if table is None:
        return list(of_rows.ids)
    return list(of_rows.tables[_named(of_rows, table) or ""])


def _is_named(schema: Schema | None, table: str) -> bool:
    return schema is not None and _named(schema.raw or schema, table) is not None


def _named(schema: Schema, table: str) -> str | None:
    """Return the schema's name of a table. Weights of an LR, "user.linear", belong to "user"."""
    name = table
    while name not in schema.tables:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def _chain(feature: Id) -> str:
    return repr([_plain(transform) for transform in feature.transforms])


def _plain(transform: Transform) -> Any:
    """Return what a transform does, as plain values: not where its file lies, or how it learned."""
    plain: dict[str, Any] = dict(describe(transform))
    if transform.fitted is not None:
        plain["fitted"] = transform.fitted.digest
    if isinstance(transform, Map):
        for name in _HOW_WORDS_ARE_CHOSEN:
            plain.pop(name, None)
    return plain


def _words(transform: Map) -> IdArray:
    if transform.fitted is not None:
        return transform.fitted.keys()
    if transform.vocabulary is None:
        raise not_fitted("map")
    return ids_of(pa.array(list(transform.vocabulary)), "vocabulary")


def _shown(transforms: Sequence[Transform]) -> str:
    if not transforms:
        return "none"
    texts = []
    for transform in transforms:
        plain: Mapping[str, Any] = _plain(transform)
        keywords = [f"{name}={value!r:.40}" for name, value in plain.items() if name != "kind"]
        texts.append(f"{kind_of(type(transform))}({', '.join(keywords)})")
    return " | ".join(texts)


def _advice(feature: str, table: str) -> str:
    return (
        f"Take the transforms of {feature!r} from the checkpoint, "
        f"hb.checkpoints.open_checkpoint(path).schema[{feature!r}].transforms, or "
        f"{_left_out(table)}."
    )


def _left_out(table: str) -> str:
    return f"leave the table out: rename={{{table!r}: {left_out(table)!r}}}"


def left_out(table: str) -> str:
    """Return a name that no table here has, under which rows of `table` there are left out."""
    return f"{table} (left out)"
