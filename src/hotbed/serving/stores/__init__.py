# SPDX-License-Identifier: Apache-2.0
"""Stores of versions of models and their rows: mapped files, or a server elsewhere."""
