# SPDX-License-Identifier: Apache-2.0
"""Which rows are written: negatives that are added, parts, and negatives that are left out.

catalogue.py    the items that negatives are drawn from
down_sample.py  down-sampling
draw.py         draw items that a row may have as negatives, each as likely as its weight
exposure.py     which items a row may have as negatives, by what its user has seen until then
negatives.py    Negatives of implicit feedback: rows of items that a user did not choose
order.py        the order of a user's rows, and of an item's, by their times
split.py        splits: which rows train, and which are only for validation
"""
