# SPDX-License-Identifier: Apache-2.0
"""Automatic graph modification."""
