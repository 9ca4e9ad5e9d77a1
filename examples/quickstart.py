# SPDX-License-Identifier: Apache-2.0
"""Quick start: train, save and load a model of a CSV file; `quickstart.yaml` is the same job."""

from __future__ import annotations

import torch

import hotbed as hb

# 1. Data: a source of rows, cut by time, and a schema that says what each column is for.
events = hb.sources.Csv("data/ml_latest_small/ratings.csv").sort("timestamp")
schema = hb.Schema(
    [
        hb.Label("liked", column="rating", threshold=4),
        hb.Time("timestamp", unit="s"),
        hb.Id("user", column="userId"),
        hb.Id("movie", column="movieId"),
    ]
)
train = hb.Dataset(events.slice(0.0, 0.8), schema, batch_size=256)
valid = hb.Dataset(events.slice(0.8, 1.0), schema, batch_size=256)

# 2. Tables that grow with the ids they meet, and a network over them.
torch.manual_seed(0)
tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.02))
network = hb.models.DeepFM(schema, tables, hidden=[64, 32])
model = hb.RecModel(network, loss_fn="bce", optimizer=hb.Adam(lr=1e-3), metrics=["auc", "log_loss"])

# 3. Train, save, load, use.
model.fit(train, valid, epochs=1)
model.save("runs/quickstart")
again = hb.load("runs/quickstart")
print({name: round(value, 4) for name, value in again.evaluate(valid).items()})
print("users and movies known:", {name: len(table) for name, table in again.tables.items()})
print("first scores:", again.predict(valid)[:5].round(3))
