# SPDX-License-Identifier: Apache-2.0
"""A preparation that cannot run is an error before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

from hotbed.errors import ConfigError
from hotbed.prepare import Preparation

pytestmark = pytest.mark.core

SOURCE = {"kind": "csv", "path": "nowhere/*.csv"}
ROLES = ["id user", "id film", "label watched", "time at"]
RATE = {
    "kind": "dense",
    "name": "rate",
    "column": "film",
    "transforms": [{"kind": "target_encode", "label": "watched"}],
}
NEGATIVES = {"user": "user", "item": "film", "item_columns": ["genre"]}


def preparation(roles: list[str], **keys: Any) -> Preparation:
    columns = []
    for role in roles:
        kind, name = role.split()
        columns.append({"kind": kind, "name": name})
    return Preparation.from_json({"source": SOURCE, "schema": {"columns": columns}, **keys})


def test_a_preparation_is_read_back_as_it_was() -> None:
    job = preparation(
        [*ROLES, "weight importance"],
        negatives=NEGATIVES | {"draw": "popularity"},
        split={"kind": "by_time", "from": "2020-01-01"},
        down_sample={"label": "watched", "keep": 0.1, "weight": "importance"},
    )
    assert Preparation.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("roles", "keys", "message"),
    [
        (ROLES, {"memory": "0MB"}, "memory: must be at least 1"),
        (ROLES, {"memory": "1.2.3GB"}, "memory: not a size"),
        (
            ["id user"],
            {"split": {"kind": "by_time", "valid": 0.1}},
            "prepare.split: by_time needs the time of each row, got a schema of ['user']",
        ),
        (
            ["id user", "id film"],
            {"negatives": NEGATIVES},
            "negatives: expected a schema with one label, got []",
        ),
        (
            ROLES,
            {
                "negatives": NEGATIVES,
                "derive": [
                    {"kind": "time_difference", "name": "since", "by": "genre", "time": "at"}
                ],
            },
            "prepare.derive: 'since' belongs to the rows of an item, got by='genre'",
        ),
        (
            ROLES,
            {"down_sample": {"label": "clicked", "keep": 0.1}},
            "prepare.down_sample.label: the schema has no such label, got 'clicked'",
        ),
        (
            ROLES,
            {"down_sample": {"label": "watched", "keep": 0.1, "weight": "user"}},
            "prepare.down_sample.weight: the schema has a column of this name, got 'user'",
        ),
        (
            [*ROLES, "weight importance"],
            {"down_sample": {"label": "watched", "keep": 0.1, "weight": "sample_weight"}},
            "prepare.down_sample.weight: the schema has the weight 'importance', got",
        ),
        (
            ROLES,
            {"down_sample": {"label": "watched", "keep": 0}},
            "prepare.down_sample.keep: must be a finite number > 0 and <= 1, got 0",
        ),
        (
            [*ROLES, "dense rate"],
            {"schema": {"columns": [RATE]}},
            "prepare.schema: target_encode of 'rate' names a label that the schema does not have, "
            "got 'watched'",
        ),
        (
            ROLES,
            {"split": {"kind": "by_time", "from": "new year"}},
            "prepare.split.from_: not a date or a time, got 'new year'",
        ),
    ],
)
def test_what_cannot_run_is_named(roles: list[str], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        preparation(roles, **keys)
    assert message in str(error.value)
