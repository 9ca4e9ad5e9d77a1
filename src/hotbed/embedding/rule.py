# SPDX-License-Identifier: Apache-2.0
"""Rules: how the gradient of a row changes its embedding and optimizer state.

A rule is a value. Each has a slow, obvious NumPy step, `rule.reference`, which defines the
arithmetic and its order; the native core follows it in float32 (elementwise, no fused
multiply-add). `step` is the table's global step, 1 for its first update; rules with bias correction
use it for every row.

The scope says which rows a step changes: "touched" = those with a gradient (lazy), "all" = every
row of the table, "catch_up" = those with a gradient, each after replaying the steps that it missed,
which gives the bits of "all".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from hotbed import checks
from hotbed.errors import ConfigError

FloatArray = NDArray[np.floating]
Scope = Literal["touched", "all", "catch_up"]
SCOPES = ("touched", "all", "catch_up")


@dataclass(frozen=True)
class Rule(ABC):
    """Base of the rules; use `Adagrad`, `Adam`, ….

    Bad values raise `ConfigError` naming the parameter. A step with rate 0 leaves the values and
    changes the moments, as in torch; Ftrl skips it, and with `lr_inside` the values move on by
    momentum. Optimizer state is limited to the largest
    float: it never becomes infinite.

    Args:
        lr: learning rate, at least 0; a schedule may change it later.
        l2: adds l2 * w to the gradient, as torch's weight_decay. Ftrl's is proximal instead.
        l1: adds l1 * sign(w) to the gradient. Ftrl's is proximal instead.
        clip: largest norm of a row's summed gradient; None = off.
        scope: which rows a step changes: "touched", "all" or "catch_up".
    """

    lr: float
    l2: float = field(default=0.0, kw_only=True)
    l1: float = field(default=0.0, kw_only=True)
    clip: float | None = field(default=None, kw_only=True)
    scope: Scope = field(default="touched", kw_only=True)

    _num_slots: ClassVar[int] = 0
    _proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.finite_number(f"{name}.lr", self.lr, least=0)
        checks.finite_number(f"{name}.l2", self.l2, least=0)
        checks.finite_number(f"{name}.l1", self.l1, least=0)
        if self.clip is not None:
            checks.finite_number(f"{name}.clip", self.clip, above=0)
        checks.one_of(f"{name}.scope", self.scope, SCOPES)
        self._check(name)

    @abstractmethod
    def _check(self, name: str) -> None:
        """Check the fields that only this rule has."""

    @abstractmethod
    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        """Apply the rule in place to values [n, dim] and state [n, width].

        `g`: regularized gradients [n, dim].
        """

    @property
    def penalties(self) -> tuple[float, float]:
        """Return the factors of sign(w) and of w that are added to the gradient."""
        return self.l1, self.l2

    @property
    def moves_new_rows(self) -> bool:
        """Return True when an update changes a row that has not had a gradient yet.

        Such a row must not miss or repeat a step. Rules of moments alone leave it: these are zero.
        """
        return self.scope != "touched" and (self._decays() or self._proximal)

    def _decays(self) -> bool:
        """Return whether values shrink without a gradient."""
        return self.l1 > 0 or self.l2 > 0

    def state_width(self, dim: int) -> int:
        """Return the floats of optimizer state a row, laid out [slot 0: dim][slot 1: dim]…"""
        return self._num_slots * dim

    def initial_state(self, dim: int) -> NDArray[np.float32]:
        """Return the state of a new row, float32 [width]: zeros, or the initial accumulators."""
        return np.zeros(self.state_width(dim), np.float32)

    def reference(
        self,
        values: FloatArray,
        state: FloatArray,
        grads: FloatArray,
        step: int,
        lr: float | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Return (values, state) after one step, in the dtype of `values`, float32 or float64.

        The arguments are not changed.

        Args:
            values: [n, dim], a row each.
            state: [n, width].
            grads: [n, dim], already summed.
            step: the number of this step, at least 1.
            lr: the learning rate of this step (default: the rule's).

        Example: `w, s = Adagrad(lr=0.1).reference(w, s, g, step=1)`
        """
        w = values.copy()
        s = state.astype(values.dtype)
        g = grads.astype(values.dtype)
        with np.errstate(over="ignore"):
            if self.clip is not None:
                g = _clip_norm(g, w.dtype.type(self.clip))
            l1, l2 = self.penalties
            if l2:
                g = g + w.dtype.type(l2) * w
            if l1:
                g = g + w.dtype.type(l1) * np.sign(w)
            self._step(w, s, g, step, self.lr if lr is None else lr)
        return w, s


