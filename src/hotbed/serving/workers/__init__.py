# SPDX-License-Identifier: Apache-2.0
"""A server of several processes: a parent that loads models, and workers that answer."""
