# SPDX-License-Identifier: Apache-2.0
"""Ftrl, which is for tables without dynamic expansion."""

from hotbed.compat.mx_rec.optimizers.optimizer import factory
from hotbed.compat.mx_rec.optimizers.rules import ftrl

__all__ = ["create_hash_optimizer"]

create_hash_optimizer = factory(ftrl, by_address=False)
