# SPDX-License-Identifier: Apache-2.0
"""Sparse optimizers, one factory a module: step 2."""

from hotbed.compat.mx_rec.optimizers import (
    adagrad,
    adagrad_by_addr,
    ftrl,
    gradient_descent,
    gradient_descent_by_addr,
    lazy_adam,
    lazy_adam_by_addr,
)

__all__ = [
    "adagrad",
    "adagrad_by_addr",
    "ftrl",
    "gradient_descent",
    "gradient_descent_by_addr",
    "lazy_adam",
    "lazy_adam_by_addr",
]
