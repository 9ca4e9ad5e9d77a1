# SPDX-License-Identifier: Apache-2.0
"""The loop that drives everything else: RecModel, callbacks, metrics, the report."""
