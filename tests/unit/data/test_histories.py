# SPDX-License-Identifier: Apache-2.0
"""Histories and counts with wrong settings are refused where they are declared."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import ConfigError, DataError

COLUMNS = [hb.Label("liked"), hb.Time("at"), hb.Id("user"), hb.Id("movie")]
OF_USER: dict[str, Any] = {"of": ["movie"], "by": "user"}
OF_MOVIE: dict[str, Any] = {"by": "movie", "where": {"liked": 1}, "windows": [60]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"within_seconds": 0.5}, "within_seconds: expected at least 1 for times of unit 's', got"),
        ({"where": ["liked"]}, "where maps labels to values, got ['liked']"),
        ({"where": {"liked": "yes"}}, "where: liked: must be a finite number, got 'yes'"),
        ({"where": {"shared": 1}}, "where names labels, got 'shared'"),
        ({"of": ["at"]}, "an entry is an Id column and maybe others, got ['at']"),
        ({"by": "liked"}, "by: it names Id columns, got 'liked'"),
    ],
)
def test_history_with_a_wrong_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hb.Schema([*COLUMNS, hb.History("before", **{**OF_USER, **settings})])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windows": 60}, "windows: expected a list of seconds, got 60. Give [60]."),
        ({"windows": []}, "nothing to count, got windows=[]"),
        ({"every": 7}, "a window is a multiple of a tile, got 60 seconds with every=7"),
        ({"where": {"liked": None}}, "where: liked: must be a finite number, got None"),
    ],
)
def test_count_with_a_wrong_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hb.Schema([*COLUMNS, hb.Count("likes", **{**OF_MOVIE, **settings})])


def test_label_values_of_a_history_may_be_true_or_false() -> None:
    hb.Schema([*COLUMNS, hb.History("before", where={"liked": True}, **OF_USER)])


def test_batch_without_keys_times_or_labels_is_refused_and_one_without_rows_is_filled() -> None:
    schema = hb.Schema([*COLUMNS, hb.History("before", where={"liked": 1}, **OF_USER)])
    store = hb.EmbeddingCollection(schema, hb.make_tables(schema, dim=2)).histories
    assert store is not None
    ids = {name: hb.Ids(np.array([1, 2])) for name in ("user", "movie")}
    times = np.array([1, 2]) * 1_000_000
    labels = {"liked": np.ones(2, np.float32)}
    for name, batch in {
        "at": hb.Batch(ids, labels=labels, num_samples=2),
        "liked": hb.Batch(ids, time=times, num_samples=2),
        "user": hb.Batch({"movie": ids["movie"]}, labels=labels, time=times, num_samples=2),
    }.items():
        with pytest.raises(DataError, match=f"got none of '{name}'"):
            store.fill(batch, leaves=True)
    batch = hb.Batch({"user": ids["user"]}, labels=labels, time=times, num_samples=2)
    with pytest.raises(DataError, match=r"all of its columns \['movie'\], got ids of \['user'\]"):
        store.fill(batch, leaves=True)
    keyless = {**ids, "user": hb.Ids(np.empty(0, np.int64), np.zeros(3, np.int64))}
    batch = hb.Batch(keyless, labels=labels, time=times, num_samples=2)
    for part in (batch, batch[:0]):
        assert len(store.fill(part, leaves=True).ids["before"].values) == 0
