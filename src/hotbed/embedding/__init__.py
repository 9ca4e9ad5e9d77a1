# SPDX-License-Identifier: Apache-2.0
"""Ids -> slots -> rows: tables that grow, the rules that update rows, and torch modules over them.

    table.py         Table: one table, on the native core
    snapshot.py      a table at one moment, to be read while training continues
    dates.py         whether batches have times, and times of rows without any
    waiting.py       counts of ids that wait for admission, as batches
    tables.py        make_tables: the tables that a schema names
    rule.py          how a step changes a row
    policy.py        which ids get a row, and which rows are removed
    tier.py          where rows lie
    init.py          how a row starts
    hashing.py       the hashes of ids and of names
    device/          between rows on the host and a network on another device
    lookups/         who performs the lookup of a batch: map, pool, sum gradients, update
    modules/         tables as torch modules

Only `device`, `lookups` and `modules` import torch: a server has tables without it.

    changed_rows.py  ChangeReader: what changed in a table since the last read
    footprint.py     the memory and the disk that rows on `Ssd` take
    histories.py     HistoryStore: the rows of the columns that a model keeps
    native.py        the configuration of a table as the native core takes it, and its threads
"""
