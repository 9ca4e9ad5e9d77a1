# SPDX-License-Identifier: Apache-2.0
"""The output folder of a preparation: its columns, its files, and the tasks that write them.

files.py   the files of an output: Parquet parts, dead letters, metadata and the workflow
layout.py  Layout: encoded rows as the columns of prepared files
write.py   the task that encodes and writes the rows of a partition
"""
