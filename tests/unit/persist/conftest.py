# SPDX-License-Identifier: Apache-2.0
"""What tests of the container write into it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def members() -> dict[str, Any]:
    """The members of a full that holds nothing."""
    return {
        "package_version": "0",
        "kind": "full",
        "version": 0,
        "parent": None,
        "model": None,
        "schema": None,
        "positions": {},
        "counters": {},
        "dense": None,
        "tables": [],
    }
