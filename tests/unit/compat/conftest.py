# SPDX-License-Identifier: Apache-2.0
"""Makes parameter_pages.py importable by the tests of this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
