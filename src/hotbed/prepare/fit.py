# SPDX-License-Identifier: Apache-2.0
"""Fitting out of core: each transform learns from the training rows of all partitions.

Each learned step that follows another one in the same column takes one more pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotbed.data.columns import Columns
from hotbed.data.fit import Task, open_tasks
from hotbed.data.learners import Learner
from hotbed.data.schema import Schema
from hotbed.errors import DataError
from hotbed.prepare.partitions import TRAIN, Partition
from hotbed.prepare.stages import Work
from hotbed.prepare.view import View


@dataclass(frozen=True)
class _Learning:
    """The task of a pass: learn from the training rows of one partition."""

    view: View
    tasks: Sequence[Task]

    def __call__(self, partition: Partition) -> tuple[int, list[Learner]]:
        """Return the number of training rows, and the learner of each task."""
        learners = [task.learner() for task in self.tasks]
        num_rows = 0
        for chunk in self.view.chunks(partition):
            train = chunk.of_part(TRAIN)
            num_rows += len(train)
            context = Columns(train.rows)
            for task, learner in zip(self.tasks, learners, strict=True):
                task.add(learner, context)
        return num_rows, learners


def fit(schema: Schema, work: Work, view: View) -> Schema:
    """Return `schema` with all transforms fitted on the training rows.

    Raises:
        DataError: there are no training rows.
    """
    number = 1
    while tasks := open_tasks(schema):
        merged: list[Learner] = []
        num_rows = 0
        learning = _Learning(view, tasks)
        for count, learners in work.map(f"fit {number}", learning, work.partitions):
            num_rows += count
            if not merged:
                merged = learners
                continue
            for learner, later in zip(merged, learners, strict=True):
                learner.merge(later)
        if not num_rows:
            raise DataError(
                "fit: there are no training rows, got an empty source or split. Give the training "
                "part rows."
            )
        for task, learner in zip(tasks, merged, strict=True):
            schema = task.filled(schema, learner.learned())
        number += 1
    return schema
