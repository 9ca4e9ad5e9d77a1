# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, once for the whole tree.

Each function raises ConfigError with a message of one form: where, what the value must be, the
value, what to do. `where` is the place that users know: `AUC.bins`, `serve.port`. None passes the
three comparisons, because it switches a limit off; it is neither a whole number nor a finite one.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

from hotbed.errors import ConfigError

__all__ = [
    "MOST_SECONDS",
    "above",
    "at_least",
    "between",
    "finite_number",
    "one_of",
    "power_of_two",
    "seconds",
    "whole_number",
]


MOST_SECONDS = 1e12
"""The longest time in seconds, 31,700 years: int64 microseconds hold it and an event time."""


def __dir__() -> list[str]:
    return sorted(__all__)


def at_least(where: str, value: float | None, least: float, advice: str = "") -> None:
    """Raise ConfigError if `value` is below `least`."""
    if value is not None and not _holds(value, operator.ge, least):
        problem = f"must be at least {least}"
        raise _error(where, problem, value, advice or f"Give a number from {least} on.")


def above(where: str, value: float | None, bound: float, advice: str = "") -> None:
    """Raise ConfigError if `value` is not above `bound`."""
    if value is not None and not _holds(value, operator.gt, bound):
        problem = f"must be above {bound}"
        raise _error(where, problem, value, advice or f"Give a number above {bound}.")


def between(where: str, value: float | None, least: float, most: float, advice: str = "") -> None:
    """Raise ConfigError if `value` is not in [least, most]."""
    if value is None:
        return
    if not (_holds(value, operator.ge, least) and _holds(value, operator.le, most)):
        problem = f"must be from {least} to {most}"
        raise _error(where, problem, value, advice or f"Give a number from {least} to {most}.")


def whole_number(
    where: str,
    value: object,
    least: int,
    most: float = math.inf,
    advice: str = "Give such a number.",
) -> None:
    """Raise ConfigError if `value` is not an integer in [least, most]; a bool is not an integer."""
    if (
        not isinstance(value, bool)
        and isinstance(value, numbers.Integral)
        and least <= int(value) <= most
    ):
        return
    if most == math.inf:
        bounds = f">= {least}"
    else:
        bounds = f"from {least} to {most}"
    raise _error(where, f"must be an integer {bounds}", value, advice)


def power_of_two(where: str, value: object, advice: str) -> None:
    """Raise ConfigError if `value` is not 1, 2, 4, 8 and so on."""
    whole_number(where, value, 1, advice=advice)
    if isinstance(value, numbers.Integral) and int(value).bit_count() > 1:
        raise _error(where, "must be a power of two", value, advice)


def finite_number(
    where: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    advice: str = "Give such a number.",
) -> None:
    """Raise ConfigError if `value` is not a finite number within the bounds that are given.

    `least` and `most` are allowed themselves, `above` and `below` are not. A bool is not a number.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number) and least <= number <= most and above < number < below:
            return
    bounds = (">=", least), (">", above), ("<=", most), ("<", below)
    limits = [f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound)]
    problem = " ".join(["must be a finite number", " and ".join(limits)])
    raise _error(where, problem.strip(), value, advice)


def seconds(
    where: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    advice: str = "Give a number of seconds.",
) -> None:
    """Raise ConfigError if `value` is not a time that event times can be added to."""
    finite_number(where, value, least=least, above=above, most=MOST_SECONDS, advice=advice)


def one_of(where: str, value: object, choices: Iterable[object], advice: str = "") -> None:
    """Raise ConfigError if `value` is not among `choices`."""
    if value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        raise _error(where, "unknown value", value, advice or f"Give one of {names}.")


def names(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple: a text is one name, not its letters."""
    return (value,) if isinstance(value, str) else tuple(value)


def _holds(value: Any, compare: Callable[[Any, Any], Any], bound: float) -> bool:
    """Return whether a comparison holds; False for what is not a number, such as a text."""
    if isinstance(value, bool):
        return False
    try:
        return bool(compare(value, bound))
    except (TypeError, ValueError, RuntimeError):
        return False


def _error(where: str, problem: str, value: object, advice: str) -> ConfigError:
    return ConfigError(f"{where}: {problem}, got {value!r}. {advice}")
