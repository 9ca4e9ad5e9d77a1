# SPDX-License-Identifier: Apache-2.0
"""Which rows are written: negatives that are added, parts, and negatives that are left out."""
