# SPDX-License-Identifier: Apache-2.0
"""Pages of reports: one HTML file with charts and tables, without a network or a library."""
