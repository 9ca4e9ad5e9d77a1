# SPDX-License-Identifier: Apache-2.0
"""Job: everything a training run is, as one value, as a file, and as a draft of one.

check.py              whether a job can run here: questions and answers
dialect.py            dialects: training files of other systems
drafting/             a first job for a data file, drafted by looking at its columns
events.py             what a command reports while it works
file.py               job files: YAML and JSON as people mean them
job.py                Job: a training run as one value
json_schema.py        the JSON Schema of job files, for completion and checks in editors
planning.py           the plan of a job on several processes: predictions and notes
plan_page.py          the picture of a plan
ranks.py              a job on several processes: which can run there, and what the first does
run.py                the work of the commands, one function each
sampled_tables.py     the tables of a job as its plan sees them, from ids that were read
states.py             the states of a job, and their exports
tables.py             Tables: the keys under `tables` of a job
workload.py           the workload of a job, for its plan: sample its ids, and measure its steps
"""
