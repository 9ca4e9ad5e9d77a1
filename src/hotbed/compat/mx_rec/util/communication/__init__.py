# SPDX-License-Identifier: Apache-2.0
"""Ranks.

hccl_ops: the number of this process, and of all processes.
"""
