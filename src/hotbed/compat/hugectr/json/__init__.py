# SPDX-License-Identifier: Apache-2.0
"""JSON files of HugeCTR: to clauses, and back.

keys.py       reads the keys of a clause
layers.py     the `layers` clause
solver.py     the `solver` clause
optimizer.py  the `optimizer` clause
inference.py  the `inference` clause, and ps.json
graph.py      writes the graph of a model
adapt.py      adapts a training file to prepared data
"""
