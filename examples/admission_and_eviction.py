# SPDX-License-Identifier: Apache-2.0
"""Who gets a row and who loses it: MovieLens' films, admitted at their third rating, gone two years
after their last.
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
for chunk in ratings.with_columns(year=pl.from_epoch("timestamp").dt.year()).partition_by(
    "year", maintain_order=True
):
    for batch in chunk.iter_slices(1024):
        # microseconds
        ids, times = batch["movieId"].to_numpy(), batch["timestamp"].to_numpy() * 1_000_000
        slots = table.find_or_insert(ids, times)  # -1 = not (yet) admitted: no row, no gradient
        table.update(slots, np.full((len(slots), 8), 0.01, np.float32))
    end = datetime(chunk["year"][0] + 1, 1, 1, tzinfo=UTC)
    table.evict(int(end.timestamp() * 1e6))
    stats = table.stats
    print(
        f"{chunk['year'][0]}  {stats['rows']:7,}  {stats['admitted']:8,}  {stats['refused']:7,}  "
        f"{stats['evicted']:7,}"
    )

# A film that was forgotten reads as `default`; admitted again, it starts from the very same initial
# row.
films = ratings["movieId"].unique().to_numpy()
gone = films[table.find(films) == -1][:1]
print(f"film {gone[0]} has no row and reads", table.lookup(gone)[0, :3], "...")
for _ in range(3):
    table.find_or_insert(gone, np.array([int(end.timestamp() * 1e6)]))
fresh = hb.Table("movie", dim=8)
print(
    "rated three times again, it reads its initial row:",
    bool((table.lookup(gone) == fresh.lookup(gone)).all()),
)
