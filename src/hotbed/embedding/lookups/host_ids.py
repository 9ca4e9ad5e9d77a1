# SPDX-License-Identifier: Apache-2.0
"""Ids and gradients, checked and moved to the host, as native code reads them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import Ids, as_ids
from hotbed.errors import RowShapeError

from .layout import Feature

log = logging.getLogger("hotbed")

_INT64 = np.dtype(np.int64)
_INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


class HostIds:
    """The ids of all features of a batch on the host.

    The tensors must live as long as the native code reads from `addresses`.

    Attributes:
        values: of each feature, int64 [m].
        offsets: of each feature, int64 [n + 1] or None.
        weights: of each feature, float32 [m] or None.
        addresses: of each feature, the tuple that the native lookup takes; 0 = absent.
        num_samples: n, the same for all features.
        counted: bool [n], the samples that policies of tables count; None = all.

    Raises:
        RowShapeError: an array has a wrong shape or dtype, or does not fit the others.
    """

    def __init__(self, features: Sequence[Feature], inputs: Sequence[Ids]) -> None:
        self.values: list[Tensor] = []
        self.offsets: list[Tensor | None] = []
        self.weights: list[Tensor | None] = []
        self.addresses: list[tuple[int, int, int, int, int]] = []
        self.num_samples = -1
        self.counted: np.ndarray | None = None
        for feature, ids in zip(features, inputs, strict=True):
            values = int64(ids.values, feature.name)
            num_values = values.numel()
            num_samples = num_values
            offsets = None
            offsets_address = 0
            if ids.offsets is not None:
                offsets = int64(ids.offsets, feature.name)
                num_samples = offsets.numel() - 1
                offsets_address = offsets.data_ptr()
            weights = None
            weights_address = 0
            if ids.weights is not None:
                weights = float32(ids.weights, feature.name)
                weights_address = weights.data_ptr()
            if self.num_samples < 0:
                self.num_samples = num_samples
            if num_samples < 0 or num_samples != self.num_samples:
                raise _wrong_samples(feature, num_samples, self.num_samples)
            if weights is not None:
                _check_weights(feature, weights.numel(), num_values)
            self.values.append(values)
            self.offsets.append(offsets)
            self.weights.append(weights)
            self.addresses.append(
                (values.data_ptr(), num_values, offsets_address, weights_address, num_samples)
            )
        self.num_samples = max(self.num_samples, 0)

    def check_offsets(self, features: Sequence[Feature]) -> None:
        """Raise RowShapeError that names the feature whose offsets are wrong, if there is one."""
        for feature, values, offsets in zip(features, self.values, self.offsets, strict=True):
            if offsets is None:
                continue
            starts = offsets[0] == 0
            ends = offsets[-1] == len(values)
            falls = (offsets.diff() < 0).any()
            if not starts or not ends or falls:
                raise RowShapeError(
                    f"feature {feature.name!r}: offsets must start at 0, never fall and end at the "
                    f"number of ids, {len(values)}, got {offsets[:3].tolist()} … "
                    f"{offsets[-1].item()}. Check the batch."
                ) from None


def int64(array: Any, feature: str) -> Tensor:
    """Return ids or offsets as int64 [n] on the host."""
    plain = type(array) is np.ndarray and array.dtype is _INT64
    if plain and array.ndim == 1 and array.flags.c_contiguous:
        return torch.from_numpy(array)  # the usual case, which needs no other check
    if isinstance(array, Tensor):
        tensor = array
    else:
        tensor = torch.from_numpy(as_ids(array, f"feature {feature!r}: ids and offsets"))
    if tensor.dtype == torch.uint64:
        tensor = tensor.view(torch.int64)
    elif tensor.dtype in _INTEGERS:
        tensor = tensor.to(torch.int64)
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise RowShapeError(
            f"feature {feature!r}: expected ids and offsets as integers of shape [n], "
            f"got {tensor.dtype} {list(tensor.shape)}. Convert or flatten them."
        )
    if tensor.is_cpu and tensor.is_contiguous():
        return tensor
    if not tensor.is_cpu:
        _log_device(tensor.device, feature)
    return tensor.cpu().contiguous()


@functools.cache
def _log_device(device: torch.device, feature: str) -> None:
    """Log, once a device and feature, that a lookup waits for its ids."""
    log.warning(
        "feature %r: its ids lie on %s, so each lookup waits until they are on the host; leave ids "
        "on the host in your loader",
        feature,
        device,
    )


def shaped_ids(values: Any, feature: str) -> tuple[Ids, tuple[int, ...]]:
    """Return ids [n, ...] as `Ids` of n samples, and their shape; that of `Ids` is [m]."""
    if isinstance(values, Ids):
        return values, (len(values.values),)
    if isinstance(values, Tensor):
        tensor = values
    else:
        array = np.asarray(values)
        flat_ids = as_ids(array.reshape(-1), f"feature {feature!r}: ids")
        tensor = torch.from_numpy(flat_ids).view(array.shape)
    flat = int64(tensor.reshape(-1), feature)
    shape = tuple(tensor.shape)
    if len(shape) < 2:
        return Ids(flat), shape
    num_each = math.prod(shape[1:])
    offsets = torch.arange(shape[0] + 1, device="cpu") * num_each
    return Ids(flat, offsets), shape


def float32(array: Any, feature: str) -> Tensor:
    """Return weights as float32 [m] on the host."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype != torch.float32 or tensor.dim() != 1:
        raise RowShapeError(
            f"feature {feature!r}: expected weights as float32 of shape [m], "
            f"got {tensor.dtype} {list(tensor.shape)}. Convert them."
        )
    return tensor.detach().cpu().contiguous()


def dense_rows(grad: Tensor) -> Tensor:
    """Return a gradient as float32 rows on the host; rows may lie apart, lanes may not."""
    if grad.dtype != torch.float32 or not grad.is_cpu or grad.requires_grad:
        grad = grad.detach().to("cpu", torch.float32)
    if grad.dim() == 2:
        between_rows, between_lanes = grad.stride()
        if between_lanes == 1 and between_rows >= grad.shape[1]:
            return grad
    return grad.contiguous()


def _wrong_samples(feature: Feature, num_samples: int, expected: int) -> RowShapeError:
    if num_samples < 0:
        return RowShapeError(
            f"feature {feature.name!r}: offsets must be [samples + 1], got none. Check the batch."
        )
    return RowShapeError(
        f"feature {feature.name!r}: all features must have the same number of samples, got "
        f"{num_samples} here and {expected} before. Check the batch."
    )


def _check_weights(feature: Feature, num_weights: int, num_values: int) -> None:
    if num_weights != num_values:
        raise RowShapeError(
            f"feature {feature.name!r}: each id must have one weight, got {num_weights} "
            f"weights for {num_values} ids. Check the batch."
        )
    if feature.pooling == "max":
        raise RowShapeError(
            f"feature {feature.name!r}: max pooling takes no weights, got some. Use sum or mean."
        )
