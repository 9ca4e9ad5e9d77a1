# SPDX-License-Identifier: Apache-2.0
"""A first job for a data file, drafted by looking at its columns: what `hotbed init` does.

draft.py        draft a first job for a data file by looking at its columns
init.py         write drafts to files: the work of `hotbed init`
line.py         a line of a drafted job, and the reason for it
moments.py      find the time of events among columns, and repeats of it
preparation.py  draft a first preparation for a data file
proposal.py     columns that the model may keep itself: histories and counts
roles.py        guess the roles of columns
sniff.py        look at delimited text as pandas, spreadsheets and databases write it
"""
