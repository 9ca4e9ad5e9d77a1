# SPDX-License-Identifier: Apache-2.0
"""Which version answers which request: a rule that one file holds.

rule.py      the rule as a value, and the file that holds it
split.py     which requests a canary answers
editing.py   change the file, and compare replicas
leases.py    keep the versions where they are published
changing.py  watch the file, and put its rule in force in all processes
"""
