# SPDX-License-Identifier: Apache-2.0
"""Operations on all rows of a key, after a shuffle by key.

derive.py      derived columns: raw columns whose values depend on other rows of the same key
encodings.py   target encodings of training rows, which their own labels have no part in
fits.py        fits of transforms that need all rows of a key in one place
kept.py        histories and counts that a model would keep
statistics.py  statistics of a number by key: what `TargetEncode` and `JoinGroupby` learn
vocabulary.py  vocabularies: how often each value occurs, most frequent first, out of core
"""
