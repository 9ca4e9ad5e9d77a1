# SPDX-License-Identifier: Apache-2.0
"""A job of the settings of FuxiCTR. `hotbed init` finds `dialect` by the group `hotbed.jobs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hotbed import config
from hotbed.compat.fuxictr.experiment import recognises, settings_of
from hotbed.errors import ConfigError
from hotbed.job.dialect import Dialect

Settings = dict[str, Any]
HIDDEN = {"net_dropout": "dropout", "batch_norm": "batch_norm"}
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "DCN": (
        "dcn",
        {"dnn_hidden_units": "hidden", "num_cross_layers": "num_cross_layers", **HIDDEN},
    ),
    "DCNv2": (
        "dcnv2",
        {"model_structure": "structure", "num_cross_layers": "num_cross_layers", **HIDDEN},
    ),
    "DNN": ("dnn", {"hidden_units": "hidden", **HIDDEN}),
    "DeepFM": ("deepfm", {"hidden_units": "hidden", **HIDDEN}),
    "FM": ("fm", {}),
    "LR": ("lr", {}),
    "WideDeep": ("wide_deep", {"hidden_units": "hidden", **HIDDEN}),
}
"""Kind of the model, and its keywords by FuxiCTR's key."""

NO_EFFECT = frozenset(
    {
        "data_block_size",
        "data_root",
        "data_splits",
        "dataset_id",
        "debug_mode",
        "eval_steps",
        "feature_config",
        "feature_specs",
        "gpu",
        "group_id",
        "model_id",
        "model_root",
        "monitor_mode",
        "num_workers",
        "ordered_features",
        "pickle_feature_encoder",
        "rebuild_dataset",
        "save_best_only",
        "streaming",
        "task",
        "test_data",
        "use_features",
        "verbose",
    }
)
"""Keys that say nothing of what is learned, or of what Hotbed does otherwise."""

FEATURE_KEYS = frozenset(
    {
        "active",
        "dtype",
        "embedding_dim",
        "feature_encoder",
        "max_len",
        "min_categr_count",
        "name",
        "padding",
        "preprocess",
        "share_embedding",
        "source",
        "splitter",
        "type",
    }
)
METRICS = {"AUC": "auc", "logloss": "log_loss", "gAUC": "gauc"}
FORMATS = ("csv", "parquet")


