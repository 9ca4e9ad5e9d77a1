# SPDX-License-Identifier: Apache-2.0
"""Kafka through TLS and SASL: read, committed and published as in plain text; who is not known is
refused clearly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography absent")

from kafka_relay import Relay, certificate
from kafka_streams import fill, make, rows, within

from hotbed.connectors import Kafka
from hotbed.errors import ConfigError
from hotbed.testing import Broker


@contextlib.contextmanager
def broker(relay: Relay, options: dict[str, Any]) -> Iterator[Broker]:
    """A broker that is reached through the relay alone: it sends its clients there."""
    with Broker(advertised=relay.address, options=options) as running:
        relay.target = running.servers
        running.create("clicks", 3)
        yield running
    relay.close()


def check(relay: Relay, options: dict[str, Any]) -> None:
    """Messages are read and committed."""
    import confluent_kafka as kafka

    source = Kafka(relay.address, "clicks", group="trainer", block_rows=90, options=options)
    dataset = make(source, 90)
    items = dataset.stream()
    batches = within(items, 10)
    assert [row for batch in rows(batches) for row in batch] == list(range(900))
    items.close()
    assert batches[-1].position is not None
    dataset.commit(batches[-1].position)
    other = kafka.Consumer(
        {"bootstrap.servers": relay.address, "group.id": "trainer", **source.client_options()}
    )
    places = [kafka.TopicPartition("clicks", partition) for partition in range(3)]
    assert [place.offset for place in other.committed(places, timeout=10)] == [600, 200, 100]
    other.close()


def refused(relay: Relay, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"options: the broker refuses the connection, got .*{reason}.*. Check user, password",
    ):
        within(make(Kafka(relay.address, "clicks", options=options)).stream(), 1)


def test_messages_are_read_and_committed_through_tls_and_a_wrong_authority_is_refused(
    tmp_path: Path,
) -> None:
    pair, other = certificate(tmp_path, "broker"), certificate(tmp_path, "other")
    options = {"security.protocol": "SSL", "ssl.ca.location": str(pair[0])}
    relay = Relay(pair)
    with broker(relay, options) as running:
        fill(running, "clicks", range(900))
        check(relay, options)
        assert relay.encrypted >= 3
        refused(relay, {**options, "ssl.ca.location": str(other[0])}, "certificate verify failed")


def test_a_client_shows_its_own_certificate_where_it_is_asked_for(tmp_path: Path) -> None:
    pair, ours, strange = (certificate(tmp_path, name) for name in ("broker", "trainer", "strange"))
    options = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(pair[0]),
        "ssl.certificate.location": str(ours[0]),
        "ssl.key.location": str(ours[1]),
    }
    relay = Relay(pair, client_authority=ours[0])
    with broker(relay, options) as running:
        fill(running, "clicks", range(900))
        check(relay, options)
        refused(
            relay,
            {
                **options,
                "ssl.certificate.location": str(strange[0]),
                "ssl.key.location": str(strange[1]),
            },
            "SSL",
        )


def test_a_password_is_told_through_tls_and_a_wrong_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = certificate(tmp_path, "broker")
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    options = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(pair[0]),
        "sasl.mechanism": "PLAIN",
        "sasl.username": "ann",
        "sasl.password": "hunter2",
    }
    relay = Relay(pair, users={"ann": "hunter2"})
    with broker(relay, options) as running:
        fill(running, "clicks", range(900))
        check(relay, {**options, "sasl.password": "${KAFKA_PASSWORD}"})
        assert set(relay.seen) == {"PLAIN"}
        refused(relay, {**options, "sasl.password": "hunter3"}, "invalid credentials")
        refused(relay, {**options, "sasl.username": "bob"}, "invalid credentials")
        refused(relay, {**options, "sasl.mechanism": "SCRAM-SHA-256"}, "SCRAM-SHA-256")
