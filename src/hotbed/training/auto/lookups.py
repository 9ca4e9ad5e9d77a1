# SPDX-License-Identifier: Apache-2.0
"""What nn.Embedding and nn.EmbeddingBag become: lookups in a table with torch's own arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import CountedTimes, Ids
from hotbed.embedding.lookups import Feature, FeatureLayout, Plan, Pooled
from hotbed.embedding.modules import TableModule
from hotbed.embedding.modules.compiled import alive
from hotbed.embedding.modules.state import EXTRA
from hotbed.embedding.modules.transforms import check_transforms
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, RowShapeError
from hotbed.training.step.turns import Turns

from .rows import load_weight
from .torchrec.pipeline import leaf_of


class WeightMoved(ConfigError, AttributeError):
    """The weight of an embedding was read, but a table holds its rows."""


ASKED = (
    "device",
    "dim",
    "dtype",
    "element_size",
    "is_cuda",
    "is_floating_point",
    "layout",
    "ndim",
    "nelement",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "numel",
    "requires_grad",
    "shape",
    "size",
)
"""Attributes of a weight that has moved which can still be read: none depends on its values."""


class MovedWeight(nn.Parameter):
    """What the parameter of a moved embedding becomes: reading its numbers raises WeightMoved.

    Code may have a reference to the parameter, such as a list of what it penalizes. Its values
    would never change again. Its shape, type and device can still be asked for.
    """

    path: str

    @staticmethod
    def retire(weight: Tensor, path: str) -> None:
        """Turn the weight of the embedding at `path` into one; free its values."""
        weight.grad = None
        weight.data = weight.data.new_zeros(1).expand(weight.shape)
        weight.__class__ = MovedWeight
        weight.__dict__["path"] = path

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(func) in ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        every = [*args, *(kwargs or {}).values()]
        flat = [item for value in every for item in (value if isinstance(value, list) else [value])]
        path = next((item.__dict__["path"] for item in flat if type(item) is cls), "embedding")
        raise weight_moved(path)

    def __deepcopy__(self, memo: dict[int, Any]) -> MovedWeight:
        return self


def name_of(func: Any) -> str:
    """Return the name of a function of torch, or of the attribute of a tensor that it gets."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    return name


def weight_moved(path: str) -> WeightMoved:
    """Return the error of a read of a weight that has moved."""
    return WeightMoved(
        f"{path}.weight: since hb.auto a table holds the rows of this embedding, got a read of its "
        f"weight. Give hb.auto tables={{{path!r}: None}}, which keeps the embedding as it is."
    )


