# SPDX-License-Identifier: Apache-2.0
"""NewIds: how a model ranks samples with ids that training has seen, and with new ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from hotbed.metrics import AUC, bounded
from hotbed.metrics.metric import Metric


class NewIds:
    """Compares samples whose ids of a column are known with those that have a new one."""

    def __init__(self) -> None:
        self._rows = 0
        self._new: dict[str, int] = {}
        self._aucs: dict[str, tuple[Metric, Metric]] = {}

    def update(self, scores: Any, labels: Any, weights: Any, new: Mapping[str, Any]) -> None:
        """Add n samples; `new`: for each column, which samples have a new id, bool [n]."""
        self._rows += len(labels)
        for name, is_new in new.items():
            self._new[name] = self._new.get(name, 0) + int(is_new.sum())
            if name not in self._aucs:
                self._aucs[name] = (bounded(AUC()), bounded(AUC()))
            for auc, rows in zip(self._aucs[name], (~is_new, is_new), strict=True):
                weight = None if weights is None else weights[rows]
                auc.update(scores[rows], labels[rows], weight=weight)

    def results(self) -> dict[str, dict[str, float]]:
        """Return for each column with new ids the share of their rows, and the AUC of both."""
        results: dict[str, dict[str, float]] = {}
        for name, number in self._new.items():
            if number:
                results[name] = {"new": number / self._rows}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # of one class alone
                    for part, auc in zip(("known", "new"), self._aucs[name], strict=True):
                        results[name][f"auc_{part}"] = float(np.asarray(auc.eval()))
        return results
