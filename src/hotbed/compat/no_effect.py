# SPDX-License-Identifier: Apache-2.0
"""NoEffect: arguments of another framework that have no effect here, and their log lines."""

from __future__ import annotations

import logging
from collections.abc import Mapping


class NoEffect:
    """Arguments that a door accepts without effect.

    Args:
        log: of the door.
        reasons: argument -> why it has no effect; ends the sentence `has no effect, because ...`.
    """

    def __init__(self, log: logging.Logger, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons
        self._log = log
        self._logged: set[str] = set()

    def note(self, name: str) -> None:
        """Log once in a process that an argument has no effect, and why."""
        if name in self._logged:
            return
        self._logged.add(name)
        self._log.info("%s has no effect, because %s", name, self.reasons[name])
