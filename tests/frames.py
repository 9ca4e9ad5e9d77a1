# SPDX-License-Identifier: Apache-2.0
"""A tier for tests: the rows of a table lie in frames of the native core that are not their slots.

Its name begins with an underscore, so that jobs do not know it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotbed.embedding.tier import Tier


@dataclass(frozen=True)
class _Scattered(Tier):
    pass


SCATTERED = _Scattered()
