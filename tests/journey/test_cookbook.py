# SPDX-License-Identifier: Apache-2.0
"""Each network of docs/cookbook.md trains, exports, and is served with the scores of training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb

PAGE = Path(__file__).resolve().parents[2] / "docs/cookbook.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
DIM, ROWS, LENGTH = 8, 512, 20
HISTORY = {"table": "movie", "pooling": "none", "max_length": LENGTH}
CLICK = [hb.Label("click")]
PLAIN = [hb.Id("user"), hb.Id("movie"), hb.Id("genres", pooling="mean")]
NEXT = [hb.Id("movie"), *(hb.Id(name, **HISTORY) for name in ("hist", "pos", "neg"))]


def columns() -> dict[str, Any]:
    random = np.random.default_rng(0)
    user, movie = random.integers(0, 40, ROWS), random.integers(0, 60, ROWS)
    click = (user % 5 == movie % 5).astype(int)
    lengths = random.integers(1, 6, ROWS).tolist()
    histories = {
        name: [random.integers(0, 60, length).tolist() for length in lengths]
        for name in ("hist", "pos", "neg")
    }
    return {
        "click": click,
        "order": click * (movie % 2),
        "user": user,
        "movie": movie,
        "genres": [random.integers(0, 9, 2).tolist() for _ in range(ROWS)],
        **histories,
    }


def network(name: str, given: dict[str, Any]) -> tuple[hb.Schema, Any, Any]:
    """The schema, the network and the loss of a name on the page."""
    tasks = ["click", "order"]
    if name in ("PLE", "ESMM"):
        schema = hb.Schema([*map(hb.Label, tasks), *PLAIN])
    elif name == "NextItem":
        schema = hb.Schema([*CLICK, *NEXT])
    else:
        schema = hb.Schema([*CLICK, *PLAIN])
    tables = hb.make_tables(schema, dim=DIM, rule=hb.Adagrad(lr=0.05))
    sides = (hb.Schema([hb.Id("user")]), hb.Schema([hb.Id("movie")]))
    arguments: dict[str, tuple[Any, ...]] = {
        "PLE": (schema, tables, tasks),
        "FinalMLP": (schema, tables, ("user", "movie"), DIM),
        "AutoInt": (schema, tables, DIM),
        "TwoTowers": (*sides, tables),
        "NextItem": (schema, tables, DIM, LENGTH),
    }
    made = given[name](*arguments.get(name, (schema, tables)))
    if name in ("PLE", "ESMM"):
        return schema, made, hb.losses.MultiTask({task: hb.losses.BCE() for task in tasks})
    return schema, made, None if name in ("TwoTowers", "NextItem") else "bce"


NAMES = re.findall(r"^class (\w+)\(", "".join(BLOCKS), re.M)
QUICK = ("MaskNet", "TwoTowers")  # an export takes a second; the others are for `make soak`


def test_the_page_has_seven_networks_of_few_lines() -> None:
    assert len(NAMES) == 7
    for block in BLOCKS[1:]:
        lines = [line for line in block.splitlines() if line.strip()]
        assert 7 <= len(lines) - 1 <= 20, block  # besides class and def


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in NAMES],
)
def test_a_network_of_the_page_trains_and_is_served_as_it_was_trained(
    name: str, tmp_path: Path, one_thread: None
) -> None:
    given: dict[str, Any] = {"hb": hb}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), given)
    schema, made, loss = network(name, given)
    rows = columns()
    data = hb.Dataset(hb.sources.Memory(rows), schema, batch_size=64)
    model = hb.RecModel(made, loss, hb.Adam(lr=3e-3))
    before = model.fit(data, epochs=1, progress=False).epochs[0]["loss"]
    after = model.fit(data, epochs=3, progress=False).epochs[-1]["loss"]
    assert after < before
    trained = model.predict(data)
    session = hb.InferenceSession(model.export(tmp_path / "export"))
    served = session.predict({column.source: rows[column.source] for column in schema.ids})
    if not isinstance(trained, dict):
        trained, served = {"": trained}, {"": served}
    for label, scores in trained.items():
        np.testing.assert_allclose(np.ravel(served[label]), scores.ravel(), 1e-6, 1e-6)
        assert scores.std() > 1e-4
