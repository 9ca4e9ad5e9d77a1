# SPDX-License-Identifier: Apache-2.0
"""The labels that a model predicts, by the names of the schema."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.data.schema import Schema
from hotbed.errors import ConfigError


def tasks_of(schema: Schema, tasks: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks that a model was given; of none, all labels of the schema.

    Raises:
        ConfigError: a task is not a label, stands twice, or there are no labels.
    """
    labels = [label.name for label in schema.labels]
    unknown = [task for task in tasks if task not in labels]
    if unknown or not labels:
        raise ConfigError(
            f"tasks: not a label of the schema, got {unknown or list(tasks)}. "
            f"Give some of {', '.join(labels)}."
        )
    if len(set(tasks)) < len(tasks):
        raise ConfigError(f"tasks: a label stands twice, got {list(tasks)}. Give each once.")
    return tuple(tasks) or tuple(labels)


def events_of(schema: Schema, tasks: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks of a model whose labels are events, one after another.

    Raises:
        ConfigError: there are fewer than two, or `tasks_of` raises.
    """
    events = tasks_of(schema, tasks)
    if len(events) < 2:
        raise ConfigError(
            f"tasks: events that follow each other are at least two labels, got {list(events)}. "
            "Give them in their order, such as ('click', 'buy')."
        )
    return events
