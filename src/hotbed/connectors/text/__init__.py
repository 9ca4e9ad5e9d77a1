# SPDX-License-Identifier: Apache-2.0
"""Files of text.

delimited.py  Csv, and what all delimited text shares
rows.py       rows of delimited text as streams: where they end, and bad ones
libsvm.py     one sample a line, as `label index:value`
jsonl.py      one JSON object a line
lines.py      one record a line, and messages, which have no line ends
values.py     values that are written as text: their types, and what they mean
"""
