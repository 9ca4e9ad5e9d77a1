# SPDX-License-Identifier: Apache-2.0
"""Errors of calls at a wrong time, of the classes that loops for Rec SDK catch."""

from __future__ import annotations

from hotbed.errors import ConfigError, RowShapeError


class StateError(ConfigError, OSError):
    """A call comes before `init`, twice, or after step 8 (`EnvironmentError` in Rec SDK)."""


class CallError(ConfigError, RuntimeError):
    """A call lacks something that an earlier step gives (`RuntimeError` in Rec SDK)."""


class SendCountError(RowShapeError, RuntimeError):
    """A batch has more distinct ids of a table than `send_count` (`RuntimeError` in Rec SDK)."""
