# SPDX-License-Identifier: Apache-2.0
"""Names of collections, modes and strategies.

constants.py  the names that programs import
"""
