# SPDX-License-Identifier: Apache-2.0
"""Impressions that wait for their outcomes, over topics, followed folders and sources that end.

columns.py    columns and places of rows, in memory and as they are saved
events.py     events of a turn, and which of them come twice
inputs.py     one input of a join: pieces of rows, with the place after each
intake.py     rows of a turn as events: their keys and times
join.py       Join, the source
keys.py       keys of events as pairs of 64-bit numbers
kinds.py      which rows are events of which kind, and what of them moves the clock
lanes.py      the watermark of several inputs, and which of their partitions are idle
matches.py    the outcomes that met an impression
open_rows.py  the impressions that are open, the outcomes that are held, and labels
reading.py    one reading of a join: turns, and the samples that they decide
rules.py      when an impression becomes a sample: Wait, AsTheyCome
segment.py    events sorted by key; their columns in memory or on disk
settings.py   Outcome, a kind of outcome; and what a reading asks of a join
spill.py      Spill: how much of the open impressions lies in memory, and where the rest
stalls.py     a warning where a join reads events for a minute and none becomes a sample
states.py     what is open at a position, as it is saved and put back
turns.py      which rows of which input a turn takes, and which partitions are idle
"""
