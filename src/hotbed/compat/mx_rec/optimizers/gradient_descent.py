# SPDX-License-Identifier: Apache-2.0
"""Gradient descent without dynamic expansion."""

from hotbed.compat.mx_rec.optimizers.optimizer import factory
from hotbed.compat.mx_rec.optimizers.rules import gradient_descent

__all__ = ["create_hash_optimizer"]

create_hash_optimizer = factory(gradient_descent, by_address=False)
