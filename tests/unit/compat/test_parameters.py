# SPDX-License-Identifier: Apache-2.0
"""The pages of parameters are those of their YAML files, and what these say holds for the doors."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

from parameter_pages import DOORS, FOLDER, KINDS, MINDSPORE, REC_SDK, Door

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.inference import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.compat.mindspore_rec import no_effect as mindspore_no_effect
from hotbed.compat.mx_rec import no_effect as rec_sdk_no_effect
from hotbed.compat.no_effect import NoEffect

EACH = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
SECTIONS = [
    pytest.param(door, section, id=f"{door.name}: {section['title']}")
    for door in DOORS
    for section in door.sections
]


@EACH
def test_page_is_that_of_the_file(door: Door) -> None:
    assert door.page.read_text() == door.text()


@EACH
def test_at_most_a_tenth_of_the_parameters_differ(door: Door) -> None:
    kinds = door.kinds()
    assert kinds["different"] <= kinds.total() / 10


@pytest.mark.parametrize(("door", "section"), SECTIONS)
def test_notes_are_of_parameters_that_are_there(door: Door, section: dict[str, Any]) -> None:
    names = [row.name for row in door.parameters(section)]
    noted = [name for kind in KINDS for name in section.get(kind, {})]
    assert set(noted) <= set(names)
    assert len(set(noted)) == len(noted)
    assert len(set(names)) == len(names)


@EACH
def test_parameters_of_a_call_have_their_names_and_defaults(door: Door) -> None:
    for section in door.sections:
        if "call" not in section:
            continue
        parameters = inspect.signature(door.look_up(section["call"])).parameters
        for row in door.parameters(section):
            if (
                f"{section.get('clause')}.{row.name}" in door.no_effect
                and row.name not in parameters
            ):
                continue  # taken by keyword
            own = parameters[row.name].default
            where = (section["call"], row.name)
            assert (own is inspect.Parameter.empty) == (row.default == ""), where
            if row.name in section.get("defaults", {}):
                assert own == section["defaults"][row.name], where


def test_names_of_rec_sdk_that_the_page_promises_are_there() -> None:
    for section in REC_SDK.sections:
        if "places" in section:
            places = [REC_SDK.look_up(place) for place in section["places"]]
        elif "methods" in section:
            places = [REC_SDK.look_up(section["methods"])]
        else:
            has_door = "whole" not in section and "call" not in section and "fields" not in section
            assert not has_door or not section.get("names"), section["title"]
            continue
        names = [row.name for row in REC_SDK.parameters(section)]
        missing = [name for name in names if not any(hasattr(place, name) for place in places)]
        assert missing == [], section["title"]


def test_methods_of_mindspore_that_the_page_promises_are_there() -> None:
    sections = [section for section in MINDSPORE.sections if "methods" in section]
    assert sections
    for section in sections:
        place = MINDSPORE.look_up(section["methods"])
        names = [row.name for row in MINDSPORE.parameters(section)]
        assert [name for name in names if not callable(getattr(place, name, None))] == []


@EACH
def test_each_rule_has_its_test(door: Door) -> None:
    missing = []
    for section in door.sections:
        for rule in door.rules(section):
            assert rule.kind in KINDS
            if not any(rule.test in _tests(FOLDER / file) for file in rule.files):
                missing.append((rule.files, rule.test))
    assert missing == []


LOGS = [KNOBS, rec_sdk_no_effect.ARGUMENTS, mindspore_no_effect.ARGUMENTS]


@pytest.mark.parametrize("arguments", LOGS, ids=["hugectr", "mx_rec", "mindspore_rec"])
def test_lines_about_rows_updates_devices_and_databases_are_warnings(
    arguments: NoEffect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "logged", set())
    caplog.set_level("INFO", "hotbed.compat")
    assert arguments.warned
    assert arguments.warned <= set(arguments.reasons)
    for name in arguments.reasons:
        arguments.log_no_effect(name)
    levels = {record.args[1]: record.levelname for record in caplog.records}
    assert levels == {
        name: "WARNING" if name in arguments.warned else "INFO" for name in arguments.reasons
    }


def call_hugectr() -> None:
    """Settings of HugeCTR that say where rows live and who updates them."""
    hugectr.CreateSolver(kafka_brockers="10.0.0.1:9092", use_mixed_precision=True, scaler=1024)
    source = {"source": "a", "eval_source": "a", "check_type": hugectr.Check_t.Non}
    remote = hugectr.data.DataSourceParams(hugectr.FileSystemType_t.HDFS)
    hugectr.DataReaderParams(hugectr.DataReaderType_t.Norm, **source, data_source_params=remote)
    hugectr.EmbeddingCollectionConfig().shard([["a"]], [("dp", ["a"])])
    databases = {
        "volatile_db": VolatileDatabaseParams(type=hugectr.DatabaseType_t.redis_cluster),
        "persistent_db": PersistentDatabaseParams(backend=hugectr.DatabaseType_t.rocks_db),
        "update_source": UpdateSourceParams(brokers="10.0.0.1:9092"),
    }
    words = ("m", 64, 0.9, "d", ["s"], 1, True, 0.5, True)
    InferenceParams(*words, **databases, refresh_interval=5.0)


def call_parameter_server() -> None:
    """The same databases for all models of a server."""
    source = UpdateSourceParams(brokers="10.0.0.1:9092")
    ParameterServerConfig({}, {}, {}, [], update_source=source)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            call_hugectr,
            "solver.kafka_brockers solver.scaler reader.data_source_params "
            "embedding_collection.shard inference_params.device_id "
            "inference_params.use_gpu_embedding_cache inference_params.volatile_db "
            "inference_params.persistent_db inference_params.update_source "
            "inference_params.refresh_interval",
        ),
        (call_parameter_server, "inference_params.update_source"),
    ],
)
def test_calls_warn_of_what_they_leave_out(
    call: Callable[[], None],
    names: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KNOBS, "logged", set())
    call()
    assert {record.args[1] for record in caplog.records} == set(names.split())


@cache
def _tests(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
