# SPDX-License-Identifier: Apache-2.0
"""The one validator of docs/format.md: what a digest does not show.

A digest shows that a file is as its writer sealed it, not that the writer told the truth. Loading,
verifying, following and serving all read through these checks, so that they refuse the same files.

    manifest.py  checks of a manifest: its members, and whether they contradict each other
    rows.py      checks of row files
"""
