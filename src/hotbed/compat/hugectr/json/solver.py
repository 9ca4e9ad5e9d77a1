# SPDX-License-Identifier: Apache-2.0
"""The `solver` clause of a training file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotbed.compat.hugectr.clauses import FitParams, OptParams, ParamFiles, Solver
from hotbed.compat.hugectr.enums import LrPolicy_t, MetricsType
from hotbed.compat.hugectr.json.keys import member, needed, read_clause
from hotbed.errors import ConfigError

SCALERS = (128, 256, 512, 1024)
"""Values of `mixed_precision`."""

# Keys of the file -> arguments of the solver.
_SOLVER = {
    "seed": "seed",
    "batchsize": "batchsize",
    "batchsize_eval": "batchsize_eval",
    "enable_tf32_compute": "enable_tf32_compute",
    "algorithm_search": "use_algorithm_search",
    "cuda_graph": "use_cuda_graph",
}
_FIT = ("display", "eval_interval", "snapshot", "snapshot_prefix", "export_predictions_prefix")
_FILES = {
    "dense_model_file": "dense_model_file",
    "dense_opt_states_file": "dense_opt_states_file",
    "sparse_model_file": "sparse_model_files",
    "sparse_opt_states_file": "sparse_opt_states_files",
}
_KEYS = (
    *_SOLVER,
    *_FIT,
    *_FILES,
    "lr_policy",
    "max_iter",
    "num_epochs",
    "gpu",
    "max_eval_batches",
    "max_eval_samples",
    "eval_batches",
    "mixed_precision",
    "eval_metrics",
    "input_key_type",
)
_NEEDED = ("lr_policy", "display", "snapshot", "snapshot_prefix", "batchsize", "gpu")


def read_solver(spec: Any, optimizer: OptParams | None = None) -> Solver:
    """Return the solver that a clause describes, with the arguments of `fit` and files of weights.

    Args:
        spec: the clause.
        optimizer: whose learning rate the solver has from v3.1 on.

    Raises:
        ConfigError: a key or a value is wrong; the message starts with its place. HugeCTR prints
            such an error, and trains with what it had read before.
    """
    values = read_clause(spec, "solver", _KEYS)
    needed(values, "solver", _NEEDED)
    renamed = {new: values[old] for old, new in _SOLVER.items() if old in values}
    renamed.setdefault("batchsize_eval", renamed["batchsize"])
    if optimizer is not None and optimizer.learning_rate is not None:
        renamed |= vars(optimizer.learning_rate)
    max_iter, num_epochs = _length(values)
    fit = {key: values[key] for key in _FIT if key in values}
    fit.setdefault("eval_interval", 0)
    return Solver(
        **renamed,
        **_precision(values),
        lr_policy=member(LrPolicy_t, values["lr_policy"], "solver.lr_policy"),
        vvgpu=_gpus(values["gpu"]),
        max_eval_batches=_eval_batches(values, renamed["batchsize_eval"]),
        metrics_spec=_metrics(values.get("eval_metrics", ["AUC"])),
        i64_input_key=_has_long_keys(values.get("input_key_type", "I32")),
        repeat_dataset=max_iter > 0,
        fit=FitParams(max_iter=max_iter, num_epochs=num_epochs, **fit),
        files=_files(values),
    )


def _length(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of iterations and of epochs, one of which is 0."""
    if "max_iter" in values and "num_epochs" in values:
        raise ConfigError(
            f"solver.num_epochs: cannot be combined with max_iter, got {values['num_epochs']} and "
            f"{values['max_iter']}. Remove one of the two."
        )
    if "max_iter" in values:
        return _count(values, "max_iter"), 0
    return 0, _count(values, "num_epochs") if "num_epochs" in values else 1


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"solver.{key}: not a number from 1, got {value!r:.80}. Correct it.")
    return value


def _eval_batches(values: Mapping[str, Any], batch_size: Any) -> int:
    """Return the batches of an evaluation; `eval_batches` is the key of v2.3."""
    present = [key for key in ("max_eval_batches", "max_eval_samples") if key in values]
    if len(present) == 2:
        raise ConfigError(
            "solver.max_eval_samples: cannot be combined with max_eval_batches, got "
            f"{values['max_eval_samples']} and {values['max_eval_batches']}. Remove one of the two."
        )
    if "max_eval_batches" in present:
        return _count(values, "max_eval_batches")
    if "max_eval_samples" in present:
        samples = _count(values, "max_eval_samples")
        return max(samples // _count({"batchsize_eval": batch_size}, "batchsize_eval"), 1)
    if "eval_batches" in values:
        return _count(values, "eval_batches")
    raise ConfigError(
        f"solver.max_eval_batches: missing key, got {', '.join(values)}. Add it, or "
        "max_eval_samples."
    )


def _precision(values: Mapping[str, Any]) -> dict[str, Any]:
    if "mixed_precision" not in values:
        return {}
    scaler = values["mixed_precision"]
    if "enable_tf32_compute" in values:
        raise ConfigError(
            f"solver.mixed_precision: cannot be combined with enable_tf32_compute, got {scaler}. "
            "Remove one of the two."
        )
    if scaler not in SCALERS:
        numbers = ", ".join(map(str, SCALERS))
        raise ConfigError(
            f"solver.mixed_precision: unknown scaler, got {scaler!r:.80}. Use one of {numbers}."
        )
    return {"use_mixed_precision": True, "scaler": float(scaler)}


def _gpus(gpus: Any) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each node."""
    nodes = gpus if isinstance(gpus, list) else [gpus]
    if not nodes or not isinstance(nodes[0], list):
        nodes = [nodes]
    for device in (device for node in nodes for device in node):
        if not isinstance(device, int) or device < 0:
            raise ConfigError(
                f"solver.gpu: not numbers of devices, got {gpus!r:.80}. Write [0, 1], or "
                "[[0, 1], [0, 1]] for two nodes."
            )
    return tuple(map(tuple, nodes))


def _metrics(names: Any) -> dict[MetricsType, float]:
    """Return metrics and the value at which each stops training; 1.0 for AUC, and 0.0."""
    if not isinstance(names, list):
        raise ConfigError(f'solver.eval_metrics: not a list, got {names!r:.80}. Write ["AUC:0.8"].')
    metrics: dict[MetricsType, float] = {}
    for item in names:
        name, colon, text = str(item).partition(":")
        metric = member(MetricsType, name.strip(), "solver.eval_metrics")
        metrics[metric] = 1.0 if metric is MetricsType.AUC else 0.0
        if colon and metric is MetricsType.AUC:
            metrics[metric] = _threshold(text, item)
    return metrics


def _threshold(text: str, item: Any) -> float:
    try:
        threshold = float(text)
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold <= 1:
        raise ConfigError(
            f"solver.eval_metrics: the threshold is not between 0 and 1, got {item!r}. Write "
            "AUC:0.8."
        )
    return threshold


def _has_long_keys(name: Any) -> bool:
    if name not in ("I32", "I64"):
        raise ConfigError(f"solver.input_key_type: unknown type, got {name!r:.80}. Use I32 or I64.")
    return bool(name == "I64")


def _files(values: Mapping[str, Any]) -> ParamFiles | None:
    """Return the files of weights that training starts from; None without such keys."""
    files: dict[str, Any] = {}
    for key, field in _FILES.items():
        if key in values:
            value = values[key]
            is_one_of_many = field.endswith("files") and isinstance(value, str)
            files[field] = [value] if is_one_of_many else value
    return ParamFiles(**files) if files else None
