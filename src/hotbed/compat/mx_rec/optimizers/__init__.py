# SPDX-License-Identifier: Apache-2.0
"""Sparse optimizers, one factory a module: step 2.

optimizer.py                 HashOptimizer, and the function that makes the factories
rules.py                     arguments, rules and ranges of the factories
adagrad.py                   Adagrad
adagrad_by_addr.py           Adagrad for dynamic expansion
ftrl.py                      Ftrl
gradient_descent.py          gradient descent
gradient_descent_by_addr.py  gradient descent for dynamic expansion
lazy_adam.py                 lazy Adam
lazy_adam_by_addr.py         lazy Adam for dynamic expansion
"""

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
