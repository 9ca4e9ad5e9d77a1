# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the format, and what is in one."""
