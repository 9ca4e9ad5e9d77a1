# SPDX-License-Identifier: Apache-2.0
"""Example: an item of a dataset as the arguments of a network."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from inspect import Signature, signature
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotbed.data.batch import Batch, Ids, changed
from hotbed.embedding.device import link_to
from hotbed.embedding.lookups import Plans
from hotbed.errors import ConfigError, DataError

from .network import NetworkLookups, adapter_of

K = TypeVar("K")
CPU = torch.device("cpu")
MOST_SECONDS = 253_402_300_800
"""The year 10,000: larger numbers are milliseconds or microseconds."""
MOST_FLOAT32_SECONDS = 2**24
"""Above it, neighbours of float32 are more than a second apart."""


@dataclass(frozen=True)
class Example:
    """One batch as the arguments of the network, `network(*arguments, **keywords)`.

    Tensors are on the network's device, ids on the host. Labels, weights, times and the number of
    samples are those of all samples, also where ranks share out their features.
    """

    arguments: tuple[Any, ...]
    labels: Any  # Tensor [n], dict of label name -> Tensor [n], or None
    weight: Tensor | None
    num_samples: int
    batch: Batch | None  # that this was made from; of divided tuples, their tensors; else None
    device: torch.device = CPU
    keywords: Mapping[str, Any] = field(default_factory=dict)  # only of networks with adapters
    time: Any = None  # int64 microseconds of the samples
    plans: Plans | None = None  # of its ids, which are mapped before their lookup
    error: Exception | None = None  # why it could not be read, or its ids not be mapped ahead
    computed: Batch | None = None  # the ids that the network computes; None = those of the batch
    is_bound: bool = False  # whether the adapter of a network made the arguments of a tuple
    structure: Any = None  # of the tuple whose tensors `batch` holds
    scores: Any = None  # of its grains, where they were scored with those of other batches
    held_back: Batch | None = None  # events that came with it, which are scored and never learned

    @cached_property
    def latest(self) -> int | None:
        """Return the newest event time in microseconds; None without times."""
        if self.time is None or not len(self.time):
            return None
        return int(np.asarray(self.time).max())  # faster than torch for so few numbers

    @cached_property
    def grains(self) -> list[Example | None]:
        """The runs of samples of its batch; None is an empty one. Itself if it is not divided.

        Where the batch has no sample, the first grain has none. Grains have no plans.
        """
        return self.grains_of(None)

    def grains_of(self, numbers: Container[int] | None) -> list[Example | None]:
        """Return `grains` of these numbers, and None in the place of others; None: of all."""
        batch = self.batch
        if batch is None or not batch.grain_ends:
            return [self]
        grains: list[Example | None] = []
        for number, (first, last) in enumerate(itertools.pairwise((0, *batch.grain_ends))):
            grain = None
            is_run = first < last or not (self.num_samples or number)
            if is_run and (numbers is None or number in numbers):
                run = _own_memory(batch[first:last].at(None, batch.encoder))
                grain = self._of_run(run)
            grains.append(grain)
        return grains

    def divided(self, grains: int) -> Example:
        """Return the samples as `grains` runs, equal ones if the data has no grains; 1 = whole.

        Raises:
            ConfigError: they have other grains, or their ids are mapped already; or they are a
                tuple that cannot be divided.
        """
        batch = self.batch
        if grains == 1:
            if batch is None or not batch.grain_ends:
                return self
            return self._with_ends(batch, ())
        if batch is None:
            return self._of_tensors().divided(grains)
        if batch.plans is not None:
            raise ConfigError(
                f"grains: the ids of a batch are mapped grain by grain, got {grains} grains and a "
                "batch of hb.Ahead or hb.Insert, mapped as a whole. Give hb.Ahead(train) to fit(), "
                "or batches as they are to step()."
            )
        ends = batch.grain_ends
        if ends and len(ends) != grains:
            raise ConfigError(
                f"grains: the model has {grains}, got a batch of {len(ends)}. Call "
                f"dataset.divide({grains}) before the epoch."
            )
        if not ends:
            ends = divided_at(self.num_samples, grains)
        return self._with_ends(batch, ends)

    def _with_ends(self, batch: Batch, ends: tuple[int, ...]) -> Example:
        return self.of(changed(batch, {"grain_ends": ends}))

    def of(self, batch: Batch) -> Example:
        """Return the same samples, whose `batch` is another one."""
        changes: dict[str, Any] = {"batch": batch}
        if self.structure is None:
            changes["arguments"] = (batch,)
        other = changed(self, changes)
        other.__dict__.pop("grains", None)  # those of the samples as they were
        return other

    def _of_run(self, run: Batch) -> Example:
        """Return some of the samples: those of a run of the batch."""
        if self.structure is None:
            return _of_batch(run, self.device)
        arguments, *rest = tree_unflatten(list(run.dense.values()), self.structure)
        labels = rest[0] if rest else None
        num_samples = run.num_samples
        return Example(
            arguments, labels, None, num_samples, run, self.device, structure=self.structure
        )

    def _of_tensors(self) -> Example:
        """Return the same samples with the tensors of their tuple as a batch.

        Raises:
            ConfigError: the network has an adapter, or a value has no row for each sample.
        """
        advice = "Give a hb.Dataset, or leave grains out."
        if self.is_bound:
            raise ConfigError(
                "grains: a step by grains of a model of hb.auto needs batches of a Dataset, got a "
                f"tuple. {advice}"
            )
        parts = (self.arguments,) if self.labels is None else (self.arguments, self.labels)
        values, structure = tree_flatten(parts)
        for value in values:
            if not torch.is_tensor(value) or _length(value) != self.num_samples:
                kind = list(value.shape) if torch.is_tensor(value) else type(value).__name__
                raise ConfigError(
                    f"grains: the samples of a tuple are divided, {self.num_samples} rows of each "
                    f"of its tensors, got {kind}. {advice}"
                )
        tensors = {f"tensor {number}": value for number, value in enumerate(values)}
        batch = Batch(dense=tensors, num_samples=self.num_samples)
        return changed(self, {"batch": batch, "structure": structure})

    def planned(self, plans: Plans) -> Example:
        """Return the same samples with the plans of their lookups."""
        planned = changed(self, {"plans": plans, "error": plans.error or self.error})
        return planned if self.batch is None else planned.of(changed(self.batch, {"plans": plans}))

    def foreseen_by(self, lookups: NetworkLookups) -> Example | None:
        """Return the same samples with the ids that a network looks up; None: it must tell."""
        if self.computed is not None:
            return self
        computed = lookups.of(self)
        if computed is None:
            return None
        return self if computed is self.batch else changed(self, {"computed": computed})

    @property
    def looked_up(self) -> Batch:
        """The ids that the network looks up, after `foreseen_by`."""
        looked_up = self.batch if self.computed is None else self.computed
        assert looked_up is not None, "the ids are known"
        return looked_up

    @property
    def everything(self) -> tuple[Any, ...]:
        """Every item of the dataset, labels too: the arguments of an evaluation network."""
        items = (*self.arguments, *self.keywords.values())
        takes_batch = self.batch is not None and self.structure is None
        if takes_batch or self.labels is None:
            return items
        return (*items, self.labels)


def divided_at(num_samples: int, grains: int) -> tuple[int, ...]:
    """Return the samples before which the grains of a batch end that its data does not divide."""
    return tuple(num_samples * grain // grains for grain in range(1, grains + 1))


def prepare(
    item: Any,
    device: torch.device,
    *,
    labelled: bool,
    network: nn.Module | None = None,
    check: Callable[[Any], None] | None = None,
) -> Example:
    """Return an `Example` of a `Batch`, of a tuple of arrays or tensors, or of one array.

    Args:
        item: of the dataset.
        device: where the network computes.
        labelled: there is a loss function, so a tuple is (data, label); otherwise all items of a
            tuple are arguments.
        network: takes the data, as its adapter says. One that `hb.auto` converted takes a tuple as
            its positional arguments, and a dict by the names of its parameters.
        check: is called with the labels while they are on the host; None = nothing is.

    Raises:
        DataError: `labelled`, and the tuple has more than two items.
    """
    if isinstance(item, Batch):
        converted = _to_torch(item)
        if check is not None:
            check(_labels_of(converted))
        return _of_batch(_on(device, converted), device)
    if not isinstance(item, (tuple, list)):
        item = (item,)
    items = tuple(_to_tensors(part) for part in item)
    if check is not None and labelled:
        check(_divided(items)[1])
    items = _items_on(device, items)
    arguments, labels = _divided(items) if labelled else (items, None)
    keywords: Mapping[str, Any] = {}
    time = None
    adapter = None if network is None else adapter_of(network)
    if adapter is not None:
        data = arguments[0] if len(arguments) == 1 else arguments
        arguments, keywords = adapter.arguments_of(data)
        time = adapter.times_of(arguments, keywords)
    num_samples = _length(labels) or _length(items)
    is_bound = adapter is not None
    return Example(
        arguments, labels, None, num_samples, None, device, keywords, time, is_bound=is_bound
    )


@contextmanager
def misfits_named(network: Callable[..., Any], example: Example) -> Iterator[None]:
    """Call `network` with the arguments of an example in this block.

    Raises:
        ConfigError: its forward function does not take the arguments.
    """
    try:
        yield
    except TypeError as error:
        parameters = signature(getattr(network, "forward", network))
        reason = _reason(parameters, example, error)
        if not reason:
            raise
        raise _misfit(network, parameters, example, reason) from error


def _reason(parameters: Signature, example: Example, error: TypeError) -> str:
    """Return why `parameters` do not fit an example; "" if the error has another cause."""
    try:
        parameters.bind(*example.arguments, **example.keywords)
    except TypeError as misfit:
        return str(misfit)
    takes_tensors = example.batch is not None and Batch.__name__ in str(error)
    return str(error) if takes_tensors else ""


def _misfit(network: Any, parameters: Signature, example: Example, reason: str) -> ConfigError:
    """Return the error for a network whose forward function takes other arguments than the data."""
    data = ", ".join(type(value).__name__ for value in example.arguments) or "keywords"
    where = f"network: {type(network).__name__}.forward{parameters}"
    if isinstance(network, nn.Module) and adapter_of(network) is not None:
        return ConfigError(
            f"{where} does not take the data, got {data}: {reason}. Give a dict by the names of "
            "its parameters, or a tuple in their order."
        )
    return ConfigError(
        f"{where} does not take the data, got one argument a batch ({data}): {reason}. Convert the "
        "network with hb.auto, which gives each parameter the column of its name, or let "
        "forward(self, batch) take the whole batch."
    )


def seconds_as_times(seconds: Any, num_samples: int | None = None) -> Tensor:
    """Return seconds, one for all samples or one each, as int64 microseconds [num_samples].

    `num_samples`: None = as many as there are seconds.

    Raises:
        DataError: they are not seconds since 1970, or have another shape.
    """
    if not isinstance(seconds, Tensor | np.ndarray | np.generic | float | int | list | tuple):
        raise DataError(f"times: seconds since 1970 are needed, got {seconds!r:.60}. Give numbers.")
    times = torch.as_tensor(seconds).detach().cpu().reshape(-1)
    if num_samples is None:
        num_samples = len(times)
    if len(times) not in (1, num_samples):
        raise DataError(
            f"times: one for all samples or one each is needed, got {len(times)} for {num_samples} "
            "samples. Give as many."
        )
    _check_seconds(times)
    if times.is_floating_point():
        times = (times.double() * 1e6).round().to(torch.int64)
    else:
        times = times.to(torch.int64) * 1_000_000
    return times.expand(num_samples).contiguous()


def _check_seconds(seconds: Tensor) -> None:
    """Raise DataError if seconds are not finite, too many, or not exact in their dtype."""
    wrong = ~(seconds.double().abs() <= MOST_SECONDS)  # true for NaN, too
    if wrong.any():
        raise DataError(
            f"times: seconds since 1970 are needed, got {seconds[wrong][0].item()}. Divide "
            "milliseconds by 1e3 and microseconds by 1e6, and fill what is missing."
        )
    if seconds.dtype == torch.float32 and (seconds.abs() > MOST_FLOAT32_SECONDS).any():
        raise DataError(
            f"times: float32 holds no exact seconds above {MOST_FLOAT32_SECONDS:,}, got "
            f"{seconds.max().item():.0f}. Give int64 or float64."
        )


def _divided(items: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """Return the data and the label of an item of a dataset; None without a label."""
    if len(items) > 2:
        raise DataError(
            "data: a dataset used with a loss function must yield (data, label), got "
            f"{len(items)} items. Yield two, or leave loss_fn out and compute the loss in the "
            "network."
        )
    return items[:1], items[1] if len(items) == 2 else None


def _of_batch(batch: Batch, device: torch.device) -> Example:
    whole = batch if batch.whole is None else batch.whole
    return Example(
        (batch,),
        _labels_of(whole),
        whole.weight,
        whole.num_samples,
        batch,
        device,
        time=whole.time,
        plans=batch.plans,
    )


def _own_memory(batch: Batch) -> Batch:
    """Return a batch whose numbers lie in memory of their own.

    The bits of some products depend on alignment. Those of ids do not.
    """
    weight = batch.weight
    changes = {
        "dense": {name: values.clone() for name, values in batch.dense.items()},
        "labels": {name: values.clone() for name, values in batch.labels.items()},
        "weight": None if weight is None else weight.clone(),
    }
    return changed(batch, changes)


def _labels_of(batch: Batch) -> Any:
    """Return the labels by name, a single label itself, or None without labels."""
    labels = dict(batch.labels)
    if len(labels) == 1:
        return next(iter(labels.values()))
    return labels or None


def _to_torch(batch: Batch) -> Batch:
    """Return a batch of tensors of the host."""
    if batch.plans is not None:
        return batch  # `hb.Ahead` made it of tensors, and mapped these ids
    return batch.map_arrays(from_array)


def _on(device: torch.device, batch: Batch) -> Batch:
    """Return a batch whose columns are on a device, to which they were copied together."""
    if device == CPU:
        return batch
    columns = {("dense", name): values for name, values in batch.dense.items()}
    columns |= {("label", name): values for name, values in batch.labels.items()}
    if batch.weight is not None:
        columns["weight", ""] = batch.weight
    moved = _sent(columns, device)
    changes = {
        "dense": {name: moved["dense", name] for name in batch.dense},
        "labels": {name: moved["label", name] for name in batch.labels},
        "weight": moved.get(("weight", "")),
    }
    return changed(batch, changes)


def _items_on(device: torch.device, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items of a tuple whose tensors are on a device."""
    if device == CPU:
        return items
    tensors: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        tensors[id(tensor)] = tensor
        return tensor

    for part in items:
        _with_tensors(part, note)
    moved = _sent(tensors, device)
    return tuple(_with_tensors(part, lambda tensor: moved[id(tensor)]) for part in items)


