# SPDX-License-Identifier: Apache-2.0
"""Networks from JSON descriptions; docs/graphs.md describes the format."""