@dataclass(frozen=True, eq=False)
class TimesOfIds:
    """Returns the times of the samples of a batch for the samples of a lookup's ids.

    Attributes:
        path: where the embedding lies in the model.
        table: of its rows.
    """

    path: str
    table: Table

    def __call__(self, time: Any, num_samples: int) -> Any:
        if isinstance(time, CountedTimes):
            times = self(time.time, num_samples)
            return CountedTimes(times, self._spread(time.counted, num_samples))
        if time is None and self.table.needs_times:
            raise ConfigError(
                f"{self.path}: the eviction of its table needs times, got none. Give hb.auto "
                "times='name of an argument' and call the model, not model.forward, or count "
                "steps: hb.Ttl(steps=…)."
            )
        is_dated = self.table.needs_times or self.table.keeps_times
        return self._spread(time, num_samples) if is_dated else None

    def _spread(self, values: Any, num_samples: int) -> Tensor | None:
        """Return a value for each of the samples, [num_samples]."""
        if values is None:
            return None
        of_batch = torch.as_tensor(values).reshape(-1)
        if len(of_batch) in (1, num_samples):
            return of_batch.expand(num_samples)
        if not len(of_batch) or num_samples % len(of_batch):
            raise RowShapeError(
                f"{self.path}: expected a whole number of ids or bags for each of the "
                f"{len(of_batch)} times, got {num_samples}. Give a time for each of the first axis."
            )
        return of_batch.repeat_interleave(num_samples // len(of_batch))


class MovedLookup(TableModule):
    """Base of what nn.Embedding and nn.EmbeddingBag become.

    Each is also of torch's class, since code of a model may ask for it with isinstance.

    Attributes:
        path: where it lies in the model.
        num_embeddings: rows of the weight that it was made from; its table may hold more.
        embedding_dim: lanes of a row.
        padding_idx: the id that takes no gradient, and that bags leave out, or None.
        unbounded: whether the ids come from `computed` instead of the argument.
        has_raw_ids: whether row i of the weight was not that of id i: managed collisions are gone.
        computed: of the next lookups, in the order of the forward pass, without `% bins`.
        turns: what was mapped for the lookups of this forward pass in train mode, their rows or
            their plans; None = each lookup maps its ids.
        times: int64 microseconds of the samples of this forward pass; None = there are none.
        performed: number of lookups in train mode so far.
    """

    def __init__(
        self,
        path: str,
        table: Table,
        source: nn.Embedding | nn.EmbeddingBag,
        pooling: str,
        buckets: Sequence[int] = (),
    ) -> None:
        feature = Feature(table.name, table.name, pooling)
        times_of = TimesOfIds(path, table)
        super().__init__(FeatureLayout([table], [feature], buckets, times_of))
        self._times_of = times_of
        table.undated = True  # its rows get a time when the first batch comes
        self.path = path
        self.num_embeddings = source.num_embeddings
        self.embedding_dim = source.embedding_dim
        self.padding_idx = source.padding_idx
        self.sparse = source.sparse
        self.max_norm: float | None = None
        self.norm_type = source.norm_type
        self.scale_grad_by_freq = False
        self.unbounded = False
        self.has_raw_ids = False
        self.computed: deque[Tensor] = deque()
        self.turns: Turns[Tensor | Plan | None] | None = None
        self.times: Any = None
        self.performed = 0
        if not source.weight.is_meta:
            self.to(source.weight.device)
        self.train(source.training)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "pooling": self.features[0].pooling,
            "padding_idx": self.padding_idx,
            "unbounded": self.unbounded,
        }

    @abstractmethod
    def as_ids(
        self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Ids:
        """Return the arguments of a lookup as ids: flat, with all offsets, without padding.

        Raises:
            RowShapeError: their shapes do not fit.
        """

    @abstractmethod
    def pooled_rows(self, ids: Ids, rows: Tensor) -> Pooled:
        """Return the results of a lookup from the rows of its ids, [m, dim]; see `pool`.

        They are on the device of the rows, the ids may be on the host.
        """

    def plain_weight(self) -> Tensor:
        """Return what evaluation reads for the ids of the weight, [num_embeddings, dim]."""
        rows = self.tables[0].lookup(np.arange(self.num_embeddings))
        return torch.from_numpy(rows).to(self._device.device)

    def _look_up(
        self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Ids, tuple[Tensor, list[Tensor]]]:
        """Return the ids that are looked up, and the results; see `TableModule.pool`."""
        check_transforms(self.tables, input)
        self.performed += self.training
        if self.unbounded:
            input = self._unbounded_ids(input)
        ids = self.as_ids(input, offsets, weights)
        share = None
        if self.turns is not None and self.training:
            share = self.turns.take(self.path, ids)
        if isinstance(share, Tensor):
            return ids, self.pooled_rows(ids, share)
        times = None
        if self.training and share is None:
            times = self._times_of(self.times, len(ids))
        return ids, self.pool([ids], times, share)

    def _unbounded_ids(self, input: Tensor) -> Tensor:
        """Return the ids of a lookup without the `% bins` at their end."""
        if not self.computed:
            raise ConfigError(
                f"{self.path}: its ids are computed from the arguments of the whole model "
                "(unbounded), got a lookup outside of its forward pass. Call the model that "
                "hb.auto returned."
            )
        ids = self.computed.popleft()
        if ids.shape != input.shape:
            raise ConfigError(
                f"{self.path}: expected ids of shape {list(ids.shape)}, which were computed from "
                f"the batch, got {list(input.shape)}. Leave the path out of unbounded, or compute "
                "the ids from the batch alone."
            )
        return ids

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a table, or the weight that the embedding had before it moved."""
        weight = state_dict.get(prefix + "weight")
        if weight is None or prefix + EXTRA in state_dict:
            super()._load_from_state_dict(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
            return
        if self.has_raw_ids:
            error_msgs.append(
                f"{prefix}weight: its table has rows of raw ids, got a weight of remapped ones. "
                "Load the model before hb.auto."
            )
            return
        shape = (self.num_embeddings, self.embedding_dim)
        if tuple(weight.shape) != shape:
            error_msgs.append(
                f"{prefix}weight: expected the shape {shape}, got {tuple(weight.shape)}."
            )
            return
        load_weight(self.tables[0], weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise weight_moved(self.path)
        super().__setattr__(name, value)


class Weightless(nn.Module):
    """Ends the chain of constructors before that of nn.Embedding, which would make a weight."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class MovedEmbedding(MovedLookup, Weightless, nn.Embedding):
    """nn.Embedding over a table: ids of any shape [...] -> rows [..., dim]."""

    def __init__(
        self, path: str, table: Table, source: nn.Embedding, buckets: Sequence[int] = ()
    ) -> None:
        super().__init__(path, table, source, "none", buckets)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the ids; the row of `padding_idx` takes no gradient."""
        leaf: Tensor | None = leaf_of(self, (input,), {})
        if leaf is not None:
            return leaf
        ids, (_, sequences) = self._look_up(input)
        rows = sequences[0]
        if self.padding_idx is not None and rows.requires_grad:
            is_padding = (ids.values == self.padding_idx).to(rows.device)
            rows = torch.where(is_padding[:, None], rows.detach(), rows)
        return rows.view(*input.shape, self.embedding_dim)

    def as_ids(
        self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Ids:
        return Ids(input.reshape(-1))

    def pooled_rows(self, ids: Ids, rows: Tensor) -> Pooled:
        return rows[:0], [rows]


class MovedEmbeddingBag(MovedLookup, Weightless, nn.EmbeddingBag):
    """nn.EmbeddingBag over a table: bags of ids -> pooled rows [n, dim]."""

    def __init__(
        self, path: str, table: Table, source: nn.EmbeddingBag, buckets: Sequence[int] = ()
    ) -> None:
        super().__init__(path, table, source, source.mode, buckets)
        self.mode = source.mode
        self.include_last_offset = source.include_last_offset

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return the pooled rows of each bag, as nn.EmbeddingBag does."""
        leaf: Tensor | None = leaf_of(self, (input, offsets, per_sample_weights), {})
        if leaf is not None:
            return leaf
        _, (flat, _) = self._look_up(input, offsets, per_sample_weights)
        return flat

    def as_ids(
        self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Ids:
        self._check_shapes(input, offsets, weights)
        if offsets is None:
            num_bags, length = input.shape
            offsets = length * torch.arange(num_bags + 1, device=input.device)
            input = input.reshape(-1)
            if weights is not None:
                weights = weights.reshape(-1)
        elif not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(input)])])
        if self.padding_idx is None:
            return Ids(input, offsets, weights)
        stays = input != self.padding_idx
        before = torch.zeros(len(input) + 1, dtype=torch.int64, device=input.device)
        torch.cumsum(stays, 0, out=before[1:])
        if weights is not None:
            weights = weights[stays]
        return Ids(input[stays], before[offsets], weights)

    def pooled_rows(self, ids: Ids, rows: Tensor) -> Pooled:
        every_row = torch.arange(len(rows), device=rows.device)
        assert ids.offsets is not None, "ids of bags have offsets"
        pooled = nn.functional.embedding_bag(
            every_row,
            rows,
            ids.offsets.to(rows.device),
            mode=self.mode,
            per_sample_weights=None if ids.weights is None else ids.weights.to(rows.device),
            include_last_offset=True,
        )
        return pooled, []

    def _check_shapes(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
        if input.dim() != (2 if offsets is None else 1):
            shape = "[n, k] without offsets, [m] with offsets"
            raise RowShapeError(
                f"{self.path}: expected ids of shape {shape}, got {list(input.shape)}. Reshape "
                "them."
            )
        if weights is None:
            return
        if weights.shape != input.shape:
            raise RowShapeError(
                f"{self.path}: expected per_sample_weights of the shape of the ids, "
                f"{list(input.shape)}, got {list(weights.shape)}. Reshape them."
            )
        if self.mode != "sum":
            raise ConfigError(
                f"{self.path}: torch takes per_sample_weights in mode 'sum' only, got "
                f"{self.mode!r}. Leave them out."
            )


def become(source: Any, moved: MovedLookup) -> None:
    """Turn an embedding into `moved`, which was made from it.

    The object stays: lists and attributes that refer to it, its hooks, and attributes that were set
    on it.
    """
    source.__dict__["weight"] = source._parameters.pop("weight")
    attributes = {**moved.__dict__}
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        entries = attributes.pop(name)
        getattr(source, name).update(entries)
    for name in source.__dict__:
        if name.startswith("_"):
            attributes.pop(name, None)  # torch's own, such as hooks
    source.__class__ = type(moved)
    source.__dict__.update(attributes)
    source.number = id(source)
    alive[source.number] = source
