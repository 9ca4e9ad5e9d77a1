# SPDX-License-Identifier: Apache-2.0
"""NoEffect: arguments of another framework that have no effect here, and their log lines."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping


class NoEffect:
    """Arguments that a door accepts without effect.

    Args:
        door: name of its package, which is that of its log, too.
        reasons: argument -> why it has no effect; ends the sentence `has no effect, because ...`.
        warned: arguments that concern rows, updates, devices or databases: their lines are
            warnings. The others are about kernels and threads, and are logged as information.

    Attributes:
        logged: the arguments that were logged.
    """

    def __init__(self, door: str, reasons: Mapping[str, str], warned: Collection[str]) -> None:
        self.reasons = reasons
        self.warned = frozenset(warned)
        self.logged: set[str] = set()
        self._door = door
        self._log = logging.getLogger(f"hotbed.compat.{door}")

    def log_no_effect(self, name: str, *, when: bool = True) -> None:
        """Log once in a process that an argument has no effect, and why.

        Args:
            name: of the argument, a key of `reasons`.
            when: whether it differs from its default; False logs nothing.
        """
        if not when or name in self.logged:
            return
        self.logged.add(name)
        reason = self.reasons[name]
        emit = self._log.warning if name in self.warned else self._log.info
        emit("%s: %s has no effect, because %s", self._door, name, reason)