@dataclass(frozen=True)
class Sgd(Rule):
    """w -= lr * g."""

    lr: float = 0.01

    def _check(self, name: str) -> None:
        pass

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        w -= w.dtype.type(lr) * g


@dataclass(frozen=True)
class Momentum(Rule):
    """m = momentum * m + g; w -= lr * m (Polyak 1964, as torch.optim.SGD).

    With `lr_inside`, m = momentum * m + lr * g; w -= m, as in Keras and HugeCTR, whose state is -m.
    The same steps while the rate is constant; when it changes, earlier gradients keep theirs.
    """

    lr: float = 0.01
    momentum: float = 0.9
    lr_inside: bool = False

    _num_slots: ClassVar[int] = 1

    def _check(self, name: str) -> None:
        checks.finite_number(f"{name}.momentum", self.momentum, least=0, below=1)

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        within, after = _rates(w, lr, lr_inside=self.lr_inside)
        s[:] = _within(w.dtype.type(self.momentum) * s + within * g)
        w -= after * s


@dataclass(frozen=True)
class Nesterov(Rule):
    """m = momentum * m + g; w -= lr * (g + momentum * m) (Nesterov 1983).

    As torch.optim.SGD(nesterov=True). With `lr_inside`, m = momentum * m + lr * g;
    w -= lr * g + momentum * m, as in Keras and HugeCTR; see `Momentum`.
    """

    lr: float = 0.01
    momentum: float = 0.9
    lr_inside: bool = False

    _num_slots: ClassVar[int] = 1

    def _check(self, name: str) -> None:
        checks.finite_number(f"{name}.momentum", self.momentum, least=0, below=1)

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        within, after = _rates(w, lr, lr_inside=self.lr_inside)
        momentum = w.dtype.type(self.momentum)
        s[:] = _within(momentum * s + within * g)
        w -= after * (within * g + momentum * s)


def _rates(w: FloatArray, lr: float, *, lr_inside: bool) -> tuple[np.floating, np.floating]:
    """Return the factors of the gradient within the momentum, and of the step after it."""
    real = w.dtype.type
    if lr_inside:
        return real(lr), real(1.0)
    return real(1.0), real(lr)


def velocity(momentum: Any, lr: float) -> Any:
    """Return the state of `Momentum` or `Nesterov` as the step that it takes, -lr * momentum.

    Keras and HugeCTR keep this form: v = momentum * v - lr * g; w += v.

    Args:
        momentum: an array or a tensor.
        lr: learning rate of the next step.
    """
    return momentum * -lr


def momentum_of(velocity: Any, lr: float) -> Any:
    """Return the state of `Momentum` or `Nesterov` of a `velocity`.

    Raises:
        ConfigError: `lr` is 0.
    """
    if lr == 0:
        raise ConfigError(
            "momentum: a velocity does not say its momentum at a learning rate of 0, got lr=0. "
            "Give the rate of the step before."
        )
    return velocity / -lr


@dataclass(frozen=True)
class Adagrad(Rule):
    """s += g^2; w -= lr * g / (sqrt(s) + eps) (Duchi et al. 2011, as torch.optim.Adagrad)."""

    lr: float = 0.05
    eps: float = 1e-10
    initial_accumulator: float = 0.0

    _num_slots: ClassVar[int] = 1

    def _check(self, name: str) -> None:
        checks.finite_number(f"{name}.eps", self.eps, above=0)
        checks.finite_number(f"{name}.initial_accumulator", self.initial_accumulator, least=0)

    def initial_state(self, dim: int) -> NDArray[np.float32]:
        return np.full(dim, self.initial_accumulator, np.float32)

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        s[:] = _within(s + g * g)
        w -= w.dtype.type(lr) * g / (np.sqrt(s) + w.dtype.type(self.eps))


