# SPDX-License-Identifier: Apache-2.0
"""The calls of Triton's tools outside the Open Inference Protocol: configuration and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotbed.serving.server.meters import together

if TYPE_CHECKING:
    from hotbed.serving.server.models import Models

# Message -> its fields, as in `hotbed.serving.stores.messages`. Fields that the server never fills
# are left out.
CONFIG_MESSAGES: Mapping[str, str] = {
    "ModelConfigRequest": "string name; string version",
    "ModelInput": "string name = 1; DataType data_type = 2; * int64 dims = 4",
    "ModelOutput": "string name = 1; DataType data_type = 2; * int64 dims = 3",
    "ModelDynamicBatching": "uint64 max_queue_delay_microseconds = 2",
    "ModelTransactionPolicy": "bool decoupled",
    "ModelConfig": "; ".join(
        [
            "string name = 1",
            "string platform = 2",
            "int32 max_batch_size = 4",
            "* ModelInput input = 5",
            "* ModelOutput output = 6",
            "ModelDynamicBatching dynamic_batching = 11",
            "string backend = 17",
            "ModelTransactionPolicy model_transaction_policy = 19",
        ]
    ),
    "ModelConfigResponse": "ModelConfig config",
}
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
STATISTICS_MESSAGES: Mapping[str, str] = {
    "ModelStatisticsRequest": "string name; string version",
    "StatisticDuration": "uint64 count; uint64 ns",
    "InferStatistics": "; ".join(f"StatisticDuration {name}" for name in _DURATIONS),
    "ModelStatistics": "; ".join(
        [
            "string name",
            "string version",
            "uint64 last_inference",
            "uint64 inference_count",
            "uint64 execution_count",
            "InferStatistics inference_stats",
        ]
    ),
    "ModelStatisticsResponse": "* ModelStatistics model_stats",
}
DATA_TYPES = (
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
)


def model_config(models: Models, name: str, version: str) -> dict[str, Any]:
    """Return the `ModelConfig` of a model.

    `max_batch_size` is `batch_rows`: the first dimension of all tensors counts candidates, and
    `dims` are the dimensions after it. Raises NotServed for an unknown model or version.
    """
    metadata = models.metadata(name, version)
    limits = models.limits
    return {
        "name": metadata["name"],
        "platform": metadata["platform"],
        "backend": "hotbed",
        "max_batch_size": limits.batch_rows,
        "input": [_configured(tensor) for tensor in metadata["inputs"]],
        "output": [_configured(tensor) for tensor in metadata["outputs"]],
        "dynamic_batching": {"max_queue_delay_microseconds": round(1e6 * limits.batch_seconds)},
        "model_transaction_policy": {"decoupled": False},
    }


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
        models.named(name, version)
    parent = models.parent
    if parent is None:
        statuses = together([models.status()])
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
