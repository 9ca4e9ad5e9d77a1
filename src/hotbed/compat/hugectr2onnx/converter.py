# SPDX-License-Identifier: Apache-2.0
"""`hugectr2onnx.converter`, and its command line: see `hotbed.compat.hugectr.converter`."""

import sys

from hotbed.compat.hugectr.converter import convert, main

__all__ = ["convert"]

if __name__ == "__main__":
    sys.exit(main())
