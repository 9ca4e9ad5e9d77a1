# SPDX-License-Identifier: Apache-2.0
"""What tests of the doors share; it makes parameter_pages.py importable by them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def rec_sdk() -> Iterator[None]:
    """End each program of Rec SDK's door, also after an error."""
    from hotbed.compat import mx_rec

    yield
    mx_rec.terminate_config_initializer()
