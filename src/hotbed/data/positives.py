# SPDX-License-Identifier: Apache-2.0
"""Labels with `positive`: whether a row matched, and which other texts there are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data.schema import Label

NAMED_VALUES = 10
"""Values of a label that a message names."""


@dataclass
class Positives:
    """Counters of a label with `positive`.

    `rows`: encoded rows. `matched`: whether one of them matched. `others`: some of the other texts,
    while none matched. `warned`: whether the missing match was reported.
    """

    label: Label
    rows: int = 0
    matched: bool = False
    warned: bool = False
    others: dict[str, None] = field(default_factory=dict)

    def add(self, encoded: np.ndarray, values: pa.Array) -> None:
        """Add a chunk: its encoded label and the raw column of the label."""
        self.rows += len(encoded)
        self.matched = self.matched or bool(encoded.any())
        if not self.matched and len(self.others) < NAMED_VALUES:
            texts = pc.unique(values.cast(pa.string())).to_pylist()
            self.others.update(dict.fromkeys(texts))

    def message(self) -> str:
        """Return the message that no row matched, with some of the other texts."""
        named = list(self.others)[:NAMED_VALUES]
        names = ", ".join(repr(text) for text in named)
        return (
            f"label {self.label.name!r}: none of {self.rows:,} rows is "
            f"positive={self.label.positive!r}, got {names}. Give one of them."
        )
