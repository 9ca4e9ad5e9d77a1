# SPDX-License-Identifier: Apache-2.0
"""Which ids get a row and which rows are removed, without torch.

A film of MovieLens is admitted at its third rating and evicted two years after its last one.
"""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import polars as pl

import hotbed as hb

ratings = pl.read_csv("data/ml_latest_small/ratings.csv").sort("timestamp")
table = hb.Table(
    "movie", dim=8, rule=hb.Adagrad(lr=0.05), admit=hb.MinCount(3), evict=hb.Ttl(days=730)
)

print("year     rows  admitted  refused  evicted")
ratings = ratings.with_columns(year=pl.from_epoch("timestamp").dt.year())
for ratings_of_year in ratings.partition_by("year", maintain_order=True):
    year = ratings_of_year["year"][0]
    for batch in ratings_of_year.iter_slices(1024):
        ids = batch["movieId"].to_numpy()
        times = batch["timestamp"].to_numpy() * 1_000_000  # in microseconds
        slots = table.find_or_insert(ids, times)  # -1: not admitted yet, no row and no gradient
        table.update(slots, np.full((len(slots), 8), 0.01, np.float32))
    end = datetime(year + 1, 1, 1, tzinfo=UTC)
    table.evict(int(end.timestamp() * 1e6))
    stats = table.stats
    print(
        f"{year}  {stats['rows']:7,}  {stats['admitted']:8,}  {stats['refused']:7,}  "
        f"{stats['evicted']:7,}"
    )

# An evicted film reads as `default`; admitted again, it starts from the same initial row.
films = ratings["movieId"].unique().to_numpy()
evicted = films[table.find(films) == -1][:1]
print(f"film {evicted[0]} has no row and reads", table.lookup(evicted)[0, :3], "...")
for _ in range(3):
    table.find_or_insert(evicted, np.array([int(end.timestamp() * 1e6)]))
initial = hb.Table("movie", dim=8).lookup(evicted)
is_initial = bool((table.lookup(evicted) == initial).all())
print("rated three times again, it reads its initial row:", is_initial)
