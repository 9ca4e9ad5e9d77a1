# SPDX-License-Identifier: Apache-2.0
"""Load a trained model in a new process and rank the films that a user has not seen.

hotbed train examples/movielens.yaml
python examples/recommend.py runs/movielens [USER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

import hotbed as hb

DATA = Path("data/ml_latest_small")


def somebody(ratings: pl.DataFrame, users: hb.Table) -> int:
    """Return a user with a row, and with many events in both the training and the stream."""
    past = ratings.head(int(0.72 * len(ratings))).group_by("userId").len("past")
    recent = ratings.tail(int(0.2 * len(ratings))).group_by("userId").len("recent")
    both = past.join(recent, on="userId")
    has_row = users.find(both["userId"].to_numpy()) >= 0
    both = both.filter(pl.Series(has_row))
    return int(both.sort(pl.min_horizontal("past", "recent"), "userId")["userId"][-1])


def main(folder: str, user: int | None = None) -> None:
    model = hb.load(folder)
    films = pl.read_csv(DATA / "movies.csv")
    ratings = pl.read_csv(DATA / "ratings.csv").sort("timestamp")
    if user is None:
        user = somebody(ratings, model.tables["user"])
    history = ratings.filter(userId=user)

    unseen = films.join(history, on="movieId", how="anti").with_columns(
        userId=pl.lit(user, pl.Int64), timestamp=pl.lit(history["timestamp"].max())
    )
    encode = hb.Encoder(model.schema)  # the code that encoded the training data
    (rows,) = unseen.to_arrow().combine_chunks().to_batches()
    scores = model.predict(encode(rows, labels=False))
    best = unseen.with_columns(score=pl.Series(scores)).sort("score", descending=True).head(10)

    last_liked = history.filter(pl.col("rating") >= 4).tail(3)
    liked = last_liked.join(films, on="movieId")["title"].to_list()
    print(f"user {user} has rated {len(history):,} films; liked last: {'; '.join(liked)}")
    print(f"the ten best of {len(unseen):,} unseen films:")
    for place, film in enumerate(best.iter_rows(named=True), 1):
        genres = film["genres"].replace("|", ", ")
        print(f"{place:3}. {film['score']:.3f}  {film['title']}  [{genres}]")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
