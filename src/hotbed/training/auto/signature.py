# SPDX-License-Identifier: Apache-2.0
"""The signature of a model: names, types and shapes of the tensors in its arguments."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import config
from hotbed.data.arrow_types import Shape
from hotbed.data.batch import Batch
from hotbed.data.schema import Column, Dense, Id, Schema
from hotbed.errors import ConfigError, RowShapeError

from .leaf_names import Path, belongs_to_ids, tensors_of, title_of, unique_names, value_at
from .torchrec.jagged import Jagged

OFFSETS = "_offsets"
WEIGHTS = "_weights"

SAMPLES = "samples"
ENDS = "ends"
VALUES = "values"
FIXED = "fixed"

_COUNT = "num_samples"
"""The field of a Batch whose value a trace must not fix."""


@dataclass(frozen=True)
class Leaf:
    """A tensor among the arguments of a model.

    Attributes:
        name: the parameter, dict key or field; with its parents' names where that is not unique.
        path: the parameter, then the keys, fields and numbers that lead to the tensor.
        dtype: as torch names it, such as "int64".
        shape: without the first axis.
        axis: the size of the first axis: "samples" (n), "ends" (n + 1: offsets that include the
            last one), "values" (the ids of all bags), or "fixed" (the same for every batch; a
            tensor of one number has no axis).
        size: of the first axis in the first batch; None: the tensor is one number.
        bag: the name of the ids that these offsets or weights belong to, or None.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    axis: str
    size: int | None
    bag: str | None = None

    @staticmethod
    def of(
        name: str, path: Path, tensor: Tensor, bags: Mapping[str, str], num_samples: int
    ) -> Leaf:
        """Return the description of a tensor of a batch of `num_samples`."""
        size = None
        if tensor.dim():
            size = tensor.shape[0]
        axis = _axis(name, tensor, bags, num_samples)
        return Leaf(
            name, path, _dtype_of(tensor), tuple(tensor.shape[1:]), axis, size, bags.get(name)
        )

    @property
    def is_integer(self) -> bool:
        """Whether the tensor holds integers; booleans are none."""
        return self.dtype.startswith(("int", "uint"))


