# SPDX-License-Identifier: Apache-2.0
"""The file formats of HugeCTR.

norm.py         samples of varying length with a header and, usually, checksums
norm_format.py  the bytes of a Norm file
raw.py          samples of one length, without a header
file_list.py    a count, then one path a line; NVTabular writes these, too
"""
