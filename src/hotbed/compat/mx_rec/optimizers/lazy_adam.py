# SPDX-License-Identifier: Apache-2.0
"""Lazy Adam without dynamic expansion."""

from hotbed.compat.mx_rec.optimizers.optimizer import factory
from hotbed.compat.mx_rec.optimizers.rules import lazy_adam

__all__ = ["create_hash_optimizer"]

create_hash_optimizer = factory(lazy_adam, by_address=False)
