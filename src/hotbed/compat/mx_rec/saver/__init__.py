# SPDX-License-Identifier: Apache-2.0
"""Saving and loading.

saver.py       Saver: checkpoints by path and global step
program.py     Program: what a checkpoint contains
settings.py    what decides a program beside them, for a resume
hook.py        CheckpointSaverHook: saves at intervals
sparse.py      export: rows as NumPy files
warm_start.py  warm_start: rows and parameters of other programs
"""
