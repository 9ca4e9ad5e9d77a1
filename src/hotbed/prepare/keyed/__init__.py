# SPDX-License-Identifier: Apache-2.0
"""Operations on all rows of a key, after a shuffle by key."""
