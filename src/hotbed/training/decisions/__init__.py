# SPDX-License-Identifier: Apache-2.0
"""What is decided between steps, and written to the journal so that a resume repeats it.

eviction_schedule.py  when stale rows leave the tables
checkpoint.py         when a state is saved, and where its decisions are recorded
"""
