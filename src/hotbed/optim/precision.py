# SPDX-License-Identifier: Apache-2.0
"""Mixed precision and compilation: the meaning of `amp_level` and `compile` of a `RecModel`.

| amp_level | CPU                                          | other devices                        |
|-----------|----------------------------------------------|--------------------------------------|
| O0        | float32                                      | float32                              |
| O1, O2    | bfloat16 autocast; norms, loss, rows float32 | autocast in the type that torch      |
|           |                                              | chooses for the device; float16,     |
|           |                                              | which CUDA has, with dynamic loss    |
|           |                                              | scale                                |
| O3        | dense parameters and arithmetic in bfloat16  | the same; no loss scaling            |
| auto      | O0, with one log line                        | O2                                   |

`compile` compiles the training step: `torch.compile(network, mode=..., dynamic=True)`.

Neither promises a speedup; `docs/training.md` gives the measurements. Rows of tables are float32
at all levels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hotbed import checks
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

log = logging.getLogger("hotbed")

AMP_LEVELS = ("O0", "O1", "O2", "O3", "auto")


@dataclass(frozen=True)
class AmpPrecision:
    """The number format in which the dense network computes.

    `compute`: the autocast dtype (None = no autocast). `scaled`: with dynamic loss scaling.
    `convert`: dense parameters are stored in `compute`, too.
    """

    compute: torch.dtype | None = None
    scaled: bool = False
    convert: bool = False

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass runs."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)

    def apply(self, network: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Convert the dense parameters and float buffers of `network` in place, if `convert`."""
        if not self.convert or self.compute is None:
            return
        for tensor in [*parameters, *network.buffers()]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.compute)
        for module in network.modules():
            # autocast lets norms compute in the dtype of their input, which must be that of their
            # weights
            is_norm = "Norm" in type(module).__name__
            has_weights = next(module.parameters(recurse=False), None) is not None
            is_cast = _cast_inputs in module._forward_pre_hooks.values()
            if is_norm and has_weights and not is_cast:
                module.register_forward_pre_hook(_cast_inputs)


def _cast_inputs(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters(recurse=False)).dtype
    return tuple(
        a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments
    )


def precision(level: str, device: torch.device) -> AmpPrecision:
    """Return the precision of an `amp_level` on a device.

    Raises:
        ConfigError: the level is unknown, or torch has no autocast for the device.

    >>> precision("O2", torch.device("cpu"))
    AmpPrecision(compute=torch.bfloat16, scaled=False, convert=False)
    """
    checks.one_of("amp_level", level, AMP_LEVELS, did_you_mean(str(level), AMP_LEVELS))
    if level == "auto":
        level = "O2"
        if device.type == "cpu":
            level = "O0"
            log.info(
                "amp_level='auto' on %s: O0, float32 throughout; amp_level='O2' asks for bfloat16",
                device.type,
            )
    if level == "O0":
        return AmpPrecision()
    if level == "O3":
        return AmpPrecision(torch.bfloat16, convert=True)
    if not torch.amp.is_autocast_available(device.type):
        raise ConfigError(
            f"amp_level: torch has no mixed precision for devices of type {device.type!r}, got "
            f"{level!r}. Give 'O0', or 'O3' for bfloat16 throughout."
        )
    compute = torch.get_autocast_dtype(device.type)
    return AmpPrecision(compute, scaled=compute is torch.float16)


@dataclass(frozen=True)
class Compile:
    """Settings of `torch.compile` for the training step: `RecModel(compile=hb.Compile())`."""

    mode: str = "default"
    dynamic: bool | None = True
    fullgraph: bool = False
    backend: str = "inductor"

    def compiled(self, network: nn.Module) -> nn.Module:
        """Return the compiled `network`; it shares the parameters of the original."""
        compiled = torch.compile(
            network,
            mode=self.mode,
            dynamic=self.dynamic,
            fullgraph=self.fullgraph,
            backend=self.backend,
        )
        return cast(nn.Module, compiled)
