# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested too deeply is refused with the place, not with a RecursionError."""

from pathlib import Path

import pytest

import hotbed as hb
from hotbed.connectors.dead_letters import DeadLetters
from hotbed.connectors.position import Position
from hotbed.connectors.prepared import WORKFLOW_FILE, read_workflow
from hotbed.errors import ConfigError, DataError, FormatError

DEEP = "[" * 200_000


def test_a_schema_refuses_json_that_is_nested_too_deeply() -> None:
    with pytest.raises(ConfigError, match=r"schema: .* nested too deeply"):
        hb.Schema.from_json(DEEP)


def test_a_position_refuses_json_that_is_nested_too_deeply() -> None:
    with pytest.raises(DataError, match=r"position: .* nested too deeply"):
        Position.from_json(DEEP)


def test_dead_letters_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "dead.jsonl"
    file.write_text(DEEP + "\n")
    with pytest.raises(FormatError, match=r"line 1: .* nested too deeply"):
        DeadLetters(file)


def test_a_workflow_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / WORKFLOW_FILE).write_text(DEEP)
    with pytest.raises(DataError, match=r"not the workflow .* nested too deeply"):
        read_workflow(tmp_path)


def test_parquet_metadata_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from hotbed.compat.hugectr.parquet import Metadata

    file = tmp_path / "_metadata.json"
    file.write_text(DEEP)
    with pytest.raises(DataError, match=r"cannot be read.* nested too deeply"):
        Metadata.read(str(file))


def test_a_hugectr_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from hotbed.compat.hugectr.json.inference import read_json

    file = tmp_path / "deep.json"
    file.write_text(DEEP)
    with pytest.raises(ConfigError, match=r"deep\.json: .* nested too deeply"):
        read_json(file)
