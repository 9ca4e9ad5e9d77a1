# SPDX-License-Identifier: Apache-2.0
"""FuxiCTR: its experiments become jobs, by `hotbed init --from model_config.yaml#EXPERIMENT`.

experiment.py  the settings of an experiment, of its files
job.py         a job of them, and what differs
"""