def _sent(tensors: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
    """Return tensors on a device, by key: copies of those of the host, which travel together."""
    of_host = {k: t for k, t in tensors.items() if t.device == CPU and not t.requires_grad}
    sent = link_to(device).send_together(of_host) if of_host else {}
    return {key: sent[key] if key in sent else tensors[key].to(device) for key in tensors}


def from_array(array: Any) -> Any:
    """Return a NumPy array as a tensor, other values as they are."""
    if isinstance(array, np.ndarray):
        # torch warns of read-only arrays such as Arrow's
        if not array.flags.writeable:
            array = array.copy()
        return torch.from_numpy(array)
    return array


def _to_tensors(part: Any) -> Any:
    """Return an item of a tuple with tensors in place of arrays and numbers."""
    return _with_tensors(part, lambda tensor: tensor)


def _with_tensors(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an item of a tuple with changed tensors, which stand for arrays and numbers, too."""
    if isinstance(part, Mapping):
        return {name: _with_tensors(value, change) for name, value in part.items()}
    if type(part) is tuple:
        return tuple(_with_tensors(value, change) for value in part)
    if _is_record(part):
        values = {}
        for member in fields(part):
            if member.init:
                values[member.name] = _with_tensors(getattr(part, member.name), change)
        return replace(part, **values)
    if isinstance(part, (np.ndarray, float, int, list)):
        array = np.asarray(part)
        if array.dtype.kind in "biufc":  # texts have no tensor, and stay as they are
            part = from_array(array)
    return change(part) if torch.is_tensor(part) else part


def _is_record(part: Any) -> bool:
    """Return whether `part` is a dataclass of the user's own, whose fields hold data."""
    return is_dataclass(part) and not isinstance(part, (type, Batch, Ids))


def _length(part: Any) -> int:
    if _is_record(part):
        part = tuple(getattr(part, member.name) for member in fields(part))
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, tuple):
        lengths = [_length(item) for item in part]
        return max(lengths, default=0)
    if not hasattr(part, "__len__") or getattr(part, "ndim", 1) == 0:
        return 0
    return len(part)
