# SPDX-License-Identifier: Apache-2.0
"""The eight steps of Rec SDK on MovieLens: dynamic expansion, admission and eviction together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from hotbed.compat import mx_rec as mx

DIM = 16
YEAR = 365 * 24 * 3600


class Ranker:
    """What steps 3, 5 and 6 describe: features, tables, and the network over their rows."""

    def __init__(self) -> None:
        thresholds = {"access_threshold": 2, "eviction_threshold": 5 * YEAR}
        self.clock = mx.FeatureSpec("timestamp", index_key="timestamp", is_timestamp=True)
        self.features = [mx.FeatureSpec(name, **thresholds) for name in ("user", "movie")]
        self.tables = [
            mx.create_table(
                key_dtype=torch.int64,
                dim=DIM,
                name=feature.name,
                emb_initializer=hb.Normal(std=0.01),
                device_vocabulary_size=10_000,
            )
            for feature in self.features
        ]
        self.network = nn.Sequential(
            nn.Linear(DIM * len(self.tables), 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def data(self, events: hb.Source, *, is_training: bool) -> hb.Dataset:
        """Return batches whose ids are mapped to rows ahead of the model: step 4."""
        schema = hb.Schema(
            [
                hb.Label("like", column="rating", threshold=4),
                hb.Id("user", column="userId"),
                hb.Id("movie", column="movieId"),
                hb.Time("timestamp", unit="s"),
            ]
        )
        insert = mx.get_asc_insert_func(
            tgt_key_specs=[self.clock, *self.features], is_training=is_training
        )
        return hb.Dataset(events, schema, batch_size=256).map(insert)

    def forward(self, batch: hb.Batch, *, is_train: bool) -> Tensor:
        rows = [
            mx.sparse_lookup(table, feature, is_train=is_train, batch=batch)
            for table, feature in zip(self.tables, self.features, strict=True)
        ]
        return self.network(torch.cat(rows, dim=-1)).squeeze(-1)


def main() -> None:
    torch.manual_seed(0)
    events = hb.sources.Csv("data/ml_latest_small/ratings.csv").sort("timestamp")

    mx.init(use_dynamic=True, use_dynamic_expansion=True)
    sparse_optimizer = mx.optimizers.adagrad_by_addr.create_hash_optimizer_by_address(
        0.1, initial_accumulator_value=0.01
    )
    ranker = Ranker()
    train = ranker.data(events.slice(0.0, 0.8), is_training=True)
    test = ranker.data(events.slice(0.8, 1.0), is_training=False)
    dense, _ = mx.get_dense_and_sparse_variable(ranker.network)
    dense_optimizer = torch.optim.Adam(dense, lr=1e-3)
    hook = mx.EvictHook(evict_enable=True, evict_step_interval=50)
    mx.start_asc_pipeline()

    for step, batch in enumerate(train, start=1):
        logits = ranker.forward(batch, is_train=True)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels["like"])
        rows = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        addresses = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        grads = torch.autograd.grad(loss, [*rows, *dense])
        sparse_optimizer.apply_gradients(list(zip(grads[: len(rows)], addresses, strict=True)))
        for parameter, grad in zip(dense, grads[len(rows) :], strict=True):
            parameter.grad = grad
        dense_optimizer.step()
        hook.after_run(global_step=step)
        if step % 100 == 0:
            sizes = {table.name: table.size() for table in ranker.tables}
            print(f"step {step}: loss {loss.item():.4f}, rows {sizes}")

    auc = hb.metrics.AUC()
    with torch.no_grad():
        for batch in test:
            scores = torch.sigmoid(ranker.forward(batch, is_train=False))
            auc.update(scores, batch.labels["like"])
    print(f"AUC {auc.eval():.4f}")
    mx.terminate_config_initializer()


if __name__ == "__main__":
    main()
