# SPDX-License-Identifier: Apache-2.0
"""Adagrad without dynamic expansion."""

from hotbed.compat.mx_rec.optimizers.optimizer import factory
from hotbed.compat.mx_rec.optimizers.rules import adagrad

__all__ = ["create_hash_optimizer"]

create_hash_optimizer = factory(adagrad, by_address=False)
