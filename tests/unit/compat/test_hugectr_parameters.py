# SPDX-License-Identifier: Apache-2.0
"""What hugectr_parameters.yaml says of the parameters of HugeCTR holds for the door."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

from parameter_pages import FOLDER, HUGECTR

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import knobs
from hotbed.compat.hugectr.clauses import SparseEmbedding
from hotbed.compat.hugectr.enums import DataReaderType_t, Embedding_t, FileSystemType_t, Layer_t
from hotbed.compat.hugectr.json.solver import read_solver
from hotbed.compat.hugectr.knobs import NO_EFFECT
from hotbed.errors import ConfigError

SECTIONS = HUGECTR.sections
parameters = HUGECTR.parameters
CLAUSES = [section for section in SECTIONS if "fields" in section]
DOOR = FOLDER.parents[2] / "src/hotbed/compat/hugectr"


def of_kind(*kinds: str) -> list[Any]:
    """Return the fields of the door's classes that are of these kinds, as parameters of a test."""
    cases = []
    for section in CLAUSES:
        fields = {field.name for field in dataclasses.fields(HUGECTR.look_up(section["fields"]))}
        for row in parameters(section):
            if row.kind in kinds and row.name in fields:
                cases.append(pytest.param(section, row.name, id=f"{section['clause']}.{row.name}"))
    return cases


@pytest.fixture(scope="module")
def read_by_the_door() -> set[str]:
    """The attributes that the door reads, outside of the classes that hold them."""
    names = set()
    for file in DOOR.rglob("*.py"):
        if file.parent.name == "clauses" or file.name == "params.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


@pytest.mark.parametrize(("section", "name"), of_kind("same", "mapped"))
def test_door_reads_what_has_an_effect(
    section: dict[str, Any], name: str, read_by_the_door: set[str]
) -> None:
    assert name in read_by_the_door


@pytest.mark.parametrize(
    "section",
    [one for one in SECTIONS if "read" in one or one["title"] == "ps.json of HPS"],
    ids=lambda section: section["title"],
)
def test_door_reads_the_keys_of_files(section: dict[str, Any], read_by_the_door: set[str]) -> None:
    kinds = ("same", "mapped", "unused")
    names = {row.name for row in parameters(section) if row.kind in kinds}
    knobs_of_section = {name.rpartition(".")[2] for name in NO_EFFECT}
    assert names <= read_by_the_door | knobs_of_section


WHOLE = ("async_param", "data_source_params", "hybrid_embedding_param")
"""Clauses of which the argument that takes them is logged, and none of their fields."""


def other_than(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, "x" if value and isinstance(value[0], str) else 1)
    return OTHERS.get(type(value), value + 1 if isinstance(value, (int, float)) else value)


OTHERS: dict[type, Any] = {
    hugectr.data.DataSourceParams: hugectr.data.DataSourceParams(FileSystemType_t.HDFS),
    hugectr.AsyncParam: hugectr.AsyncParam(1, 4, 512000, 4, 512, False),
    hugectr.DenseLayerComputeConfig: hugectr.DenseLayerComputeConfig(True),
    type(SparseEmbedding.hybrid_embedding_param): replace(
        SparseEmbedding.hybrid_embedding_param, max_num_frequent_categories=2
    ),
}
"""Values that are not the default, by their type."""

GIVEN: dict[str, dict[str, Any]] = {
    "reader": {"data_reader_type": DataReaderType_t.Raw, "source": "a", "eval_source": "b"},
    "sparse": {"top_name": "s", "nnz_per_slot": 1, "is_fixed_length": False, "slot_num": 1},
    "sparse_embedding": {
        "embedding_type": Embedding_t.HybridSparseEmbedding,
        "embedding_vec_size": 4,
        "combiner": "sum",
        "sparse_embedding_name": "e",
        "bottom_name": "s",
    },
    "dense_layer": {"layer_type": Layer_t.ReLU, "bottom_names": ["a"], "top_names": ["b"]},
    "data_generator": {
        "format": DataReaderType_t.Norm,
        "label_dim": 1,
        "dense_dim": 0,
        "num_slot": 1,
        "i64_input_key": True,
        "source": "a",
        "eval_source": "b",
        "slot_size_array": [5],
    },
    "inference_params": {
        "model_name": "m",
        "max_batchsize": 1,
        "hit_rate_threshold": 1.0,
        "dense_model_file": "",
        "sparse_model_files": [],
        "use_gpu_embedding_cache": False,
        "cache_size_percentage": 0.5,
        "i64_input_key": True,
    },
}
"""Arguments that a clause needs."""


@pytest.mark.parametrize(("section", "name"), of_kind("unused"))
def test_what_has_no_effect_is_logged_once(
    section: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    clause = section["clause"]
    if clause in WHOLE:
        return
    make = HUGECTR.look_up(section["fields"])
    arguments = GIVEN.get(clause, {})
    default = arguments.get(name, make.__dataclass_fields__[name].default)
    value = other_than(default)
    if name == "cache_refresh_percentage_per_iteration":
        value = 0.5
    caplog.set_level("INFO", "hotbed.compat.hugectr")
    knobs.KNOBS.logged.discard(f"{clause}.{name}")
    for _ in range(2):
        make(**{**arguments, name: value})
    assert caplog.text.count(f"{clause}.{name} has no effect, because ") == 1


@pytest.mark.parametrize("knob", NO_EFFECT)
def test_each_knob_of_the_door_is_on_the_page(knob: str) -> None:
    clause, _, name = knob.rpartition(".")
    kinds = set()
    for section in SECTIONS:
        if section.get("clause") == clause:
            kinds |= {row.kind for row in parameters(section) if row.name == name}
    assert kinds
    assert kinds <= {"unused", "different"}


@pytest.mark.parametrize("key", SECTIONS[0]["names"])
def test_arguments_of_releases_in_between_are_taken(key: str) -> None:
    hugectr.CreateSolver(**{key: True})
    with pytest.raises(ConfigError, match="unknown argument"):
        hugectr.CreateSolver(**{f"{key}_": True})


@pytest.mark.parametrize("section", [one for one in SECTIONS if "methods" in one])
def test_methods_are_there(section: dict[str, Any]) -> None:
    missing = {row.name for row in parameters(section)} - set(
        dir(getattr(hugectr, section["methods"]))
    )
    assert missing == set()


@pytest.mark.parametrize(
    "key", [row.name for one in SECTIONS if one.get("read") == "solver" for row in parameters(one)]
)
def test_keys_of_a_solver_clause_are_known(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_solver({key: "?"})
    assert "unknown key" not in str(caught.value)
