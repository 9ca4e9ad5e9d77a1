# SPDX-License-Identifier: Apache-2.0
"""What a state holds, how it is captured and saved, and how it is loaded.

chain.py       fulls and the deltas on them
checkpoint.py  what is in a checkpoint, and how it is captured and written
digest.py      the content digest: what a state holds, whatever files it lies in
network.py     the dense part of a state
open_rows.py   what a join of streams holds open, in a checkpoint
restoring.py   a checkpoint into network, tables and optimizers
resume.py      whether a state fits what would resume from it
saver.py       Saver: captures are written on another thread
spread.py      tables that hold rows before several processes share them
tables.py      tables into and out of a checkpoint
"""
