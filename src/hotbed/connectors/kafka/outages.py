# SPDX-License-Identifier: Apache-2.0
"""Whether the brokers of a topic answer, and since when they do not."""

from __future__ import annotations

import logging
import time

from hotbed.connectors.kafka.client import ClientError
from hotbed.errors import ConfigError

logger = logging.getLogger("hotbed.kafka")

AWAY_SECONDS = 2.0
"""How long an answer may take before the lag is unknown, and, if no broker is connected, the
outage is logged.
"""
REFUSALS = ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL")


class Outages:
    """What is known of the brokers from their answers and from errors of the client.

    Attributes:
        since: when the first of the checks began that failed since the last success.
    """

    def __init__(self, servers: str) -> None:
        self.since: float | None = None
        self._servers = servers
        self._asked_since: float | None = None  # of an answer that is not here
        self._apart = ""  # why no broker was connected, since the last check that succeeded
        self._refused = ""
        self._is_logged = False

    @property
    def is_reached(self) -> bool:
        """Whether the last check succeeded, and no answer is overdue."""
        return self.since is None and not self._is_overdue

    @property
    def is_hopeless(self) -> bool:
        """Whether it makes no sense to wait for the answer: the brokers refuse, or are away."""
        return bool(self._refused) or (bool(self._apart) and self._is_overdue)

    @property
    def _is_overdue(self) -> bool:
        """Whether an answer takes so long that the broker may hang."""
        since = self._asked_since
        return since is not None and time.monotonic() - since >= AWAY_SECONDS

    def ask(self) -> None:
        """Note that a broker was asked."""
        self._asked_since = self._asked_since or time.monotonic()

    def answer(self) -> None:
        """Note that it answered."""
        self._asked_since = None

    def error(self, error: ClientError) -> None:
        """Note an error of the client as a whole."""
        text = f"{error.text} ({error.name})"
        # in TLS 1.3 a broker checks the client's certificate after the handshake, and librdkafka
        # reports its alert as an error of transport
        if error.name in REFUSALS or "SSL alert number" in error.text:
            self._refused = text
        if error.name == "_ALL_BROKERS_DOWN":
            self._apart = text

    def begin(self, cause: str, *, first: bool) -> None:
        """Note that a check failed, or waits for an answer without hope.

        Args:
            cause: why; "" = as the last error of the client said.
            first: whether reading begins with this check.

        Raises:
            ConfigError: the broker refuses the credentials at the first check.
        """
        if self._refused and first:
            raise ConfigError(
                f"options: the broker refuses the connection, got {self._refused}. Check user, "
                "password and certificates."
            )
        now = time.monotonic()
        self.since = self.since or self._asked_since or now
        # one slow answer is not an outage
        if not self._is_logged and now - self.since >= AWAY_SECONDS:
            reason = cause or self._apart or self._refused
            logger.warning("kafka at %s is away, reading waits: %s", self._servers, reason)
            self._is_logged = True

    def end(self) -> float:
        """Note that a check succeeded; return how many seconds of an outage it ends."""
        seconds = 0.0
        if self._is_logged and self.since is not None:
            logger.warning("kafka at %s is back, reading resumes", self._servers)
            seconds = time.monotonic() - self.since
        self._is_logged = False
        self._apart = ""
        self._asked_since = None
        self.since = None
        return seconds