class _Reading:
    """Settings, each of which is to be read once."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._rest = dict(settings)
        self._known = set(NO_EFFECT)
        self.notes: list[str] = []

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value; the key has been read then."""
        self._known.add(key)
        value = self._rest.pop(key, default)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return a value that must be there."""
        value = self.take(key)
        if value is None:
            raise ConfigError(f"FuxiCTR's {key}: missing key, got none. Add it.")
        return value

    def only(self, key: str, *accepted: Any) -> None:
        """Raise ConfigError for a value that Hotbed has nothing for."""
        value = self.take(key, accepted[0])
        if value not in accepted:
            allowed = " or ".join(map(repr, accepted))
            raise ConfigError(
                f"FuxiCTR's {key}: no counterpart, got {value!r}. Hotbed has {allowed}."
            )

    def close(self) -> None:
        """Raise ConfigError for the first key that nobody has read."""
        for key in self._rest:
            if key not in NO_EFFECT:
                raise ConfigError(
                    f"FuxiCTR's {key}: unknown key, got the value {self._rest[key]!r}. "
                    f"{config.did_you_mean(key, self._known)}"
                )


def draft(spec: Mapping[str, Any], path: Path, name: str) -> str:
    """Return the text of a job for an experiment of FuxiCTR, with what differs as comments.

    Raises:
        ConfigError: a key or a value has no counterpart.
    """
    reading = _Reading(settings_of(spec, path, name))
    job = _job(reading)
    reading.close()
    head = [f"A job for an experiment of FuxiCTR in {path.name}. What differs:", *reading.notes]
    comments = "".join(f"# {line}\n" for line in head)
    return comments + yaml.safe_dump(job, sort_keys=False, default_flow_style=None, width=110)


def _job(reading: _Reading) -> Settings:
    rate = reading.take("learning_rate", 1e-3)
    reading.only("optimizer", "adam")
    reading.only("loss", "binary_crossentropy")
    features = reading.need("feature_cols")
    columns = [_label(reading.need("label_col")), *_columns(features, reading.notes)]
    kind = reading.take("data_format", "csv")
    if kind not in FORMATS:
        raise ConfigError(
            f"FuxiCTR's data_format: no counterpart, got {kind!r}. Give the raw csv or parquet "
            "files: Hotbed encodes them itself."
        )
    rule: Settings = {"kind": "adam", "lr": rate, "scope": "catch_up"}
    dense: Settings = {"kind": "adam", "lr": rate}
    for of, key in ((rule, "embedding_regularizer"), (dense, "net_regularizer")):
        strength = reading.take(key, 0)
        if strength:
            of["l2"] = float(strength)
    tables: Settings = {"dim": reading.take("embedding_dim", 16), "rule": rule}
    least = reading.take("min_categr_count", 1)
    if least > 1:
        tables["admit"] = {"kind": "min_count", "count": least}
        reading.notes.append(
            f"min_categr_count: an id gets its row at occurrence {least} of a pass; FuxiCTR counts "
            "before it trains."
        )
    job: Settings = {"schema": {"columns": columns}}
    texts: dict[str, str] = {}
    for feature in features:
        if kind == "csv" and feature.get("dtype") == "str":  # numbers in them are text to FuxiCTR
            texts |= dict.fromkeys(_active_names(feature), "string")
    for part in ("train", "valid"):
        path = reading.take(f"{part}_data")
        if path is not None:
            job[part] = {"kind": kind, "path": path}
            if texts:
                job[part]["columns"] = texts
    return job | {
        "model": _model(reading),
        "tables": tables,
        "optimizer": dense,
        "metrics": [_metric(name) for name in reading.take("metrics", ["AUC", "logloss"])],
        "fit": _fit(reading),
        "callbacks": list(_callbacks(reading)),
        "seed": reading.take("seed", 2019),
        "output": "runs/fuxictr",
    }


def _model(reading: _Reading) -> Settings:
    name = reading.need("model")
    if name not in MODELS:
        raise ConfigError(
            f"FuxiCTR's model: no counterpart, got {name!r}. Hotbed has {', '.join(MODELS)}; "
            "docs/cookbook.md has more as networks of your own."
        )
    kind, keywords = MODELS[name]
    model: Settings = {"kind": kind}
    for key, keyword in keywords.items():
        value = reading.take(key)
        if value is not None:
            model[keyword] = value
    for key in ("hidden_activations", "dnn_activations"):
        reading.only(key, "relu", "ReLU")
    if name == "DCNv2":
        _read_structure(reading, model)
    return model


def _read_structure(reading: _Reading, model: Settings) -> None:
    """Read the perceptron of the structure, and the mixture of ranks, of DCNv2."""
    model.setdefault("structure", "parallel")
    for structure in ("parallel", "stacked"):
        hidden = reading.take(f"{structure}_dnn_hidden_units")
        if structure == model["structure"] and hidden is not None:
            model["hidden"] = hidden
    low_rank = reading.take("low_rank", 32)
    experts = reading.take("num_experts", 4)
    if reading.take("use_low_rank_mixture", False):
        model |= {"low_rank": low_rank, "num_experts": experts}


def _label(label: Any) -> Settings:
    if isinstance(label, list):
        raise ConfigError(
            f"FuxiCTR's label_col: several labels, got {label}. Write a job with mmoe."
        )
    return {"kind": "label", "name": label["name"]}


def _columns(features: Sequence[Mapping[str, Any]], notes: list[str]) -> Iterator[Settings]:
    for feature in features:
        for key in feature:
            if key not in FEATURE_KEYS:
                raise ConfigError(
                    f"FuxiCTR's feature_cols.{key}: unknown key, got the value {feature[key]!r}. "
                    f"{config.did_you_mean(key, FEATURE_KEYS)}"
                )
        for name in _active_names(feature):
            yield _column(feature, name, notes)


def _active_names(feature: Mapping[str, Any]) -> list[str]:
    if not feature.get("active", True):
        return []
    names = feature["name"]
    return list(names) if isinstance(names, list) else [names]


def _column(feature: Mapping[str, Any], name: str, notes: list[str]) -> Settings:
    for key in ("preprocess", "embedding_dim"):
        if feature.get(key):
            raise ConfigError(
                f"FuxiCTR's feature_cols.{key}: no counterpart, got {feature[key]!r} of {name!r}. "
                "Leave it out, and write a transform or an override of the job."
            )
    kinds: dict[str, Callable[[], Settings]] = {
        "categorical": lambda: {"kind": "id", "name": name},
        "numeric": lambda: {"kind": "dense", "name": name},
        "sequence": lambda: {
            "kind": "id",
            "name": name,
            "pooling": "mean",
            "max_length": feature.get("max_len", 50),
            "transforms": [{"kind": "split", "delimiter": feature.get("splitter", "^")}],
        },
    }
    kind = feature.get("type", "categorical")
    if kind not in kinds:
        raise ConfigError(
            f"FuxiCTR's feature_cols.type: no counterpart, got {kind!r} of {name!r}. Hotbed reads "
            f"{', '.join(kinds)}; set `active: False` on others."
        )
    column = kinds[kind]()
    if kind == "numeric":
        notes.append(f"{name}: a number enters as it is; FuxiCTR multiplies a vector by it.")
    if feature.get("share_embedding"):
        column["table"] = feature["share_embedding"]
    return column


def _metric(name: str) -> str:
    if name not in METRICS:
        raise ConfigError(
            f"FuxiCTR's metrics: no counterpart, got {name!r}. Hotbed has {', '.join(METRICS)}."
        )
    return METRICS[name]


def _fit(reading: _Reading) -> Settings:
    fit: Settings = {
        "epochs": reading.take("epochs", 10),
        "batch_size": reading.take("batch_size", 10_000),
    }
    if reading.take("shuffle", True):
        fit["shuffle"] = 1_000_000
        reading.notes.append("shuffle: within windows of 1,000,000 rows, not of the whole file.")
    return fit


def _callbacks(reading: _Reading) -> Iterator[Settings]:
    monitor = reading.take("monitor", "AUC")
    if isinstance(monitor, Mapping):
        first = next(iter(monitor))
        reading.notes.append(
            f"monitor: {dict(monitor)} is a sum; here {first} alone decides when to stop."
        )
        monitor = first
    watched = _metric(monitor)
    yield {"kind": "clip_gradients", "max_norm": float(reading.take("max_gradient_norm", 10))}
    if reading.take("reduce_lr_on_plateau", True):
        yield {"kind": "reduce_plateau", "metric": watched, "patience": 1, "min_lr": 1e-6}
    yield {
        "kind": "early_stopping",
        "metric": watched,
        "patience": reading.take("early_stop_patience", 2),
    }
    yield {"kind": "best_weights", "metric": watched}


dialect = Dialect("FuxiCTR", recognises, draft=draft)
