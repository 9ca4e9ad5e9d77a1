# SPDX-License-Identifier: Apache-2.0
"""The calls of Triton's tools outside the Open Inference Protocol: configuration and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotbed.serving.server.meters import combine_statuses

if TYPE_CHECKING:
    from hotbed.serving.server.scoring.models import Models

_DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


def model_config(models: Models, name: str, version: str) -> dict[str, Any]:
    """Return the `ModelConfig` of a model.

    `max_batch_size` is `batch_rows`: the first dimension of all tensors counts candidates, and
    `dims` are the dimensions after it. The parameter `derived.<input>` says how the client computes
    an input that depends on other rows. Raises NotServed for an unknown model or version.
    """
    metadata = models.metadata(name, version)
    limits = models.limits
    parameters = {}
    for tensor in metadata["inputs"]:
        for key, text in tensor.get("parameters", {}).items():
            if isinstance(text, str):
                parameters[f"{key}.{tensor['name']}"] = {"string_value": text}
    return {
        "name": metadata["name"],
        "platform": metadata["platform"],
        "backend": "hotbed",
        "max_batch_size": limits.batch_rows,
        "input": [_configured_input(tensor) for tensor in metadata["inputs"]],
        "output": [_configured(tensor) for tensor in metadata["outputs"]],
        "dynamic_batching": {"max_queue_delay_microseconds": round(1e6 * limits.batch_seconds)},
        "model_transaction_policy": {"decoupled": False},
        "parameters": parameters,
    }


def _configured_input(tensor: Mapping[str, Any]) -> dict[str, Any]:
    configured = _configured(tensor)
    if "optional" in tensor.get("parameters", {}):
        configured["optional"] = True
    return configured


def _configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    kind = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"][1:]}


def model_statistics(models: Models, name: str, version: str) -> list[dict[str, Any]]:
    """Return the `ModelStatistics` of a model, or of all models if `name` is empty.

    They cover all processes of the server since it started. `inference_count` counts candidates,
    `execution_count` batches. `queue` is the time that a request waited, `compute_infer` the time
    of its batch. Reading and writing are not measured separately. Raises NotServed for an unknown
    model or version.
    """
    if name:
        models.named(name).loaded(version)
    parent = models.parent
    if parent is None:
        statuses = combine_statuses([models.status()])
    else:
        statuses = parent.status()["models"]
    return [_statistics(status) for status in statuses if name in ("", status["name"])]


def _statistics(status: Mapping[str, Any]) -> dict[str, Any]:
    measured = {
        "success": _duration(status["answered"], status["answered_seconds"]),
        "fail": _duration(status["refused"], status["refused_seconds"]),
        "queue": _duration(status["scored"], status["queue_seconds"]),
        "compute_infer": _duration(status["scored"], status["compute_seconds"]),
    }
    return {
        "name": status["name"],
        "version": status["version"],
        "last_inference": round(1000 * status["last_scored"]),
        "inference_count": status["rows"],
        "execution_count": status["batches"],
        "inference_stats": {name: measured.get(name, _duration(0, 0.0)) for name in _DURATIONS},
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(1e9 * seconds)}
