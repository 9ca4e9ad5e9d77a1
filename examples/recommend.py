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
    """Of the users whom the model knows: the one with most events in both training (72 %) and
    stream (the last 20 %).
    """
    first, last = ratings.head(int(0.72 * len(ratings))), ratings.tail(int(0.2 * len(ratings)))
    both = (
        first.group_by("userId")
        .len("past")
        .join(last.group_by("userId").len("recent"), on="userId")
    )
    both = both.filter(pl.Series(users.find(both["userId"].to_numpy()) >= 0))
    return int(both.sort(pl.min_horizontal("past", "recent"), "userId")["userId"][-1])


def main(folder: str, user: int | None = None) -> None:
    model = hb.load(folder)
    films = pl.read_csv(DATA / "movies.csv")
    ratings = pl.read_csv(DATA / "ratings.csv").sort("timestamp")
    user = somebody(ratings, model.tables["user"]) if user is None else user
    history = ratings.filter(userId=user)

    unseen = films.join(history, on="movieId", how="anti").with_columns(
        userId=pl.lit(user, pl.Int64), timestamp=pl.lit(history["timestamp"].max())
    )
    encode = hb.Encoder(model.schema)  # the very code that encoded the training data
    (rows,) = unseen.to_arrow().combine_chunks().to_batches()
    scores = model.predict(encode(rows, labels=False))
    best = unseen.with_columns(score=pl.Series(scores)).sort("score", descending=True).head(10)

    liked = (
        history.filter(pl.col("rating") >= 4).tail(3).join(films, on="movieId")["title"].to_list()
    )
    print(f"user {user} has rated {len(history):,} films; liked last: {'; '.join(liked)}")
    print(f"the ten best of {len(unseen):,} unseen films:")
    for place, (title, score, genres) in enumerate(
        best.select("title", "score", "genres").iter_rows(), 1
    ):
        print(f"{place:3}. {score:.3f}  {title}  [{genres.replace('|', ', ')}]")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3])) if sys.argv[1:] else sys.exit(__doc__)
