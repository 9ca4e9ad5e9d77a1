# SPDX-License-Identifier: Apache-2.0
"""Sparse optimizers, one factory a module: step 2."""

from hotbed.compat.mx_rec.optimizers import adagrad_by_addr, lazy_adam

__all__ = ["adagrad_by_addr", "lazy_adam"]
