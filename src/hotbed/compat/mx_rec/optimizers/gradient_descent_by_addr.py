# SPDX-License-Identifier: Apache-2.0
"""Gradient descent for dynamic expansion."""

from hotbed.compat.mx_rec.optimizers.optimizer import factory
from hotbed.compat.mx_rec.optimizers.rules import gradient_descent_by_address

__all__ = ["create_hash_optimizer_by_addr", "create_hash_optimizer_by_address"]

create_hash_optimizer_by_address = factory(gradient_descent_by_address, by_address=True)
create_hash_optimizer_by_addr = create_hash_optimizer_by_address
