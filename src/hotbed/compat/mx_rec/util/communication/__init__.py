# SPDX-License-Identifier: Apache-2.0
"""Ranks.

hccl_ops.py  the number of this process, and of all processes
"""
