# SPDX-License-Identifier: Apache-2.0
"""DCNv2 on Frappe_x1r with the settings that BARS publishes, end to end; one JSON line an epoch, as
the FuxiCTR peer prints.

Rows in `--data`: train.csv and valid.csv with the columns label and the ten fields. Reading and
encoding are part of the first epoch; later epochs take the encoded rows from memory, as the peer
does from the start. Before that, one line for the same dense network alone in torch on fixed inputs
(no reading, no embeddings): what the rest is measured against.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import torch
from frappe import datasets
from torch import Tensor, nn

import hotbed as hb

BATCH = 4096


class Fixed(nn.Module):
    """Stands where the embeddings were: the same matrix for every batch, with a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.flat = torch.randn(BATCH, width, requires_grad=True)

    def forward(self, batch: object) -> Tensor:
        self.flat.grad = None
        return self.flat


def make_network(schema: hb.Schema, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # L2 over the whole table at every step is what BARS' figures stand on: scope="catch_up" gives
    # its bits lazily.
    rule = hb.Adam(lr=1e-3, l2=0.05, scope="catch_up")
    tables = hb.make_tables(schema, dim=10, rule=rule, init=hb.Normal(1e-4), seed=seed)
    return hb.models.DCNv2(
        schema, tables, num_cross_layers=4, hidden=(400, 400, 400), dropout=0.4, batch_norm=True
    )


def dense_alone(schema: hb.Schema, seed: int, steps: int) -> float:
    """Samples/s of forward, loss, backward, clipping and Adam of the dense network alone, in plain
    torch.
    """
    network = make_network(schema, seed)
    network.inputs = Fixed(network.inputs.output_dim)
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.numel()], lr=1e-3)
    label = torch.randint(0, 2, (BATCH,)).float()
    for step in range(steps + 3):
        if step == 3:
            start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(network(None), label).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimizer.step()
    return steps * BATCH / (time.perf_counter() - start)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--seed", type=int, default=2019)
    p.add_argument("--amp", default="O0", help="O0 = float32, O2 or O3 = bfloat16")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument(
        "--dense-steps", type=int, default=50, help="0 leaves the dense network alone out"
    )
    a = p.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(a.threads)
    hb.set_num_threads(a.threads)
    train, valid = datasets(a.data, BATCH, a.seed)
    if a.dense_steps:
        alone = dense_alone(train.schema, a.seed, a.dense_steps)
        print(json.dumps({"peer": "torch_dense_alone", "samples_per_s": round(alone)}), flush=True)
    network = make_network(train.schema, a.seed)
    model = hb.RecModel(
        network, "bce", hb.Adam(lr=1e-3), metrics={"auc", "log_loss"}, amp_level=a.amp
    )
    peer = "hotbed_dcnv2_frappe" + ("" if a.amp == "O0" else f"_{a.amp.lower()}")
    for epoch in range(a.epochs):
        start, before = time.perf_counter(), model.counters["samples"]
        model.fit(train, callbacks=[hb.callbacks.ClipGradients(10.0)], progress=False)
        seconds, samples = time.perf_counter() - start, model.counters["samples"] - before
        scores = {name: round(float(value), 5) for name, value in model.evaluate(valid).items()}
        line = {"peer": peer, "epoch": epoch + 1, "seconds": round(seconds, 2)}
        print(
            json.dumps(line | {"samples_per_s": round(samples / seconds), "valid": scores}),
            flush=True,
        )


if __name__ == "__main__":
    main()
