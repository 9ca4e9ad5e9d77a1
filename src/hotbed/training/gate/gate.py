# SPDX-License-Identifier: Apache-2.0
"""Gate: which versions of a stream are published, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.training.gate.rules import GateRule


@dataclass(frozen=True)
class Gate:
    """Rules that a version of `Checkpoint(publish=…, gate=…)` must keep to be published.

    A version that breaks a rule is saved and not published: it is held. Its reasons are in its
    manifest, in the log, in metrics, in the report, and in `hotbed inspect`. The next version that
    breaks none is published, as a full. See docs/gate.md.

    Args:
        rules: rules of `hb.gates`; None = one of each, with its defaults.
        min_samples: rules over the newest events see at least so many. While a stream has fewer,
            they are not judged. After a held version, publishing waits for so many new events.
        sample: events that are kept to compare a version with the one that is served.
        warm_up: number of published versions that make the usual values. Until then, only rules
            without usual values, such as `NotFinite`, are judged.
        hold_for: number of held versions in a row after which `command` is called, once.
        command: a URL that receives a POST, or a program with its arguments. Both receive a JSON
            object with `states`, `step`, `held` (versions in a row) and `reasons`, the program on
            its standard input.

    Raises:
        ConfigError: an argument has another type or is out of range.

    Example: `hb.callbacks.Checkpoint("runs/clicks", publish=publisher, gate=hb.Gate())`
    """

    rules: Sequence[GateRule] | None = None
    min_samples: int = 1000
    sample: int = 4096
    warm_up: int = 10
    hold_for: int = 3
    command: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("rules", "command"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("min_samples", "sample", "warm_up", "hold_for"):
            where = f"Gate.{name}"
            checks.whole_number(where, getattr(self, name), 1, advice="Give a positive integer.")
        rules = self.rules
        if rules is not None and not all(isinstance(rule, GateRule) for rule in rules):
            raise ConfigError(
                f"Gate.rules: must be rules of hb.gates, got {rules!r:.80}. Give such as "
                "[hb.gates.LossRises()]."
            )
        command = self.command
        if isinstance(command, str) and not command.startswith(("http://", "https://")):
            raise ConfigError(
                f"Gate.command: must be a URL or a list, got {command!r:.80}. Give a program as a "
                'list, such as ["notify", "team"].'
            )
        if not isinstance(command, str) and not all(
            isinstance(part, str) for part in command or ()
        ):
            raise ConfigError(
                f"Gate.command: must be a program with its arguments, got {command!r:.80}. Give a "
                "list of strings."
            )
