# SPDX-License-Identifier: Apache-2.0
"""A training file for another data set differs from its template in three things."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import hotbed as hb
import hotbed.compat.hugectr as hugectr
from hotbed.errors import ConfigError

TEMPLATE: dict[str, Any] = {
    "solver": {"max_iter": 10},
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "slot_size_array": [7, 8, 9],
            "dense": {"top": "dense", "dense_dim": 13},
            "sparse": [{"top": "data1", "slot_num": 3}],
        },
        {
            "type": "LocalizedSlotSparseEmbeddingOneHot",
            "sparse_embedding_hparam": {"slot_size_array": [7, 8, 9], "embedding_vec_size": 4},
        },
        {"type": "DistributedSlotSparseEmbeddingHash", "sparse_embedding_hparam": {}},
    ],
}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The output of a preparation with two categories, of 3 and 2 values, and one number."""
    rows = {
        "clicked": [0, 1, 0, 1],
        "user": ["a", "b", "c", "a"],
        "item": ["x", "y", "x", "y"],
        "price": [1.0, 2.0, 3.0, 4.0],
    }
    pl.DataFrame(rows).write_parquet(tmp_path / "rows.parquet")
    columns = [
        hb.Label("clicked"),
        hb.Id("user", transforms=[hb.transforms.Map()]),
        hb.Id("item", transforms=[hb.transforms.Map()]),
        hb.Dense("price"),
    ]
    job = hb.prepare.Preparation(
        source=hb.sources.Parquet(str(tmp_path / "rows.parquet")),
        schema=hb.Schema(columns),
        output=str(tmp_path / "prepared"),
    )
    hb.prepare.prepare(job)
    return tmp_path / "prepared"


def test_template_is_adapted_in_three_things(prepared: Path, tmp_path: Path) -> None:
    sizes = [hb.prepare.Workflow(prepared).sizes[name] for name in ("user", "item")]
    expected = copy.deepcopy(TEMPLATE)
    expected["layers"][0]["slot_size_array"] = sizes
    expected["layers"][0]["dense"]["dense_dim"] = 1
    expected["layers"][0]["sparse"][0]["slot_num"] = 2
    expected["layers"][1]["sparse_embedding_hparam"]["slot_size_array"] = sizes

    template = tmp_path / "template.json"
    template.write_text(json.dumps(TEMPLATE))
    before = copy.deepcopy(TEMPLATE)
    written = tmp_path / "new" / "adapted.json"
    assert hugectr.adapt_json(TEMPLATE, prepared) == expected
    assert hugectr.adapt_json(template, prepared / "train", written) == expected
    assert json.loads(written.read_text()) == expected
    assert before == TEMPLATE


def test_template_with_two_sparse_inputs_is_rejected(prepared: Path) -> None:
    template = copy.deepcopy(TEMPLATE)
    template["layers"][0]["sparse"].append({"top": "data2", "slot_num": 1})
    with pytest.raises(ConfigError, match=r"layers.0.sparse: .* got \['data1', 'data2'\]"):
        hugectr.adapt_json(template, prepared)


def test_data_without_sizes_is_rejected(prepared: Path, tmp_path: Path) -> None:
    path = prepared / "train" / "_metadata.json"
    metadata = json.loads(path.read_text())
    del metadata["sizes"]["item"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match="size of slot 'item' is not known, got sizes of user"):
        hugectr.adapt_json(TEMPLATE, prepared)
    with pytest.raises(ConfigError, match=r"there is no _metadata.json"):
        hugectr.adapt_json(TEMPLATE, tmp_path)
