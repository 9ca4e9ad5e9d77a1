# SPDX-License-Identifier: Apache-2.0
"""A server of several processes: a parent that loads models, and workers that answer.

metrics.py  the metrics of all processes of a server, as one text for Prometheus
pool.py     the parent of several processes that answer at the same ports
wire.py     call functions of another process of the same server
worker.py   a worker: a process that answers, and maps the rows that its parent writes
"""
