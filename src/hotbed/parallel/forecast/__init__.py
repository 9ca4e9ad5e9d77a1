# SPDX-License-Identifier: Apache-2.0
"""What a job will take on several ranks, for `hotbed plan`: formulas, which measure nothing.

tables.py      memory of a table, its room on a disk, and the rows that a step reads from there
messages.py    messages of a step between ranks, and their bytes
ranks.py       memory, bytes, messages and seconds of a job on a number of ranks
"""
