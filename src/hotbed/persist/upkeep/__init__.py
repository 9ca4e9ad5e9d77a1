# SPDX-License-Identifier: Apache-2.0
"""What is done with saved states: look into them, go back to one, take rows from another job.

inspect.py      questions about checkpoints
kept.py         what is kept of one key: the entries of its histories and counts
rollback.py     going back to an earlier state, and completing the first one after a kill
warm_starts.py  rows of another job into tables of this one
words.py        what the ids of a table stand for
"""
