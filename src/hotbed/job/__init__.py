# SPDX-License-Identifier: Apache-2.0
"""Job: everything a training run is, as one value, as a file, and as a draft of one.

check.py              whether a job can run here: questions and answers
dialect.py            dialects: training files of other systems
draft.py              draft a first job for a data file by looking at its columns
draft_preparation.py  draft a first preparation for a data file
events.py             what a command reports while it works
file.py               job files: YAML and JSON as people mean them
job.py                Job: a training run as one value
json_schema.py        the JSON Schema of job files, for completion and checks in editors
line.py               a line of a drafted job, and the reason for it
moments.py            find the time of events among columns, and repeats of it
planning.py           the plan of a job on several processes: predictions and notes
plan_page.py          the picture of a plan
ranks.py              a job on several processes: which can run there, and what the first does
roles.py              guess the roles of columns
run.py                the work of the commands, one function each
sampled_tables.py     the tables of a job as its plan sees them, from ids that were read
sniff.py              look at delimited text as pandas, spreadsheets and databases write it
states.py             the states of a job, and their exports
tables.py             Tables: the keys under `tables` of a job
workload.py           the workload of a job, for its plan: sample its ids, and measure its steps
"""
