# SPDX-License-Identifier: Apache-2.0
"""TorchRec's jagged tensors among the arguments of a model, as the ids of their features.

TorchRec is not imported here: a value can be one of its own only after the user's code has.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import Batch, Ids
from hotbed.errors import ConfigError

MODULE = "torchrec.sparse.jagged_tensor"
KEYED_JAGGED = "KeyedJaggedTensor"
JAGGED = "JaggedTensor"
KEYED = "KeyedTensor"


def class_named(name: str) -> Any:
    """Return TorchRec's class of this name, or None while TorchRec is not imported."""
    return getattr(sys.modules.get(MODULE), name, None)


def is_class(annotation: Any, name: str) -> bool:
    """Return whether an annotation is TorchRec's class of this name."""
    return annotation is not None and annotation is class_named(name)


@dataclass(frozen=True)
class Jagged:
    """What a value of TorchRec holds.

    Attributes:
        name: of its class.
        parts: of a KeyedJaggedTensor the `Ids` of each key, of a JaggedTensor its `Ids`, and of a
            KeyedTensor the tensor [n, dim] of each key.
    """

    name: str
    parts: Any

    @staticmethod
    def of(value: Any) -> Jagged | None:
        """Return the parts of a value of TorchRec; None for other values.

        Raises:
            ConfigError: its features have different numbers of samples.
        """
        if isinstance(value, Jagged):
            return value
        if MODULE not in sys.modules:
            return None
        for name, parts_of in _PARTS.items():
            if isinstance(value, class_named(name)):
                return Jagged(name, parts_of(value))
        return None

    def with_parts(self, parts: Any) -> Any:
        """Return a value of TorchRec with other parts; a `Jagged` if they are not tensors."""
        if _has_tensors(parts):
            return _BUILD[self.name](parts)
        return Jagged(self.name, parts)


def keyed_jagged(features: Mapping[str, Ids]) -> Any:
    """Return a KeyedJaggedTensor of features, of tensors: none of its parts is computed later.

    If some features have weights, those of the others are 1.
    """
    jagged_tensor = class_named(JAGGED)
    is_weighted = any(ids.weights is not None for ids in features.values())
    parts: dict[str, Any] = {}
    for key, ids in features.items():
        weights = ids.weights
        if is_weighted and weights is None:
            weights = torch.ones(ids.values.shape, device=ids.values.device)
        parts[key] = jagged_tensor(
            values=ids.values, weights=weights, lengths=ids.lengths(), offsets=ids.offsets
        )
    num_samples = next(iter(parts.values())).lengths().shape[0]
    sizes = [part.values().shape[0] for part in parts.values()]
    weights = None
    if is_weighted:
        weights = torch.cat([part.weights() for part in parts.values()])
    return class_named(KEYED_JAGGED)(
        keys=list(parts),
        values=torch.cat([part.values() for part in parts.values()]),
        weights=weights,
        lengths=torch.cat([part.lengths() for part in parts.values()]),
        stride=num_samples,
        stride_per_key=[num_samples] * len(parts),
        length_per_key=sizes,
        offset_per_key=list(accumulate(sizes, initial=0)),
        jt_dict=parts,
    )


def to_kjt(batch: Batch, keys: Sequence[str]) -> Any:
    """Return ids of a batch as TorchRec's KeyedJaggedTensor.

    Args:
        batch: of NumPy arrays or tensors.
        keys: names of its id columns, in the order of the result's keys.

    Returns:
        A `torchrec.KeyedJaggedTensor` with int64 values. If a column has weights, the result has
        weights, which are 1 for columns without them.

    Raises:
        ConfigError: the batch has no id column of a name, or there are no keys.
        ImportError: TorchRec is not installed.

    Example:
        >>> from hotbed.training.auto import to_kjt
        >>> for batch in dataset:
        ...     features = to_kjt(batch, ["user", "movie"])
        ...     logits = model(dense_of(batch), features)
    """
    importlib.import_module(MODULE)  # the caller asks for a value of its class
    if not keys:
        raise ConfigError("to_kjt.keys: expected one key or more, got none. Name id columns.")
    features = {}
    for key in keys:
        if key not in batch.ids:
            raise ConfigError(
                f"to_kjt.keys: the batch must have an id column of each name, got {key!r} for "
                f"columns {list(batch.ids)}. Name a column."
            )
        features[key] = ids_with_offsets(batch.ids[key])
    return keyed_jagged(features)


def from_kjt(features: Any) -> dict[str, Ids]:
    """Return the ids of each key of TorchRec's KeyedJaggedTensor, as arrays for a `hb.Batch`.

    Args:
        features: a `torchrec.KeyedJaggedTensor`, all of whose features have the same samples.

    Raises:
        ConfigError: it is something else, or its features have different numbers of samples.

    Example:
        >>> from hotbed.training.auto import from_kjt
        >>> batch = hb.Batch(from_kjt(features), {"dense": dense}, {"clicked": clicked})
    """
    parts = Jagged.of(features)
    if parts is None or parts.name != KEYED_JAGGED:
        raise ConfigError(
            f"from_kjt: a KeyedJaggedTensor is needed, got {type(features).__name__}. Give the "
            "sparse features of a batch."
        )
    return {key: ids.map_arrays(np.asarray) for key, ids in parts.parts.items()}


def as_tensor(values: Any) -> Tensor:
    """Return an array as a tensor that shares its memory, if it can be written."""
    if torch.is_tensor(values):
        return values
    return torch.from_numpy(np.require(values, requirements="W"))


def ids_with_offsets(ids: Ids) -> Ids:
    """Return ids as tensors with explicit offsets."""
    tensors = ids.map_arrays(as_tensor)
    if tensors.offsets is not None:
        return tensors
    return Ids(tensors.values, torch.arange(len(tensors) + 1), tensors.weights)


def jagged(ids: Ids) -> Any:
    """Return a JaggedTensor of ids, which are tensors with offsets."""
    return class_named(JAGGED)(
        values=ids.values, weights=ids.weights, lengths=ids.lengths(), offsets=ids.offsets
    )


def _ids_of(value: Any) -> Ids:
    return Ids(value.values(), value.offsets(), value.weights_or_none())


def _features_of(value: Any) -> dict[str, Ids]:
    if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
        raise ConfigError(
            "KeyedJaggedTensor: its features must have one number of samples, got a batch that "
            f"varies by feature (stride_per_key {value.stride_per_key()}). Build it without "
            "stride_per_key_per_rank and inverse_indices."
        )
    return {key: _ids_of(part) for key, part in value.to_dict().items()}


def _tensors_of(value: Any) -> dict[str, Tensor]:
    return dict(value.to_dict())


def _keyed(tensors: Mapping[str, Tensor]) -> Any:
    widths = [tensor.shape[1] for tensor in tensors.values()]
    return class_named(KEYED)(list(tensors), widths, torch.cat(list(tensors.values()), dim=1))


def _has_tensors(parts: Any) -> bool:
    """Return whether parts are those of a value: a signature keeps them without their tensors."""
    if isinstance(parts, Ids):
        return parts.values is not None
    if isinstance(parts, Mapping):
        return all(_has_tensors(part) for part in parts.values())
    return parts is not None


_PARTS: dict[str, Callable[[Any], Any]] = {
    KEYED_JAGGED: _features_of,
    JAGGED: _ids_of,
    KEYED: _tensors_of,
}
_BUILD: dict[str, Callable[[Any], Any]] = {
    KEYED_JAGGED: keyed_jagged,
    JAGGED: jagged,
    KEYED: _keyed,
}
