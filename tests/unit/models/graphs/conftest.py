# SPDX-License-Identifier: Apache-2.0
"""The tests here share `planted`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
