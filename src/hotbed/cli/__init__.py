# SPDX-License-Identifier: Apache-2.0
"""The command line: commands, and what they print.

__main__.py     `python -m hotbed.cli`: the same as the command `hotbed`
arguments.py    what commands make of their arguments: a job, and values
checkpoints.py  what the commands print of checkpoints
commands.py     the command line: read the arguments, call `hotbed.job.run`, print what it returns
device.py       what `hotbed doctor --device` prints of the checks of a device
disk.py         what `hotbed doctor --disk` measures, and prints
doctor.py       what `hotbed doctor` finds out of machine, install and ranks, and prints
launch.py       run a command on several processes, and say why it failed
logged.py       the commands on request logs: rescore, measure, replay
planning.py     what `hotbed plan` reads from its options, and prints
processes.py    how a process behaves that is one of several, called ranks
show.py         what the commands print of a job: columns, events, results, tables, errors
"""