@dataclass(frozen=True, eq=False)
class Signature:
    """The tensors that a model takes, as its first batch showed them.

    Attributes:
        tensors: describes each tensor, in the order of the parameters.
        num_samples: samples of the first batch.

    Example:
        >>> signature = Signature.of(model, (users, items), {})
        >>> signature.names
        ('user', 'item')
    """

    tensors: tuple[Leaf, ...]
    num_samples: int
    _parameters: inspect.Signature
    _skeleton: Mapping[str, Any]

    @staticmethod
    def of(
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_samples: int | None = None,
    ) -> Signature:
        """Return the signature of a call `model(*args, **kwargs)`.

        Args:
            model: an ordinary module.
            args: tensors, and dicts, tuples, lists and dataclasses of them. Other values, such as
                numbers or None, are constants.
            kwargs: likewise.
            num_samples: samples of this batch; None: as the sizes of its tensors show.

        Raises:
            ConfigError: the model does not take these arguments.
        """
        parameters = inspect.signature(model.forward)
        arguments = _by_parameter(model, parameters, args, kwargs)
        tensor_at: dict[Path, Tensor] = {}

        def keep(path: Path, value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            tensor_at[path] = value
            return None

        skeleton = {}
        for name, value in arguments.items():
            skeleton[name] = _mapped(value, (name,), keep)
        paths: dict[str, Path] = {}
        tensors: dict[str, Tensor] = {}
        titles = [title_of(path, arguments) for path in tensor_at]
        for name, path in zip(unique_names(titles), tensor_at, strict=True):
            paths[name] = path
            tensors[name] = tensor_at[path]
        bags = _bags(paths, tensors)
        if num_samples is None:
            ends = {name for name, path in paths.items() if belongs_to_ids(path, arguments)}
            num_samples = _num_samples(model, tensors, bags, ends)
        leaves = []
        for name, tensor in tensors.items():
            leaves.append(Leaf.of(name, paths[name], tensor, bags, num_samples))
        return Signature(tuple(leaves), num_samples, parameters, skeleton)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each tensor."""
        return tuple(leaf.name for leaf in self.tensors)

    def __getitem__(self, name: str) -> Leaf:
        for leaf in self.tensors:
            if leaf.name == name:
                return leaf
        raise ConfigError(
            f"signature: the model takes no tensor of this name, got {name!r}. "
            f"{config.did_you_mean(name, self.names)}"
        )

    def leaves(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], needed: Collection[str] | None = None
    ) -> list[Tensor]:
        """Return the tensors of the arguments of another batch, in the order of the signature.

        Args:
            args: as the model takes them.
            kwargs: as the model takes them.
            needed: names of the tensors that must be there; None: all. Others may be missing, as
                labels are in a request, and are read as empty tensors.

        Raises:
            RowShapeError: a tensor is missing, or has another type or number of axes than in the
                first batch.
        """
        by_path = dict(tensors_of(_by_parameter(None, self._parameters, args, kwargs)))
        tensors: list[Tensor] = []
        for leaf in self.tensors:
            value: Any = by_path.get(leaf.path)
            if value is None and needed is not None and leaf.name not in needed:
                value = torch.empty(0, *leaf.shape, dtype=getattr(torch, leaf.dtype))
            _check(leaf, value)
            tensors.append(value)
        return tensors

    def find(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the tensor of this name among the arguments of a batch; None if it is not there.

        Raises:
            ConfigError: the model takes no tensor of this name.
        """
        arguments = _by_parameter(None, self._parameters, args, kwargs)
        value = value_at(arguments, self[name].path)
        return value if torch.is_tensor(value) else None

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments that hold `leaves`, one for each tensor."""
        by_path: dict[Path, Any] = {}
        for leaf, value in zip(self.tensors, leaves, strict=True):
            by_path[leaf.path] = value

        def fill(path: Path, kept: Any) -> Any:
            if path[-1] == _COUNT and isinstance(value_at(self._skeleton, path[:-1]), Batch):
                return self.num_samples_of(leaves)
            return by_path.get(path, kept)

        values = OrderedDict[str, Any]()
        for name, value in self._skeleton.items():
            values[name] = _mapped(value, (name,), fill)
        bound = inspect.BoundArguments(self._parameters, values)
        return bound.args, bound.kwargs

    def num_samples_of(self, leaves: Sequence[Any]) -> Any:
        """Return the number of samples of other leaves; a symbol in a trace."""
        for axis, extra in ((SAMPLES, 0), (ENDS, 1)):
            for leaf, value in zip(self.tensors, leaves, strict=True):
                if leaf.axis == axis:
                    return value.shape[0] - extra
        return self.num_samples

    def schema(self, names: Collection[str] | None = None) -> Schema:
        """Return the columns that a server encodes to feed these tensors.

        Integers are Id columns: one id a sample, or a list of ids where a sample has several. Other
        tensors are Dense columns of as many numbers as a sample has. Offsets and weights of bags
        belong to the column of their ids.

        Args:
            names: of the tensors to describe; None: all.

        Raises:
            ConfigError: the first axis of a tensor is not the samples of the batch.
        """
        columns: list[Column] = []
        shapes: dict[str, Shape] = {}
        weights_of: dict[str, str] = {}
        for leaf in self.tensors:
            if leaf.bag is not None and leaf.axis == VALUES:
                weights_of[leaf.bag] = leaf.name
        for leaf in self.tensors:
            if leaf.bag is not None or (names is not None and leaf.name not in names):
                continue
            if leaf.axis not in (SAMPLES, VALUES):
                raise ConfigError(
                    f"signature: the first axis of tensor {leaf.name!r} must be the samples of a "
                    f"batch, got size {leaf.size} for {self.num_samples} samples. Let the model "
                    "take a tensor with one row a sample."
                )
            shape: Shape = "value"
            pooling = "sum"
            if leaf.shape or leaf.axis == VALUES:
                shape = "list"
                pooling = "none"
            shapes[leaf.name] = shape
            if not leaf.is_integer:
                width = math.prod(leaf.shape)
                columns.append(Dense(leaf.name, width=width))
                continue
            weights = weights_of.get(leaf.name)
            if weights is not None:
                shapes[weights] = shape
            columns.append(Id(leaf.name, pooling=pooling, weights=weights))
        return Schema(columns, shapes=shapes)


def includes_last_offset(model: nn.Module) -> bool:
    """Return whether the offsets that a model takes include the last one, as its bags say.

    Raises:
        ConfigError: its bags differ.
    """
    of_modules = {}
    for path, module in model.named_modules():
        if isinstance(getattr(module, "include_last_offset", None), bool):
            of_modules[path] = module.include_last_offset
    if len(set(of_modules.values())) > 1:
        raise ConfigError(
            "signature: some bags of the model take offsets with the last one and some without it, "
            f"got include_last_offset {of_modules}. Give all bags the same include_last_offset."
        )
    return any(of_modules.values())


def _by_parameter(
    model: nn.Module | None,
    parameters: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments by parameter."""
    try:
        return dict(parameters.bind(*args, **kwargs).arguments)
    except TypeError as error:
        where = "signature" if model is None else type(model).__name__
        raise ConfigError(
            f"{where}: forward{parameters} does not take these arguments, got: {error}. Call the "
            "model with the arguments of its forward function."
        ) from None


def _mapped(value: Any, path: Path, change: Callable[[Path, Any], Any]) -> Any:
    """Return a copy of nested arguments, with each value at the end of a path changed."""
    jagged = Jagged.of(value)
    if jagged is not None:
        return jagged.with_parts(_mapped(jagged.parts, path, change))
    if isinstance(value, Mapping):
        items = {key: _mapped(item, (*path, key), change) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        mapping = copy.copy(value)
        mapping.update(items)
        return mapping
    if isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", range(len(value)))
        parts = []
        for key, item in zip(keys, value, strict=True):
            part = _mapped(item, (*path, key), change)
            parts.append(part)
        kind = type(value)
        if isinstance(keys, range):
            return kind(parts)
        return kind(*parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            part = _mapped(item, (*path, field.name), change)
            object.__setattr__(changed, field.name, part)  # a frozen one also
        return changed
    return change(path, value)


def _bags(paths: Mapping[str, Path], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, of each tensor of offsets or weights of bags, the name of the ids.

    Offsets are `<name>_offsets` beside `<name>`, or `offsets` beside the only other integers [m],
    or right behind ids whose bags they can be; weights are `<name>_weights`, or `weights` and the
    like beside them.
    """
    bags = {}
    for name, path in paths.items():
        key = str(path[-1])
        if tensors[name].dim() != 1 or not key.endswith("offsets"):
            continue
        beside: dict[str, str] = {}  # flat tensors by their own keys
        for other, place in paths.items():
            is_beside = place[:-1] == path[:-1] and other != name
            if is_beside and tensors[other].dim() == 1:
                beside[str(place[-1])] = other
        owner = key.removesuffix(OFFSETS)
        integers = [item for item, other in beside.items() if _is_integer(tensors[other])]
        if owner == key and len(integers) == 1:
            owner = integers[0]
        elif owner not in beside:
            owner = _before(name, paths, tensors)
        if owner not in beside:
            continue
        values = beside[owner]
        bags[name] = values
        for weights in (owner + WEIGHTS, "weights", "per_sample_weights"):
            other = beside.get(weights, name)
            if other != name and len(tensors[other]) == len(tensors[values]):
                bags[other] = values
    return bags


def _before(name: str, paths: Mapping[str, Path], tensors: Mapping[str, Tensor]) -> str:
    """Return the key of the ids that come right before these offsets; "" if there are none."""
    names = list(paths)
    number = names.index(name)
    if not number:
        return ""
    other = names[number - 1]
    ids = tensors[other]
    offsets = tensors[name]
    if ids.dim() != 1 or not _is_integer(ids) or not len(offsets):
        return ""
    is_sorted = bool((offsets[1:] >= offsets[:-1]).all())
    if offsets[0] != 0 or offsets[-1] > len(ids) or not is_sorted:
        return ""
    return str(paths[other][-1])


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.dtype == torch.bool)


def _num_samples(
    model: nn.Module, tensors: Mapping[str, Tensor], bags: Mapping[str, str], ends: Collection[str]
) -> int:
    """Return the number of samples, as most tensors have it in their first axis.

    `ends`: the names of offsets that include the last one.
    """
    parts = {*bags, *bags.values()}
    sizes = []
    for name, tensor in tensors.items():
        if tensor.dim() and name not in parts:
            sizes.append(tensor.shape[0])
    if sizes:
        return Counter(sizes).most_common(1)[0][0]
    offsets = [name for name in bags if _is_integer(tensors[name])]
    if not offsets:
        return 1
    counts = {len(tensors[name]) - int(name in ends) for name in offsets}
    if len(counts) > 1 or set(offsets) <= set(ends):
        return min(counts)
    return counts.pop() - int(includes_last_offset(model))


def _axis(name: str, tensor: Tensor, bags: Mapping[str, str], num_samples: int) -> str:
    """Return what the first axis of a tensor counts."""
    if not tensor.dim():
        return FIXED
    size = tensor.shape[0]
    if name in bags and _is_integer(tensor):
        return ENDS if size == num_samples + 1 else SAMPLES
    if name in bags or name in bags.values():
        return VALUES
    return SAMPLES if size == num_samples else FIXED


def _check(leaf: Leaf, value: Any) -> None:
    """Raise RowShapeError unless the tensor of a later batch has type and axes of the first."""
    expected = f"{leaf.dtype} with {_num_axes(leaf)} axes"
    received = type(value).__name__
    if torch.is_tensor(value):
        received = f"{_dtype_of(value)} with {value.dim()} axes"
    if received != expected:
        raise RowShapeError(
            f"tensor {leaf.name!r}: expected {expected}, as in the first batch, got {received}. "
            "Call the model with the same arguments for each batch."
        )


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _num_axes(leaf: Leaf) -> int:
    if leaf.size is None:
        return 0
    return 1 + len(leaf.shape)
