# SPDX-License-Identifier: Apache-2.0
"""PublishGate: which versions of a stream are published, as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotbed import checks
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

LIMITS: Mapping[str, float] = {
    "not_finite": 0.0,
    "served_loss": 0.003,
    "served_scores": 0.1,
    "loss": 0.1,
    "entropy": 0.1,
    "calibration": 0.3,
    "unseen_ids": 0.1,
    "missing_values": 0.1,
    "columns": 0.25,
    "scores": 0.25,
    "evicted_rows": 0.5,
    "norms": 0.2,
    "clock": 21_600.0,
    "volume": 1.0,
    "partitions": 0.3,
    "repeats": 0.1,
}
"""By rule, how far its numbers may rise; docs/gate.md says what each rule measures."""


@dataclass(frozen=True)
class PublishGate:
    """Rules that a version of `Checkpoint(publish=…, gate=…)` must keep to be published.

    A version that breaks a rule is saved and not published: it is held. Its reasons are in its
    manifest, in the log, in metrics, in the report, and in `hotbed inspect`. The next version that
    breaks none is published, as a full. See docs/gate.md.

    Args:
        held_back: the share of the events that are scored and never learned. A version is compared
            on them with the version that is served. 0: no version is compared.
        sample: number of the newest held-back events that are kept.
        min_samples: rules over the newest events see at least so many. While a stream has fewer,
            they are not judged. After a held version, publishing waits for so many new events.
        warm_up: number of published versions that make the usual values. Until then, only
            `not_finite` is judged.
        limits: by the name of a rule, how far its numbers may rise beyond their usual values; None
            switches the rule off. Rules that are not named keep their limits.
        probation: number of versions in a row without a broken rule over the newest events, after
            one that broke such a rule; the last of them is published.
        hold_for: number of held versions in a row after which `command` is called, once.
        command: a URL that receives a POST, or a program with its arguments. Both receive a JSON
            object with `states`, `step`, `held` (versions in a row) and `reasons`, the program on
            its standard input.

    Raises:
        ConfigError: an argument has another type or is out of range.

    Example: `hb.callbacks.Checkpoint("runs/clicks", publish=publisher, gate=PublishGate())`
    """

    held_back: float = 0.02
    sample: int = 4096
    min_samples: int = 1000
    warm_up: int = 10
    limits: Mapping[str, float | None] = field(default_factory=dict)
    probation: int = 3
    hold_for: int = 3
    command: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        advice = "Give a share below 1, such as 0.02."
        where = "PublishGate.held_back"
        checks.finite_number(where, self.held_back, least=0, below=1, advice=advice)
        for name in ("sample", "min_samples", "warm_up", "probation", "hold_for"):
            where = f"PublishGate.{name}"
            checks.whole_number(where, getattr(self, name), 1, advice="Give a positive integer.")
        if not isinstance(self.limits, Mapping):
            raise ConfigError(
                f"PublishGate.limits: must be a dict of limits by rule, got {self.limits!r:.80}. "
                'Give one such as {"loss": 0.2}.'
            )
        for rule, limit in self.limits.items():
            if rule not in LIMITS:
                advice = did_you_mean(str(rule), LIMITS)
                raise ConfigError(f"PublishGate.limits: unknown rule, got {rule!r}. {advice}")
            where = f"PublishGate.limits[{rule!r}]"
            checks.at_least(where, limit, 0, "Give a number such as 0.1, or None for no limit.")
        self._check_command()

    def limit(self, rule: str) -> float | None:
        """Return how far the numbers of a rule may rise; None: the rule is switched off."""
        return self.limits[rule] if rule in self.limits else LIMITS[rule]

    def _check_command(self) -> None:
        if isinstance(self.command, list):
            object.__setattr__(self, "command", tuple(self.command))
        command = self.command
        if isinstance(command, str) and not command.startswith(("http://", "https://")):
            raise ConfigError(
                f"PublishGate.command: must be a URL or a list, got {command!r:.80}. Give a "
                'program as a list, such as ["notify", "team"].'
            )
        if command is None or isinstance(command, str):
            return
        is_program = isinstance(command, tuple) and len(command) > 0
        if not is_program or not all(isinstance(part, str) for part in command):
            raise ConfigError(
                f"PublishGate.command: must be a program with its arguments, got {command!r:.80}. "
                "Give a list of strings, the program first."
            )
