# SPDX-License-Identifier: Apache-2.0
"""Prometheus: the values of a run at an HTTP address. Needs `pip install hotbed[prometheus]`."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hotbed import checks
from hotbed.config import described
from hotbed.training.run import Run
from hotbed.training.watching.endpoint import Endpoint, Reading
from hotbed.training.watching.readings import readings

log = logging.getLogger("hotbed")


@described
class Prometheus:
    """Serve the values of `readings` at http://host:port/metrics during training.

    The default host accepts requests of this machine only. On another host, everybody who can
    reach it can read the values.

    On several ranks, each serves its own values, with the label `rank`: those of tables count the
    rows on this rank, so that `sum by (table) (hotbed_table_rows)` is the number of all rows.

    Args:
        port: 0 takes a free one; `address` has it. The ranks of a machine take this port and those
            that follow it.
        host: address to listen on.
        every_seconds: seconds between two updates of the values.

    Raises:
        MissingExtra: at the begin of training, if the extra `hotbed[prometheus]` is not installed.

    Example:
        >>> callbacks = [hb.callbacks.Windows(seconds=3600), hb.callbacks.Prometheus(9109)]
        >>> model.online_train(stream, callbacks)
    """

    def __init__(
        self, port: int = 9109, host: str = "127.0.0.1", every_seconds: float = 1.0
    ) -> None:
        checks.between("Prometheus.port", port, 0, 65_535)
        checks.at_least("Prometheus.every_seconds", every_seconds, 0)
        self._where = (port, host)
        self._every = every_seconds
        self._endpoint: Endpoint | None = None
        self._shown = -math.inf

    @property
    def address(self) -> str:
        """The URL of the values; empty while nothing is trained."""
        if self._endpoint is None:
            return ""
        return f"http://{self._where[1]}:{self._endpoint.port}/metrics"

    def check_ready(self) -> None:
        """Raise MissingExtra without prometheus-client, ConfigError for a taken port."""
        Endpoint(*self._where).close()

    def on_fit_begin(self, run: Run) -> None:
        if self._endpoint is None:
            port, host = self._where
            number = int(os.environ.get("LOCAL_RANK", run.learner.shard.rank))
            self._endpoint = Endpoint(port and port + number * (run.learner.shard.size > 1), host)
        log.info("Prometheus: %s", self.address)

    def on_epoch_begin(self, run: Run) -> None:
        self._show(run)  # not before: a state may have been loaded since the fit began

    def barrier(self, step: int, now: int | None) -> bool:
        return self._is_due()

    def on_step_end(self, run: Run) -> None:
        if self._is_due() and not run.ahead:
            self._show(run)

    def on_idle(self, run: Run) -> None:
        self.on_step_end(run)

    def on_epoch_end(self, run: Run) -> None:
        self._show(run)

    def on_fit_end(self, run: Run) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _is_due(self) -> bool:
        return time.monotonic() - self._shown >= self._every

    def _show(self, run: Run) -> None:
        if self._endpoint is not None:
            self._endpoint.show(_labelled(run, readings(run)))
        self._shown = time.monotonic()


def _labelled(run: Run, values: Iterable[Reading]) -> Iterator[Reading]:
    """Yield readings; those of one of several ranks say of which."""
    for reading in values:
        if run.learner.shard.size > 1:
            labels = {**reading.labels, "rank": str(run.learner.shard.rank)}
            reading = replace(reading, labels=labels)
        yield reading
