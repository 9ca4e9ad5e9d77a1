# SPDX-License-Identifier: Apache-2.0
"""JSON files of HugeCTR: to clauses, and back."""
