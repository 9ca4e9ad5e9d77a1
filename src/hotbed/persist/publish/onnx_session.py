# SPDX-License-Identifier: Apache-2.0
"""Open ONNX graphs in ONNX Runtime, for the check of an export and for serving."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from hotbed.errors import ConfigError
from hotbed.frozen import RowArray


def onnx_runtime() -> Any:
    """Return the package onnxruntime, which then reports to nobody.

    From 1.29 on it writes down which models a machine opens, and sends that to Microsoft, unless
    this variable is set before it is imported.

    Raises:
        ImportError: it is not installed.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


CPU_PROVIDERS = ("CPUExecutionProvider",)
"""What computes a graph where nothing else is said, by its name in ONNX Runtime."""


def open_graph(
    graph: bytes,
    weights: Iterable[tuple[str, RowArray]] = (),
    num_threads: int = 0,
    providers: Sequence[str] = CPU_PROVIDERS,
) -> Any:
    """Open a graph with weights, which ONNX Runtime may then fold.

    Args:
        graph: the graph as an ONNX file has it.
        weights: values of the weights that the graph leaves open, by name.
        num_threads: threads for one run; 0 = one for each core.
        providers: what computes it, the preferred one first.

    Raises:
        ConfigError: the installed ONNX Runtime does not have one of the providers.
        ImportError: onnxruntime is not installed.
    """
    runtime = onnx_runtime()
    there = runtime.get_available_providers()
    for name in providers:
        if name not in there:
            raise ConfigError(
                f"providers: the installed ONNX Runtime has no such provider, got {name!r}. Give "
                f"one of {there}, or install a build of onnxruntime that has it."
            )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    names = list[str]()
    values = list[Any]()
    for name, value in weights:
        names.append(name)
        values.append(runtime.OrtValue.ortvalue_from_numpy(value))
    options.add_external_initializers(names, values)
    return runtime.InferenceSession(graph, options, providers=list(providers))
