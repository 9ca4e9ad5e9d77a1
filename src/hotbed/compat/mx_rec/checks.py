# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that only Rec SDK needs; `hotbed.checks` has the others."""

from __future__ import annotations

from typing import Any

from hotbed.errors import ConfigError

MOST_INT = 2**31 - 1
"""The greatest number of Rec SDK's integers."""


def boolean(where: str, value: Any) -> bool:
    """Return a Boolean argument, which may be the text "True" or "False"."""
    texts = {"True": True, "False": False}
    if isinstance(value, str) and value in texts:
        return texts[value]
    if not isinstance(value, bool):
        raise ConfigError(
            f"{where}: a Boolean is needed, got {value!r}. Give True or False, or these as texts."
        )
    return value
