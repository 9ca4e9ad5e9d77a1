# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested too deeply is refused with the place, not with a RecursionError."""

from pathlib import Path

import pytest

import hotbed as hb
from hotbed.connectors.position import Position
from hotbed.errors import ConfigError, DataError

DEEP = "[" * 200_000


def test_a_schema_refuses_json_that_is_nested_too_deeply() -> None:
    with pytest.raises(ConfigError, match=r"schema: .* nested too deeply"):
        hb.Schema.from_json(DEEP)


def test_a_position_refuses_json_that_is_nested_too_deeply() -> None:
    with pytest.raises(DataError, match=r"position: .* nested too deeply"):
        Position.from_json(DEEP)


def test_a_hugectr_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from hotbed.compat.hugectr.json.inference import read_json

    file = tmp_path / "deep.json"
    file.write_text(DEEP)
    with pytest.raises(ConfigError, match=r"deep\.json: nested too deeply"):
        read_json(file)
