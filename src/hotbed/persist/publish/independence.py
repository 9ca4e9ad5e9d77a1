# SPDX-License-Identifier: Apache-2.0
"""Check before an export that the score of a candidate depends on that candidate alone.

Two made-up requests share some candidates. All scores of these must be equal, also where one of
them is alone in its request.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError

NUM_ROWS = 7
OTHER_ROWS = 11


class Request(NamedTuple):
    """The number of candidates of a made-up request, and the places of those that are shared."""

    num_rows: int
    shared: Sequence[int]


REQUESTS = (
    (Request(NUM_ROWS, (2, 4, 5)), Request(NUM_ROWS, (2, 4, 5))),
    (Request(NUM_ROWS, (2, 4, 5)), Request(OTHER_ROWS, (8, 3, 1))),
    (Request(NUM_ROWS, (NUM_ROWS - 1,)), Request(1, (0,))),
)

_EQUAL_CALLS = 1e-6
_OTHER_CANDIDATES = 1e-4  # kernels of other sizes, and running sums, round otherwise
_NUM_DRAWS = 3


@dataclass(frozen=True)
class SharedPlaces:
    """Where the candidates that requests share lie in one of them.

    Attributes:
        num_rows: candidates of the request.
        shared: the places of those candidates.
        lengths: of each list of items, the number of items of each candidate.
    """

    num_rows: int
    shared: Sequence[int]
    lengths: Sequence[Sequence[int]] = ()

    def owners(self) -> Iterator[list[int]]:
        """Yield the candidate of each entry, where entries are candidates, then of each list."""
        yield list(range(self.num_rows))
        for lengths in self.lengths:
            yield [row for row, length in enumerate(lengths) for _ in range(length)]

    def entries(
        self, other: SharedPlaces, size: int, other_size: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return the entries of the shared candidates along an axis, here and in `other`.

        Returns:
            None: the axis does not count candidates or their items.
        """
        for here, there in zip(self.owners(), other.owners(), strict=True):
            times, rest = divmod(size, max(len(here), 1))
            if times and not rest and other_size == times * len(there):
                return self._of(here, times), other._of(there, times)
        return None

    def _of(self, owners: Sequence[int], times: int) -> Tensor:
        entries: list[int] = []
        for place in self.shared:
            for number, owner in enumerate(owners):
                if owner == place:
                    entries += range(number * times, (number + 1) * times)
        return torch.tensor(entries, dtype=torch.int64)


@dataclass(frozen=True)
class Trial:
    """A made-up request: the inputs of a graph by name, and the places of shared candidates."""

    inputs: dict[str, Tensor]
    places: SharedPlaces


class Half(nn.Module):
    """A network with its lookups replaced by inputs, in order of their names."""

    network: nn.Module

    @abstractmethod
    def raw(self, *inputs: Tensor) -> Any:
        """Return the output, or several by name, before they are activated."""

    @abstractmethod
    def trial(self, num_rows: int, shared: Sequence[int], seed: int) -> Trial:
        """Return a made-up request.

        Requests of different sizes or seeds differ, but in inputs that all candidates share. The
        shared candidates have equally many items in all.
        """

    @property
    @abstractmethod
    def starts(self) -> Collection[str]:
        """Names of the inputs that say where the items of candidates begin."""


class _Scores(nn.Module):
    """Computes the scores of a half, for `functional_call`."""

    def __init__(self, half: Half) -> None:
        super().__init__()
        self.whole = half

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        return by_name(self.whole.raw(*inputs))


def by_name(outputs: Any) -> dict[str, Tensor]:
    """Return the outputs of a network by name; a single one is the prediction."""
    return outputs if isinstance(outputs, dict) else {"prediction": outputs}


def made_up_lengths(num_rows: int, shared: Sequence[int], number: int, num_lists: int) -> list[int]:
    """Return how many items each candidate has in the list of that `number`, below `num_lists`.

    The axis of a tensor is known by its size. So of NUM_ROWS candidates, no list has a multiple of
    their number in all, nor one of the items of another list. Some candidates have none where
    another size is tried.
    """
    between = NUM_ROWS - 1  # sizes between two multiples
    multiples = num_lists // between + number // between
    lengths = [3] * num_rows
    for length, place in enumerate(shared, start=1):
        lengths[place] = length
    if num_rows == OTHER_ROWS:
        lengths[0] = 0
    size = 3 * num_rows + 1 + NUM_ROWS * multiples + number % between
    lengths[-1] += size - sum(lengths)
    return lengths


def check_independence(half: Half) -> None:
    """Raise ConfigError if scores are random, or depend on the other candidates of a request."""
    compute = _Scores(half)
    parameters = {name for name, _ in compute.named_parameters()}  # a tied one by one name
    names = parameters | {name for name, _ in compute.named_buffers()}
    whole = {f"whole.{name}": value for name, value in dense_state(half).items()}
    state = {name: value for name, value in whole.items() if name in names}
    for seed in range(_NUM_DRAWS):
        weights = state if seed == 0 else _perturbed(state, parameters, seed)
        call = partial(torch.func.functional_call, compute, weights)
        _check_repeats(half, call, half.trial(NUM_ROWS, range(NUM_ROWS), seed))
        for here, there in REQUESTS:
            first = half.trial(here.num_rows, here.shared, seed)
            second = half.trial(there.num_rows, there.shared, seed + _NUM_DRAWS)
            share(first, second, half.starts)
            _check_alone(half, call, first, second)


def _perturbed(
    state: Mapping[str, Tensor], parameters: Collection[str], seed: int
) -> dict[str, Tensor]:
    """Return other weights, since those of a network that has not learned may hide an input."""
    generator = torch.Generator().manual_seed(seed)
    perturbed = dict(state)
    for name in sorted(parameters & state.keys()):
        value = state[name]
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator).to(value)
            perturbed[name] = value + 0.1 * noise
    return perturbed


