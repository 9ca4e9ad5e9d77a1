# SPDX-License-Identifier: Apache-2.0
"""FuxiCTR's DCNv2 on the files of `accuracy.py`, with the same published settings and FuxiCTR's own
`fit`: the peer of our accuracy.

An epoch without progress of the validation AUC divides the learning rate by ten, two in a row end
the run, and the best epoch counts; all of that is FuxiCTR's own. Runs in an environment of its own
with fuxictr 2.3.10, torch 2.13.0, "polars<2" and "ray[data]", without Hotbed. Prints one JSON line
an epoch, one a run and, last, the mean and deviation over the seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.INFO)
os.environ["TQDM_DISABLE"] = "1"

if importlib.util.find_spec("fuxictr") is None:
    sys.exit("fuxictr is not installed. Run this in an environment with the packages named above.")

import torch  # noqa: E402
from frappe import FIELDS  # noqa: E402
from fuxictr.features import FeatureMap  # noqa: E402
from fuxictr.preprocess import FeatureProcessor, build_dataset  # noqa: E402
from fuxictr.pytorch.dataloaders import RankDataLoader  # noqa: E402
from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, MLP_Block  # noqa: E402
from fuxictr.pytorch.models import BaseModel  # noqa: E402
from fuxictr.pytorch.torch_utils import seed_everything  # noqa: E402

SETTINGS: dict[str, Any] = {
    "dataset_id": "frappe",
    "model_id": "DCNv2",
    "data_format": "csv",
    "test_data": None,
    "min_categr_count": 1,
    "feature_cols": [{"name": FIELDS, "active": True, "dtype": "str", "type": "categorical"}],
    "label_col": {"name": "label", "dtype": "float"},
    "task": "binary_classification",
    "batch_size": 4096,
    "embedding_dim": 10,
    "embedding_regularizer": 0.05,
    "net_regularizer": 0,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "loss": "binary_crossentropy",
    "metrics": ["AUC", "logloss"],
    "monitor": "AUC",
    "monitor_mode": "max",
    "reduce_lr_on_plateau": True,
    "early_stop_patience": 2,
    "save_best_only": True,
    "eval_steps": None,
    "shuffle": True,
    "num_workers": 0,
    "verbose": 0,
    "gpu": -1,
}


class DCNv2(BaseModel):
    """The parallel DCNv2 of BARS, out of FuxiCTR's layers."""

    def __init__(self, feature_map: Any, **settings: Any) -> None:
        super().__init__(feature_map, **settings)
        self.seed, self.epochs, self.start = settings["seed"], [], time.perf_counter()
        width = settings["embedding_dim"] * len(FIELDS)
        self.embedding_layer = FeatureEmbedding(feature_map, settings["embedding_dim"])
        self.cross = CrossNetV2(width, 4)
        self.mlp = MLP_Block(
            input_dim=width,
            hidden_units=[400] * 3,
            hidden_activations="relu",
            output_activation=None,
            dropout_rates=0.4,
            batch_norm=True,
        )
        self.out = torch.nn.Linear(width + 400, 1)
        self.compile(settings["optimizer"], settings["loss"], settings["learning_rate"])
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: Any) -> dict[str, torch.Tensor]:
        rows = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
        return {
            "y_pred": self.output_activation(
                self.out(torch.cat([self.cross(rows), self.mlp(rows)], -1))
            )
        }

    def evaluate(self, data_generator: Any, metrics: Any = None) -> Any:
        """FuxiCTR asks for the monitored metric only; the log loss is wanted as well."""
        scores = super().evaluate(data_generator)
        lr = self.optimizer.param_groups[0]["lr"]
        self.epochs.append({"auc": float(scores["AUC"]), "log_loss": float(scores["logloss"])})
        line = {"seed": self.seed, "epoch": len(self.epochs), "lr": lr, **self.epochs[-1]}
        print(json.dumps({**line, "seconds": round(time.perf_counter() - self.start)}), flush=True)
        return scores


def run(data: Path, seed: int, max_epochs: int) -> dict[str, float]:
    """One run to its end; the scores of its best epoch."""
    with tempfile.TemporaryDirectory() as work:
        settings = {
            **SETTINGS,
            "data_root": work,
            "model_root": work,
            "seed": seed,
            "train_data": str(data / "train.csv"),
            "valid_data": str(data / "valid.csv"),
        }
        Path(work, SETTINGS["dataset_id"]).mkdir()  # the best epoch's weights are written there
        seed_everything(seed)
        keys = ("train_data", "valid_data", "test_data")
        settings.update(
            zip(keys, build_dataset(FeatureProcessor(**settings), **settings), strict=True)
        )
        features = FeatureMap("frappe", f"{work}/frappe")
        features.load(f"{work}/frappe/feature_map.json", settings)
        train, valid = RankDataLoader(features, stage="train", **settings)
        model = DCNv2(features, **settings)
        model.fit(train, epochs=max_epochs, validation_data=valid)
    best: dict[str, float] = max(model.epochs, key=lambda epoch: epoch["auc"])
    return {**best, "epochs": len(model.epochs)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--seeds", type=int, nargs="+", default=[2019, 2020, 2021])
    p.add_argument("--max-epochs", type=int, default=60)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    runs = []
    for seed in a.seeds:
        runs.append(run(a.data, seed, a.max_epochs))
        print(
            json.dumps({"model": "DCNv2", "peer": "FuxiCTR", "seed": seed, **runs[-1]}), flush=True
        )
    auc = [scores["auc"] for scores in runs]
    line = {
        "auc_mean": round(statistics.mean(auc), 5),
        "auc_sd": round(statistics.stdev(auc) if len(auc) > 1 else 0.0, 5),
        "log_loss_mean": round(statistics.mean(scores["log_loss"] for scores in runs), 5),
    }
    print(json.dumps({"model": "DCNv2", "peer": "FuxiCTR", "runs": len(runs), **line}), flush=True)


if __name__ == "__main__":
    main()
