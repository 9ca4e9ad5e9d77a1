# SPDX-License-Identifier: Apache-2.0
"""Whether servers give a candidate the same scores beside any others."""

from __future__ import annotations

from typing import Any

import numpy as np

import hotbed as hb


def check_any_batch(session: hb.InferenceSession, columns: dict[str, Any]) -> None:
    """Assert that the scores of candidates have the same bits alone, with others, and all at once.

    Args:
        session: of a model.
        columns: raw columns of some candidates.
    """
    together = session.ask(columns).outputs
    num_rows = len(next(iter(columns.values())))
    for size in (1, 2, 3, num_rows - 1):
        for start in range(num_rows - size + 1):
            rows = slice(start, start + size)
            part = session.ask({name: values[rows] for name, values in columns.items()}).outputs
            for label, scores in together.items():
                np.testing.assert_array_equal(part[label], scores[rows])
