# SPDX-License-Identifier: Apache-2.0
"""A log in a topic of Kafka: each message is an Arrow stream with the rows of some requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from hotbed.connectors.kafka.client import kafka_library
from hotbed.connectors.kafka.kafka import Kafka
from hotbed.errors import StoreError

_MESSAGE_BYTES = 512 << 10
_SEND_SECONDS = 30.0


class LogTopic:
    """Sends the rows of a model's log to a topic.

    Args:
        servers: as for `hb.sources.Kafka`.
        topic: name of the topic.
        options: options for librdkafka.
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, Any]) -> None:
        self._topic = topic
        self._errors = list[Any]()
        settings = Kafka(servers, topic, options=options).client_options()
        settings = {**settings, "acks": "all", "message.timeout.ms": int(1000 * _SEND_SECONDS)}
        self._producer = kafka_library().Producer(settings)

    def append(self, rows: pa.RecordBatch) -> None:
        """Send rows. Raises StoreError if the brokers do not take them."""
        self._errors.clear()
        at_once = max(1, rows.num_rows * _MESSAGE_BYTES // max(1, rows.nbytes))
        for start in range(0, rows.num_rows, at_once):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as stream:
                stream.write_batch(rows.slice(start, at_once))
            message = sink.getvalue().to_pybytes()
            try:
                self._producer.produce(self._topic, message, on_delivery=self._on_delivery)
            except BufferError:
                self._errors.append("a full queue")
        num_unsent = self._producer.flush(_SEND_SECONDS)
        if self._errors or num_unsent:
            self._producer.purge()
            answer = self._errors[0] if self._errors else "no answer"
            raise StoreError(
                f"topic {self._topic}: rows of the request log were not taken, got {answer}. Check "
                "the brokers and the topic."
            )

    def rotate(self, most_bytes: int | None) -> None:
        """Nothing: what was appended is in the topic."""

    def close(self) -> None:
        """Nothing: what was appended is in the topic."""

    def _on_delivery(self, error: Any, message: Any) -> None:
        if error:
            self._errors.append(error)
