# SPDX-License-Identifier: Apache-2.0
"""Experiments of FuxiCTR become jobs that train; a key without a counterpart is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch", reason="torch absent")

from typer.testing import CliRunner

from hotbed.cli.commands import app
from hotbed.compat.fuxictr.job import MODELS, dialect, draft
from hotbed.errors import ConfigError
from hotbed.job import dialect as dialects
from hotbed.job.job import Job
from hotbed.job.run import train
from hotbed.yaml_files import parse_value

BASE: dict[str, Any] = {
    "model_root": "./checkpoints/",
    "num_workers": 3,
    "verbose": 1,
    "early_stop_patience": 2,
    "pickle_feature_encoder": True,
    "save_best_only": True,
    "eval_steps": None,
    "debug_mode": False,
    "group_id": None,
    "use_features": None,
    "feature_specs": None,
    "feature_config": None,
}
COMMON: dict[str, Any] = {
    "dataset_id": "tiny",
    "loss": "binary_crossentropy",
    "metrics": ["logloss", "AUC"],
    "task": "binary_classification",
    "optimizer": "adam",
    "learning_rate": 0.01,
    "embedding_regularizer": 0.001,
    "net_regularizer": 0,
    "batch_size": 64,
    "embedding_dim": 4,
    "epochs": 1,
    "shuffle": True,
    "seed": 2019,
    "monitor": {"AUC": 1, "logloss": -1},
    "monitor_mode": "max",
}
HIDDEN = {"net_dropout": 0, "batch_norm": False}
OF_MODEL: dict[str, dict[str, Any]] = {
    "DCN": {"dnn_hidden_units": [8], "dnn_activations": "relu", "num_cross_layers": 2, **HIDDEN},
    "DCNv2": {
        "model_structure": "parallel",
        "use_low_rank_mixture": False,
        "low_rank": 32,
        "num_experts": 4,
        "stacked_dnn_hidden_units": [64],
        "parallel_dnn_hidden_units": [8, 4],
        "dnn_activations": "relu",
        "num_cross_layers": 3,
        **HIDDEN,
    },
    "DNN": {"hidden_units": [8], "hidden_activations": "relu", **HIDDEN},
    "DeepFM": {"hidden_units": [8], "hidden_activations": "relu", **HIDDEN},
    "FM": {},
    "LR": {},
    "WideDeep": {"hidden_units": [8], "hidden_activations": "relu", **HIDDEN},
}
DATASET: dict[str, Any] = {
    "data_root": "../data/",
    "data_format": "csv",
    "train_data": "rows.csv",
    "valid_data": "rows.csv",
    "test_data": "rows.csv",
    "min_categr_count": 2,
    "feature_cols": [
        {"name": ["user", "brand"], "active": True, "dtype": "str", "type": "categorical"},
        {"name": "price", "active": True, "dtype": "float", "type": "numeric"},
        {"name": "unused", "active": False, "dtype": "str", "type": "categorical"},
        {
            "name": "seen",
            "dtype": "str",
            "type": "sequence",
            "max_len": 5,
            "share_embedding": "brand",
        },
    ],
    "label_col": {"name": "clk", "dtype": "float"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    experiments = {f"{name}_tiny": COMMON | {"model": name} | OF_MODEL[name] for name in MODELS}
    Path("model_config.yaml").write_text(yaml.safe_dump({"Base": BASE, **experiments}))
    Path("dataset_config.yaml").write_text(yaml.safe_dump({"tiny": DATASET}))
    rows = [f"{n % 2},{n % 7},{n % 5},{n / 9},x,{n % 5}^{n % 3}" for n in range(256)]
    Path("rows.csv").write_text("\n".join(["clk,user,brand,price,unused,seen", *rows]))
    return tmp_path


def drafted(**changes: Any) -> Any:
    settings = BASE | DATASET | COMMON | {"model": "DCNv2"} | OF_MODEL["DCNv2"] | changes
    return parse_value(draft(settings, Path("one.yaml"), ""))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_each_model_becomes_a_job(name: str, folder: Path) -> None:
    spec = yaml.safe_load(Path("model_config.yaml").read_text())
    assert dialect.recognises(spec)
    job = Job.from_json(parse_value(draft(spec, Path("model_config.yaml"), f"{name}_tiny")))
    assert [column.name for column in job.declared.columns] == [
        "clk",
        "user",
        "brand",
        "price",
        "seen",
    ]


def test_a_drafted_job_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects, "_installed", lambda: iter([dialect]))
    command = ["init", "--from", "model_config.yaml#DeepFM_tiny"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    text = Path("job.yaml").read_text()
    assert "# monitor: {'AUC': 1, 'logloss': -1} is a sum; here AUC alone" in text
    job = Job.read(Path("job.yaml"), {"baselines": False})
    learned = train(job)
    assert set(learned.model.tables) == {"user", "brand", "user.linear", "brand.linear"}
    assert learned.histories["train"].metrics["valid.auc"] > 0
    with pytest.raises(ConfigError, match="no experiment 'DIN_tiny', got DCN_tiny"):
        dialects.drafted("model_config.yaml#DIN_tiny")
    with pytest.raises(ConfigError, match="--from: not a training file"):
        dialects.drafted("dataset_config.yaml")
    assert "neither a data file nor --from" in str(CliRunner().invoke(app, ["init"]).exception)


def test_settings_keep_their_meaning() -> None:
    job = drafted()
    rule = {"kind": "adam", "lr": 0.01, "scope": "catch_up", "l2": 0.001}
    assert job["tables"] == {"dim": 4, "rule": rule, "admit": {"kind": "min_count", "count": 2}}
    assert job["optimizer"] == {"kind": "adam", "lr": 0.01}
    assert job["model"]["hidden"] == [8, 4]
    assert drafted(model_structure="stacked")["model"]["hidden"] == [64]
    assert drafted(use_low_rank_mixture=True)["model"]["low_rank"] == 32
    assert job["train"]["columns"] == {"user": "string", "brand": "string", "seen": "string"}
    assert drafted(min_categr_count=1)["tables"].keys() == {"dim", "rule"}
    assert [callback["kind"] for callback in drafted(reduce_lr_on_plateau=False)["callbacks"]] == [
        "clip_gradients",
        "early_stopping",
        "best_weights",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"embeding_dim": 8},
            "embeding_dim: unknown key, got the value 8. Did you mean 'embedding_dim'",
        ),
        ({"model": "xDeepFM"}, "model: no counterpart, got 'xDeepFM'"),
        ({"optimizer": "sgd"}, "optimizer: no counterpart, got 'sgd'"),
        ({"loss": "mse"}, "loss: no counterpart, got 'mse'"),
        ({"dnn_activations": "Dice"}, "dnn_activations: no counterpart, got 'Dice'"),
        ({"metrics": ["MRR"]}, "metrics: no counterpart, got 'MRR'"),
        ({"data_format": "h5"}, "data_format: no counterpart, got 'h5'"),
        ({"label_col": [{"name": "a"}]}, "label_col: several labels"),
        ({"feature_cols": [{"name": "a", "typ": "x"}]}, "feature_cols.typ: unknown key"),
        ({"feature_cols": [{"name": "a", "type": "meta"}]}, "feature_cols.type: no counterpart"),
        ({"feature_cols": [{"name": "a", "preprocess": "f"}]}, "feature_cols.preprocess: no count"),
        ({"feature_cols": None}, "feature_cols: missing key"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        drafted(**changes)
