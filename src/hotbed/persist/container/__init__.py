# SPDX-License-Identifier: Apache-2.0
"""The container of docs/format.md: files with digests, and a manifest that is written last.

checked_file.py  files that are checked whenever they are read
format.py        fulls and deltas: how they are written, opened and read
manifest.py      MANIFEST.json as a typed value
retention.py     which saved states are kept
row_files.py     files of rows: how they are written and read
row_order.py     rows by partition and id: the rows of a full and its deltas as one
sink.py          files that are hashed while they are written, at the speed of the disk
store.py         where checkpoints lie: a local folder, or any object store that fsspec knows
check/           the one validator of docs/format.md: what a digest does not show
"""
