# SPDX-License-Identifier: Apache-2.0
"""TorchRec's training pipelines look for sharded collections in a trace of the model.

A converted model has none, and no trace follows its lookups. So they are leaves of the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

_PIPELINES = "torchrec.distributed.train_pipeline"


def leaf_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a module in the trace of a pipeline; None outside of such a trace."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, fx.Proxy):
            tracer: Any = value.tracer
            if type(tracer).__module__.startswith(_PIPELINES):
                path = tracer.path_of_module(module)
                return tracer.create_proxy("call_module", path, tuple(args), dict(kwargs))
    return None
