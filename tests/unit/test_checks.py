# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: which values pass, and the messages for the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

import hotbed as hb
from hotbed import checks
from hotbed.data import Cross
from hotbed.errors import ConfigError
from hotbed.prepare import Negatives


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda: checks.at_least("AUC.bins", 1, 2),
            "AUC.bins: must be at least 2, got 1. Give a number from 2 on.",
        ),
        (
            lambda: checks.at_least("AUC.bins", math.nan, 2, "Give 8192."),
            "AUC.bins: must be at least 2, got nan. Give 8192.",
        ),
        (
            lambda: checks.at_least("max_steps", "5", 0),  # type: ignore[arg-type]
            "max_steps: must be at least 0, got '5'. Give a number from 0 on.",
        ),
        (
            lambda: checks.at_least("max_steps", True, 0),
            "max_steps: must be at least 0, got True. Give a number from 0 on.",
        ),
        (
            lambda: checks.above("speed", [], 0),  # type: ignore[arg-type]
            "speed: must be above 0, got []. Give a number above 0.",
        ),
        (
            lambda: checks.between("serve.port", "a", 0, 65_535),  # type: ignore[arg-type]
            "serve.port: must be from 0 to 65535, got 'a'. Give a number from 0 to 65535.",
        ),
        (
            lambda: checks.above("speed", 0, 0),
            "speed: must be above 0, got 0. Give a number above 0.",
        ),
        (
            lambda: checks.between("serve.port", 70_000, 0, 65_535),
            "serve.port: must be from 0 to 65535, got 70000. Give a number from 0 to 65535.",
        ),
        (
            lambda: checks.whole_number("epochs", 1.0, 1),
            "epochs: must be an integer >= 1, got 1.0. Give such a number.",
        ),
        (
            lambda: checks.whole_number("table 'x': dim", True, 1, 4096),
            "table 'x': dim: must be an integer from 1 to 4096, got True. Give such a number.",
        ),
        (
            lambda: checks.finite_number("Sgd.momentum", 1.0, least=0, below=1),
            "Sgd.momentum: must be a finite number >= 0 and < 1, got 1.0. Give such a number.",
        ),
        (
            lambda: checks.finite_number("Constant.value", "1"),
            "Constant.value: must be a finite number, got '1'. Give such a number.",
        ),
        (
            lambda: checks.finite_number("Adam.eps", 0, above=0, advice="Give 1e-8."),
            "Adam.eps: must be a finite number > 0, got 0. Give 1e-8.",
        ),
        (
            lambda: checks.one_of("mode", "mid", ("max", "min")),
            "mode: unknown value, got 'mid'. Give one of 'max', 'min'.",
        ),
    ],
)
def test_check_names_place_value_and_advice(check: Callable[[], None], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check()


def test_bounds_themselves_pass() -> None:
    checks.at_least("x", 2, 2)
    checks.between("x", 0, 0, 1)
    checks.between("x", 1, 0, 1)
    checks.whole_number("x", 4, 1, 4)
    checks.finite_number("x", 1, least=1, most=1)


def test_none_passes_a_comparison_and_is_not_a_number() -> None:
    checks.at_least("x", None, 1)
    checks.above("x", None, 0)
    checks.between("x", None, 0, 1)
    with pytest.raises(ConfigError, match="must be an integer"):
        checks.whole_number("x", None, 1)
    with pytest.raises(ConfigError, match="must be a finite number"):
        checks.finite_number("x", None)


def test_numbers_of_numpy_are_numbers() -> None:
    checks.whole_number("x", np.int64(3), 1)
    checks.finite_number("x", np.float32(0.5), least=0, below=1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, True, None, "1"])
def test_finite_number_rejects_what_is_not_one(value: object) -> None:
    with pytest.raises(ConfigError, match="x: must be a finite number, got"):
        checks.finite_number("x", value)


EVENTS = hb.sources.Memory({"id": [1], "time": [0]})


@pytest.mark.parametrize("value", [math.inf, 1e300, 10**30])
@pytest.mark.parametrize(
    "build",
    [
        lambda value: hb.sources.Outcome(EVENTS, value),
        lambda value: hb.sources.Join(EVENTS, EVENTS, "id", 1, lateness_seconds=value),
        lambda value: hb.sources.Join(EVENTS, EVENTS, "id", 1, idle_seconds=value),
        lambda value: hb.sources.LateLabels("id", "kind", "view", "click", value),
        lambda value: hb.callbacks.Windows(seconds=value),
        lambda value: hb.callbacks.Windows(samples=value),
        lambda value: hb.callbacks.Evict(lateness_seconds=value),
        lambda value: hb.MinCount(2, expire_seconds=value),
        lambda value: hb.Ttl(days=value),
        lambda value: hb.Ttl(hours=value),
        lambda value: hb.Ttl(seconds=value),
        lambda value: hb.Lru(value),
        lambda value: hb.Dataset(
            hb.sources.Follow("."), hb.Schema([hb.Id("id")]), 1, max_ahead_seconds=value
        ),
    ],
)
def test_more_than_a_clock_of_64_bits_holds_is_refused_by_name(
    build: Callable[[float], object], value: float
) -> None:
    with pytest.raises(ConfigError, match=r"must be (a finite number|an integer) .*got"):
        build(value)


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda names: hb.sources.LateLabels(names, "kind", "view", "buy"), "on"),
        (lambda names: hb.sources.Generated(1, labels=names), "labels"),
        (lambda names: hb.sources.Raw("x.bin", labels=names), "labels"),
        (lambda names: hb.sources.Norm("x.bin", slots=names), "slots"),
        (lambda names: hb.sources.Norm("x.bin", labels=names, slots=[]), "labels"),
        (lambda names: hb.sources.Csv("x.csv", header=False, columns=names), "columns"),
        (lambda names: hb.sources.Csv("x.csv", null_values=names), "null_values"),
        (lambda names: Cross(names), "with_"),
        (lambda names: Negatives("user", "film", item_columns=names), "item_columns"),
    ],
)
def test_a_text_is_one_name_wherever_several_are_taken(
    build: Callable[[object], object], argument: str
) -> None:
    assert build("abc") == build(("abc",))
    assert getattr(build("abc"), argument) == ("abc",)
