# SPDX-License-Identifier: Apache-2.0
"""The client library of Kafka, which an extra installs."""

from __future__ import annotations

from typing import Any

from hotbed.errors import MissingExtra


def kafka_library() -> Any:
    """Return the module confluent_kafka.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra(
            "kafka: confluent_kafka is not installed. Install it: pip install hotbed[kafka]"
        ) from error
    return confluent_kafka
