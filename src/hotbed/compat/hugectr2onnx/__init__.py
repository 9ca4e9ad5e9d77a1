# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's converter: `import hotbed.compat.hugectr2onnx as hugectr2onnx`.

`hugectr2onnx.converter.convert(…)` makes one ONNX file of a graph and its weight files.

converter.py  convert, and its command line, under the names of HugeCTR
"""

from hotbed.compat.hugectr2onnx import converter

__all__ = ["converter"]
