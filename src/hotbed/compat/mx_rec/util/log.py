# SPDX-License-Identifier: Apache-2.0
"""The logger of the front door."""

import logging

__all__ = ["logger"]

logger = logging.getLogger("hotbed.compat.mx_rec")