def share(first: Trial, second: Trial, starts: Collection[str]) -> None:
    """Write the shared candidates of a request into another one, but not where items begin."""
    for name, values in second.inputs.items():
        source = first.inputs[name]
        if name in starts:
            continue
        for axis in range(values.dim()):
            entries = first.places.entries(second.places, source.shape[axis], values.shape[axis])
            if entries is not None:
                values.index_copy_(axis, entries[1], source.index_select(axis, entries[0]))
                break


def _check_repeats(half: Half, call: Any, trial: Trial) -> None:
    arguments = tuple(trial.inputs.values())
    runs = [call(arguments) for _ in range(2)]
    for name, before in runs[0].items():
        difference = _difference(before, runs[1][name])
        if difference > _EQUAL_CALLS:
            place, _ = _source(half, call, trial, trial)
            raise ConfigError(
                f"export: {type(half.network).__name__} cannot be served, because of {place}: two "
                f"calls with the same inputs must give the same scores, got a difference of "
                f"{difference:.2g} in output {name!r}. Use nn.Dropout, which is off in eval mode, "
                "or pass training=self.training, and draw no random numbers."
            )


def _check_alone(half: Half, call: Any, first: Trial, second: Trial) -> None:
    ours = call(tuple(first.inputs.values()))
    theirs = call(tuple(second.inputs.values()))
    for name, values in ours.items():
        pair = _shared_values(values, theirs[name], first.places, second.places)
        received = f"outputs of shapes {list(values.shape)} and {list(theirs[name].shape)}"
        if pair is not None:
            difference = _difference(*pair)
            if difference <= _OTHER_CANDIDATES:
                continue
            received = f"a difference of {difference:.2g} in output {name!r}"
        place, module = _source(half, call, first, second)
        advice = _advice(module)
        if theirs[name].shape == values.shape[1:]:
            advice = "Use squeeze(1), not squeeze(), which drops the axis of one candidate."
        raise ConfigError(
            f"export: {type(half.network).__name__} cannot be served, because of {place}: the "
            "score of a candidate must not depend on the other candidates of a request, got "
            f"{received}. {advice}"
        )


def _shared_values(
    first: Tensor, second: Tensor, here: SharedPlaces, there: SharedPlaces
) -> tuple[Tensor, Tensor] | None:
    """Return the parts of two tensors that belong to shared candidates, on all of their axes.

    Returns:
        None: the shapes differ otherwise.
    """
    if first.dim() != second.dim():
        return None
    for axis in range(first.dim()):
        entries = here.entries(there, first.shape[axis], second.shape[axis])
        if entries is not None:
            first = first.index_select(axis, entries[0])
            second = second.index_select(axis, entries[1])
    return (first, second) if first.shape == second.shape else None


def differ(ours: Tensor, theirs: Tensor, first: Trial, second: Trial) -> bool:
    """Return whether shared candidates have other values in tensors of two requests."""
    pair = _shared_values(ours, theirs, first.places, second.places)
    return pair is not None and _difference(*pair) > _OTHER_CANDIDATES


def _difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference, relative to 1 or to the largest value if that is more."""
    ours = first.double()
    theirs = second.double()
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(is_same.all()):
        return 0.0
    scale = max(1.0, float(ours.nan_to_num(0, 0, 0).abs().max()))
    return float((ours - theirs)[~is_same].abs().nan_to_num(nan=torch.inf).max()) / scale


# --- which layer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Event:
    """The tensors that went into a layer or came out of it, its name and that of its caller."""

    layer: str
    caller: str
    tensors: list[Tensor]


def _source(half: Half, call: Any, first: Trial, second: Trial) -> tuple[str, nn.Module]:
    """Return the layer after which shared candidates differ first, in words and as a module."""
    layers = dict(half.network.named_modules())
    trails = []
    for trial in (first, second):
        trail: list[_Event] = []
        with _recorded(layers, trail):
            call(tuple(trial.inputs.values()))
        trails.append(trail)
    name = ""
    for ours, theirs in zip(*trails, strict=False):
        if ours.layer != theirs.layer:
            break
        pairs = zip(ours.tensors, theirs.tensors, strict=False)
        if any(differ(here, there, first, second) for here, there in pairs):
            name = ours.caller
            break
    return (f"layer {name!r}" if name else "its operations"), layers[name]


def _recorded(layers: Mapping[str, nn.Module], trail: list[_Event]) -> ExitStack:
    """Record what goes into layers and comes out, until the returned stack is closed."""
    running = [""]

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        trail.append(_Event(name, running[-1], list(_tensors([args, kwargs]))))
        running.append(name)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        trail.append(_Event(name, name, list(_tensors(output))))

    hooks = ExitStack()
    for name, module in layers.items():
        entry = module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
        hooks.callback(entry.remove)
        hooks.callback(module.register_forward_hook(partial(leave, name)).remove)
    return hooks


def _tensors(values: Any) -> Iterator[Tensor]:
    if torch.is_tensor(values):
        yield values.detach().clone()
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(values):
        yield from _tensors([getattr(values, field.name) for field in dataclasses.fields(values)])


def _advice(module: nn.Module) -> str:
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    for part in module.modules() if is_of_torch else ():
        if getattr(part, "track_running_stats", True) is False:
            return "Give that layer track_running_stats=True."
        if getattr(part, "track_running_stats", False) and part.training:
            return "Leave that layer in eval mode."
        if getattr(part, "batch_first", True) is False:
            return "Give that layer batch_first=True: axis 0 of its input holds the candidates."
    return "Compute over the other axes: axis 0 holds the candidates."
