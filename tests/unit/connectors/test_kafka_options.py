# SPDX-License-Identifier: Apache-2.0
"""Kafka's configuration: secrets stay secret, wrong values are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hotbed import config
from hotbed.connectors import Kafka
from hotbed.errors import ConfigError


def test_secrets_are_filled_in_late_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Kafka(
        "host:9092", "clicks", options={"sasl.password": "hunter2", "security.protocol": "SASL_SSL"}
    )
    assert "hunter2" not in repr(source) + json.dumps(config.describe(source))
    named = Kafka("host:9092", "clicks", options={"sasl.password": "${KAFKA_PASSWORD}"})
    assert config.build(config.describe(named), Kafka) == named
    with pytest.raises(
        ConfigError, match=r"options.sasl.password: no environment variable KAFKA_PASSWORD"
    ):
        named.client_options()
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    assert named.client_options()["sasl.password"] == "hunter2"
    rebuilt = config.build(config.describe(source), Kafka)
    with pytest.raises(ConfigError, match="a secret is never written down"):
        rebuilt.client_options()
    monkeypatch.delenv("KAFKA_PASSWORD")


def test_parts_are_nested_and_never_written_as_the_whole_topic() -> None:
    topic = Kafka("host:9092", "clicks")
    first, second = topic.parts(2)
    assert topic != first != second
    assert [part.reads(3) for part in (topic, first, second)] == [True, False, True]
    assert [part.reads(3) for part in second.parts(2)] == [False, True]
    with pytest.raises(ConfigError, match=r"a part of a topic cannot .* got part 1 of 2"):
        config.describe(second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "middle"}, "start: unknown value, got 'middle'"),
        ({"block_rows": 0}, "block_rows: must be at least 1"),
        ({"options": {"group.id": "x"}}, r"options.group.id: Hotbed sets it itself"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Kafka("host:9092", "clicks", **arguments)
