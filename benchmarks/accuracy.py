# SPDX-License-Identifier: Apache-2.0
"""Validation AUC and log loss of the published models on Frappe_x1r, with the settings that BARS
publishes for Frappe_x1.

The recipe: dim 10, batch 4,096, Adam 1e-3 with L2 over the whole tables at every step (scope
"catch_up"), initial rows N(0, 1e-4), global norm clipped at 10, validation each epoch; an epoch
without progress divides the learning rate by ten, two in a row end the run, and the best epoch
counts. With --test, that is decided by the first half of the validation file alone, and the second
half is the test that is scored once, with the weights of the best epoch. Prints one JSON line a run
and, last, the mean and deviation of each model over its seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from frappe import parts
from torch import nn

import hotbed as hb

MLP = {"hidden": (400, 400, 400), "batch_norm": True}


@dataclass(frozen=True)
class Setting:
    """A model with its published L2 weight of the embeddings; LR has rows of one lane."""

    l2: float
    build: Callable[..., nn.Module]
    dim: int = 10


SETTINGS = {
    "LR": Setting(1e-5, hb.models.LR, 1),
    "DNN": Setting(0.05, lambda schema, tables: hb.models.DNN(schema, tables, dropout=0.2, **MLP)),
    "DeepFM": Setting(
        0.05, lambda schema, tables: hb.models.DeepFM(schema, tables, dropout=0.2, **MLP)
    ),
    "DCN": Setting(
        0.05,
        lambda schema, tables: hb.models.DCN(
            schema, tables, num_cross_layers=3, dropout=0.2, **MLP
        ),
    ),
    "DCNv2": Setting(
        0.05,
        lambda schema, tables: hb.models.DCNv2(
            schema, tables, num_cross_layers=4, dropout=0.4, **MLP
        ),
    ),
    "DLRM": Setting(
        0.1,
        lambda schema, tables: hb.models.DLRM(
            schema, tables, interaction="cat", dropout=0.4, **MLP
        ),
    ),
    "MaskNet": Setting(
        0.1,
        lambda schema, tables: hb.models.MaskNet(
            schema,
            tables,
            num_blocks=3,
            block_width=50,
            hidden=(400, 400, 400),
            reduction_ratio=2.0,
            dropout=0.1,
        ),
    ),
    "FinalMLP": Setting(
        0.05,
        lambda schema, tables: hb.models.FinalMLP(
            schema,
            tables,
            hidden=(400,),
            second_hidden=(100,),
            num_heads=5,
            context=["user"],
            second_context=["item"],
            gate_hidden=(400,),
            dropout=0.4,
            batch_norm=True,
        ),
    ),
}


def run(
    name: str,
    seed: int,
    train: hb.Dataset,
    valid: hb.Dataset,
    test: hb.Dataset | None,
    max_epochs: int,
) -> dict[str, float]:
    """One run to its end; the scores of its best epoch on `test`, or without one on `valid`."""
    setting = SETTINGS[name]
    torch.manual_seed(seed)
    rule = hb.Adam(lr=1e-3, l2=setting.l2, scope="catch_up")
    tables = hb.make_tables(
        train.schema, dim=setting.dim, rule=rule, init=hb.Normal(1e-4), seed=seed
    )
    network = setting.build(train.schema, tables)
    model = hb.RecModel(
        network,
        "bce",
        torch.optim.Adam(hb.dense_parameters(network), lr=1e-3),
        metrics={"auc", "log_loss"},
    )
    callbacks = [
        hb.callbacks.ClipGradients(10.0),
        hb.callbacks.ReducePlateau("auc", factor=0.1, patience=1, min_lr=1e-6),
        hb.callbacks.EarlyStopping("auc", patience=2),
    ]
    if test is not None:
        callbacks.append(hb.callbacks.BestWeights("auc"))
    history = model.fit(train, valid, epochs=max_epochs, callbacks=callbacks, progress=False)
    best = max(history.epochs, key=lambda epoch: epoch["valid.auc"])
    scores = {name: best[f"valid.{name}"] for name in ("auc", "log_loss")}
    line = {"epochs": len(history.epochs)}
    if test is None:
        return {**scores, **line}
    tested = model.evaluate(test)
    return {**{name: tested[name] for name in scores}, **line, "valid_auc": scores["auc"]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--models", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    p.add_argument("--seeds", type=int, nargs="+", default=[2019, 2020, 2021])
    p.add_argument("--max-epochs", type=int, default=60)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--test", action="store_true", help="test on a half of the validation file")
    a = p.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(a.threads)
    hb.set_num_threads(a.threads)
    scores: dict[str, list[dict[str, float]]] = {}
    for seed in a.seeds:
        train, [valid, *rest] = parts(a.data, 4096, seed, num_parts=2 if a.test else 1)
        test = rest[0] if rest else None
        for name in a.models:
            start = time.perf_counter()
            result = run(name, seed, train, valid, test, a.max_epochs)
            scores.setdefault(name, []).append(result)
            print(
                json.dumps(
                    {
                        "model": name,
                        "seed": seed,
                        **result,
                        "seconds": round(time.perf_counter() - start),
                    }
                ),
                flush=True,
            )
    for name, results in scores.items():
        auc, loss = ([result[key] for result in results] for key in ("auc", "log_loss"))
        deviation = statistics.stdev(auc) if len(auc) > 1 else 0.0
        line = {
            "auc_mean": round(statistics.mean(auc), 5),
            "auc_sd": round(deviation, 5),
            "log_loss_mean": round(statistics.mean(loss), 5),
        }
        print(json.dumps({"model": name, "runs": len(auc), **line}), flush=True)


if __name__ == "__main__":
    main()
