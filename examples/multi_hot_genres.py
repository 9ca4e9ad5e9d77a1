# SPDX-License-Identifier: Apache-2.0
"""Columns that hold lists: `Adventure|Children|Fantasy` becomes three ids, pooled into one vector.

The model is linear, on genres alone: its weights show which genres people like.
"""

from __future__ import annotations

import torch

import hotbed as hb

ratings = hb.sources.Csv("data/ml_latest_small/ratings.csv")
events = ratings.join(hb.sources.Csv("data/ml_latest_small/movies.csv"), on="movieId").sort(
    "timestamp"
)
schema = hb.Schema(
    [
        hb.Label("liked", column="rating", threshold=4),
        hb.Id("genres", transforms=[hb.transforms.Split("|")], pooling="mean"),
    ]
)

torch.manual_seed(0)
network = hb.models.LR(schema, hb.make_tables(schema, dim=1, rule=hb.Adagrad(lr=0.1)))
model = hb.RecModel(network, "bce", hb.Adam(lr=0.01), metrics=["auc"])
model.fit(hb.Dataset(events, schema, batch_size=1024), epochs=1)

# A film of each genre, and a film of three genres, encoded as the training data were.
genres = ["Film-Noir", "War", "Documentary", "Drama", "Comedy", "Horror", "Film-Noir|War|Horror"]
films = hb.sources.Memory({"genres": genres}).table.to_batches()[0]
batch = hb.Encoder(schema)(films, labels=False)
print("ids of each film:", batch.ids["genres"].lengths().tolist())
for genre, score in sorted(
    zip(genres, model.predict(batch), strict=True), key=lambda pair: -pair[1]
):
    print(f"{score:.3f}  {genre}")
