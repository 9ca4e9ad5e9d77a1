# SPDX-License-Identifier: Apache-2.0
"""One training step of an embedding collection: lookup, backward, update, through the public torch
faces, raw 64-bit ids.

Prints one JSON line with the keys of the peers' scripts. `--prefill` inserts every id first;
`--fresh` takes a new batch every step, from an empty table, and counts every step; `--forward`
times lookups in eval mode only, all ids inserted first.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import workload

import hotbed as hb

WARM_UP = 16


def rule_of(name: str) -> object:
    rules = {
        "sgd": hb.Sgd,
        "momentum": hb.Momentum,
        "adagrad": hb.Adagrad,
        "rowwise_adagrad": hb.RowwiseAdagrad,
        "rms_prop": hb.RmsProp,
        "adam": hb.Adam,
        "ftrl": hb.Ftrl,
    }
    return rules[name](lr=0.01)


def prefill(tables: list[hb.Table], num_ids: int) -> None:
    for number, table in enumerate(tables):
        for start in range(0, num_ids, 1 << 17):
            table.find_or_insert(
                workload.raw(np.arange(start, min(start + (1 << 17), num_ids))[None], number)[0]
            )


def main() -> None:
    p = workload.arguments(__doc__ or "")
    p.add_argument("--rule", default="rowwise_adagrad")
    p.add_argument("--prefill", action="store_true")
    p.add_argument("--fresh", action="store_true")
    p.add_argument("--forward", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    hb.set_num_threads(a.threads)
    names = [f"t{k}" for k in range(a.tables)]
    schema = hb.Schema([hb.Id(name) for name in names])
    tables = hb.make_tables(schema, dim=a.dim, rule=rule_of(a.rule), init=hb.Uniform(0.05))
    collection = hb.EmbeddingCollection(schema, tables)
    optimizer = hb.SparseOptimizer(collection)
    if a.prefill or a.forward:
        prefill([tables[name] for name in names], a.ids)
    collection.train(not a.forward)
    warm_up = 0 if a.fresh else WARM_UP
    drawn = (workload.raw(dense) for dense in workload.draw(a, a.steps if a.fresh else 16))
    batches = [
        hb.Batch(ids={n: hb.Ids(ids) for n, ids in zip(names, batch, strict=True)})
        for batch in drawn
    ]
    grad = torch.randn(a.batch, a.tables * a.dim)
    step_s, forward_s = [], []
    for i in range(a.steps + warm_up):
        batch = batches[i % len(batches)]
        start = time.perf_counter()
        out = collection.flat(batch)
        looked_up = time.perf_counter()
        if not a.forward:
            out.backward(grad)
            optimizer.step()
            optimizer.zero_grad()
        if i >= warm_up:
            step_s.append(time.perf_counter() - start)
            forward_s.append(looked_up - start)
    peer = f"hotbed_{a.rule}" + ("_prefill" if a.prefill else "") + ("_fresh" if a.fresh else "")
    peer += "_forward" if a.forward else ""
    rows = sum(len(table) for table in tables.values())
    workload.report(
        peer, step_s, a, forward_ms=round(float(np.median(forward_s)) * 1e3, 3), rows=rows
    )


if __name__ == "__main__":
    main()
