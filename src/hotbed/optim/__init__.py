# SPDX-License-Identifier: Apache-2.0
"""Optimizers of dense parameters and of rows, learning-rate schedules, mixed precision.

average.py      moving averages of dense parameters, which a network has between its steps
closure.py      the closure of `Optimizer.step`, which torch's optimizers take, too
combined.py     CombinedOptimizer: one torch optimizer over dense parameters and rows of tables
dense.py        the optimizer of the dense parameters
ftrl.py         FTRL-Proximal for dense parameters, which torch does not have
held.py         optimizers and schedules that a network which updates itself holds
modes.py        set train and eval modes of networks for a while
momentum.py     momentum that contains the learning rate, for dense parameters; torch's does not
precision.py    mixed precision and compilation
schedule.py     learning-rate schedules as values: a factor on each group's own learning rate
sparse.py       SparseOptimizer: applies the rule of each table to its rows that have gradients
torch_rules.py  torch optimizers as rules of tables, and their state as rows
unchanged.py    log what a training leaves as it is although it could be learned
"""