@dataclass(frozen=True)
class RowwiseAdagrad(Rule):
    """s += mean(g^2), one float a row; w -= lr / (sqrt(s) + eps) * g.

    As FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    lr: float = 0.05
    eps: float = 1e-10
    initial_accumulator: float = 0.0

    def _check(self, name: str) -> None:
        checks.finite_number(f"{name}.eps", self.eps, above=0)
        checks.finite_number(f"{name}.initial_accumulator", self.initial_accumulator, least=0)

    def state_width(self, dim: int) -> int:
        return 1

    def initial_state(self, dim: int) -> NDArray[np.float32]:
        return np.full(1, self.initial_accumulator, np.float32)

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        s[:] = _within(s + _sum_of_squares(g) / w.dtype.type(g.shape[1]))
        w -= (w.dtype.type(lr) / (np.sqrt(s) + w.dtype.type(self.eps))) * g


@dataclass(frozen=True)
class RmsProp(Rule):
    """v = alpha * v + (1 - alpha) * g^2; w -= lr * g / (sqrt(v) + eps) (Hinton 2012).

    As torch.optim.RMSprop.
    """

    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8

    _num_slots: ClassVar[int] = 1

    def _check(self, name: str) -> None:
        checks.finite_number(f"{name}.alpha", self.alpha, least=0, below=1)
        checks.finite_number(f"{name}.eps", self.eps, above=0)

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        real = w.dtype.type
        s[:] = _within(real(self.alpha) * s + real(1.0 - self.alpha) * (g * g))
        w -= real(lr) * g / (np.sqrt(s) + real(self.eps))


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba 2015, as torch.optim.Adam), with AdamW's decoupled `decay`.

    Decay: Loshchilov and Hutter 2019.

    m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g^2;
    w -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps). State: [m][v].

    `eps_hat`: eps is the paper's epsilon hat, which is added to sqrt(v) before the correction of
    its bias, as in torch.optim.SparseAdam and Keras.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    eps_hat: bool = False

    _num_slots: ClassVar[int] = 2

    def _check(self, name: str) -> None:
        checks.finite_number(f"{name}.beta1", self.beta1, least=0, below=1)
        checks.finite_number(f"{name}.beta2", self.beta2, least=0, below=1)
        checks.finite_number(f"{name}.eps", self.eps, above=0)
        checks.finite_number(f"{name}.decay", self.decay, least=0)

    def _decays(self) -> bool:
        return self.decay > 0 or super()._decays()

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        real = w.dtype.type
        dim = w.shape[1]
        m = s[:, :dim]
        v = s[:, dim:]
        if self.decay:
            w *= real(1.0 - lr * self.decay)
        m[:] = _within(real(self.beta1) * m + real(1.0 - self.beta1) * g)
        v[:] = _within(real(self.beta2) * v + real(1.0 - self.beta2) * (g * g))
        # the bias terms are computed in double precision, then rounded once
        size = real(lr / (1.0 - self.beta1**step))
        bias = math.sqrt(1.0 - self.beta2**step)
        root = real(bias)
        eps = real(self.eps / bias if self.eps_hat else self.eps)
        w -= size * m / (np.sqrt(v) / root + eps)


@dataclass(frozen=True)
class Ftrl(Rule):
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), per coordinate; sparse with l1.

    n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / lr * w; w = 0 where abs(z) <= l1, else -(z -
    sign(z) * l1) / ((beta + sqrt(n')) / lr + l2). State: [n][z]. `l1` and `l2` are those of this
    formula; gradient_l1 * sign(w) + gradient_l2 * w are added to the gradient, as by a penalty that
    is part of the loss. n starts at `initial_accumulator` (0.1, as in TensorFlow). `eps` is added
    to n under each root, as HugeCTR does from v23.04 on. Only `power=-0.5`, the paper's, is built.

    w is computed from the whole past of the row with the current rate: a change of `lr` rescales
    every row at its next step. Keep the rate constant; the first change is logged. A step with rate
    0 is skipped.
    """

    lr: float = 0.05
    beta: float = 0.0
    power: float = -0.5
    initial_accumulator: float = 0.1
    gradient_l1: float = 0.0
    gradient_l2: float = 0.0
    eps: float = 0.0

    _num_slots: ClassVar[int] = 2
    _proximal: ClassVar[bool] = True

    def _check(self, name: str) -> None:
        checks.finite_number(f"{name}.beta", self.beta, least=0)
        if self.power != -0.5:
            raise ConfigError(
                f"{name}.power: only -0.5 is built, got {self.power!r}. Leave it out."
            )
        checks.finite_number(f"{name}.initial_accumulator", self.initial_accumulator, least=0)
        checks.finite_number(f"{name}.gradient_l1", self.gradient_l1, least=0)
        checks.finite_number(f"{name}.gradient_l2", self.gradient_l2, least=0)
        checks.finite_number(f"{name}.eps", self.eps, least=0)
        if not (self.beta or self.initial_accumulator or self.l2 or self.eps):
            raise ConfigError(
                f"{name}.initial_accumulator: a zero gradient would divide by zero, got 0 with "
                "beta=0, l2=0 and eps=0. Make one of the four positive."
            )

    @property
    def penalties(self) -> tuple[float, float]:
        return self.gradient_l1, self.gradient_l2

    def initial_state(self, dim: int) -> NDArray[np.float32]:
        return np.concatenate(
            [np.full(dim, self.initial_accumulator, np.float32), np.zeros(dim, np.float32)]
        )

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, step: int, lr: float) -> None:
        real = w.dtype.type
        dim = w.shape[1]
        n = s[:, :dim]
        z = s[:, dim:]
        l1 = real(self.l1)
        rate = real(lr)
        if rate == 0:
            return
        eps = real(self.eps)
        grown = _within(n + g * g)
        root = np.sqrt(grown + eps)
        z[:] = _within(z + (g - (root - np.sqrt(n + eps)) / rate * w))
        n[:] = grown
        dense = -(z - np.sign(z) * l1) / ((real(self.beta) + root) / rate + real(self.l2))
        w[:] = np.where(np.abs(z) <= l1, real(0.0), dense)


