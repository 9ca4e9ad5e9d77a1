# SPDX-License-Identifier: Apache-2.0
"""The command line: commands, and what they print.

__main__.py   `python -m hotbed.cli`: the same as the command `hotbed`
commands.py   the command line: read the arguments, call `hotbed.job.run`, print what it returns
disk.py       how fast the disk of a folder is, for `hotbed doctor --disk`
doctor.py     the parts of this machine and this install, and their state, for `hotbed doctor`
plan.py       what `hotbed plan` reads from its options, and prints
processes.py  a command on several processes: how it starts them, and how each behaves
show.py       what the commands print: columns, events, results, tables, checkpoints, the machine
"""
