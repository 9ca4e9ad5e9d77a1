# SPDX-License-Identifier: Apache-2.0
"""Doors for users of other frameworks: their names and calls become values of Hotbed."""
