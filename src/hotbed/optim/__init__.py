# SPDX-License-Identifier: Apache-2.0
"""Optimizers of dense parameters and of rows, learning-rate schedules, mixed precision."""
