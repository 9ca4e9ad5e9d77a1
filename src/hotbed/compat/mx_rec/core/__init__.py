# SPDX-License-Identifier: Apache-2.0
"""Names by which Rec SDK describes features, tables and lookups."""