def _within(state: FloatArray) -> FloatArray:
    """Limit optimizer state to the largest float: an infinite one would stop its lane for ever."""
    largest = np.finfo(state.dtype).max
    return np.clip(state, -largest, largest)


def _clip_norm(g: FloatArray, clip: np.floating) -> FloatArray:
    """Scale rows [n, dim] down to the norm `clip`.

    Where squares overflow, lanes are divided by the largest before they are squared.
    """
    norm = np.sqrt(_sum_of_squares(g))
    overflows = np.isinf(norm)
    largest = np.where(overflows, np.abs(g).max(axis=1, keepdims=True), g.dtype.type(1.0))
    g = g / largest
    norm = np.where(overflows, np.sqrt(_sum_of_squares(g)), norm)
    ratio = clip / np.where(norm > 0, norm, clip)
    scale = np.where(overflows, np.minimum(ratio, largest), ratio)
    return np.where(overflows | (norm > clip), g * scale, g)


def _sum_of_squares(g: FloatArray) -> FloatArray:
    """Return the sum of squares of each row, [n, 1], in the native core's order.

    Lanes i, i + 16, i + 32, … are added first; then the sixteen sums are folded in halves.
    """
    squares = np.zeros((len(g), -(-g.shape[1] // 16) * 16), g.dtype)
    squares[:, : g.shape[1]] = g * g
    lanes = np.zeros((len(g), 16), g.dtype)
    for start in range(0, squares.shape[1], 16):
        lanes = lanes + squares[:, start : start + 16]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes
