# SPDX-License-Identifier: Apache-2.0
"""Your own module in your own PyTorch loop: two optimizers, a scheduler, gradient clipping."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hotbed as hb


class Ranker(nn.Module):
    def __init__(self, schema: hb.Schema, tables: dict[str, hb.Table]) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(schema, tables)
        self.mlp = nn.Sequential(
            nn.Linear(self.embeddings.output_dim, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, batch: hb.Batch) -> Tensor:
        return self.mlp(self.embeddings.flat(batch)).squeeze(-1)


def main() -> None:
    torch.manual_seed(0)
    events = hb.sources.Csv("data/ml_latest_small/ratings.csv").sort("timestamp")
    columns = [hb.Label("liked", column="rating", threshold=4), hb.Id("userId"), hb.Id("movieId")]
    schema = hb.Schema(columns)
    model = Ranker(schema, hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.05)))

    dense = torch.optim.Adam(hb.dense_parameters(model), lr=1e-3)
    sparse = hb.SparseOptimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(sparse, step_size=100, gamma=0.8)

    model.train()
    for step, arrays in enumerate(hb.Dataset(events.slice(0.0, 0.8), schema, batch_size=256)):
        batch = arrays.map_arrays(torch.from_numpy)
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels["liked"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        dense.step()
        sparse.step()
        dense.zero_grad()
        sparse.zero_grad()
        schedule.step()
        if step % 100 == 0:
            print(
                f"step {step}: loss {loss.item():.4f}, learning rate of the rows "
                f"{schedule.get_last_lr()[0]:.4f}"
            )

    model.eval()
    auc = hb.metrics.AUC()
    with torch.no_grad():
        for arrays in hb.Dataset(events.slice(0.8, 1.0), schema, batch_size=256):
            batch = arrays.map_arrays(torch.from_numpy)
            auc.update(torch.sigmoid(model(batch)), batch.labels["liked"])
    print(f"AUC {auc.eval():.4f}")


if __name__ == "__main__":
    main()
