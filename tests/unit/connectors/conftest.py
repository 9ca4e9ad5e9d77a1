# SPDX-License-Identifier: Apache-2.0
"""Lets the tests of this folder import `kafka_streams`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
