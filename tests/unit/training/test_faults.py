# SPDX-License-Identifier: Apache-2.0
"""A failed batch leaves everything as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.errors import NonFiniteGradient
from hotbed.optim.precision import AmpPrecision
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.example import prepare
from hotbed.training.step.learner import StepLearner


def poisoned(batch: hb.Batch, value: float) -> hb.Batch:
    dense = {name: values.copy() for name, values in batch.dense.items()}
    dense["x"][5] = value
    return dataclasses.replace(batch, dense=dense)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_names_table_and_id(
    value: float, dataset: Any, network: Any, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    batches = list(dataset(640))
    model.fit(batches[:5], progress=False)
    before = world.snapshot(model)
    with pytest.raises(NonFiniteGradient) as caught:
        model.fit([poisoned(batches[0], value)], progress=False)  # ids that all have rows
    assert world.same(before, world.snapshot(model))
    assert caught.value.table in ("user", "item")
    assert caught.value.id in batches[0].ids[caught.value.table].values
    model.fit(batches[5:], progress=False)
    assert np.isfinite(model.predict(batches[0])).all()


def test_a_bad_gradient_of_a_dense_parameter_is_named(
    dataset: Any, network: Any, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    batches = list(dataset(256))
    model.fit(batches, progress=False)
    handle = model.network.head.register_full_backward_hook(lambda *_: None)
    handle.remove()
    name, parameter = next(
        (n, p) for n, p in model.network.named_parameters() if n.startswith("head")
    )
    hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
    before = world.snapshot(model)
    with pytest.raises(NonFiniteGradient, match=f"dense parameter '{name}'"):
        model.fit(batches, progress=False)
    assert world.same(before, world.snapshot(model))
    hook.remove()


def test_large_finite_gradients_are_no_fault() -> None:
    net = nn.Linear(3, 1, bias=False)
    model = hb.RecModel(net, lambda outputs, labels: (outputs * 1e30).sum(), hb.Sgd(lr=1e-35))
    model.fit([(np.ones((4, 3), np.float32), np.ones(4, np.float32))], progress=False)


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "sparse"])
def test_gradients_of_every_kind_are_checked_and_stay_as_they_are(kind: str) -> None:
    network = nn.Linear(3, 1)
    data = np.ones((4, 3), np.float32)
    if kind == "sparse":
        network = nn.Embedding(7, 1, sparse=True)
        data = np.array([2, 2, 5, 6])
    else:
        network = network.to(getattr(torch, kind))
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    learner = StepLearner(network, None, optimizer, None)
    inputs = torch.from_numpy(data)
    for factor in (1.0, float("nan"), float("inf")):
        if kind != "sparse":
            inputs = inputs.to(network.weight.dtype)
        learner.backward(network(inputs).sum() * factor)
        gradients = [parameter.grad.clone() for parameter in network.parameters()]
        before = [parameter.detach().clone() for parameter in network.parameters()]
        if factor == 1.0:
            assert learner.gradients_are_finite()
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                assert torch.equal(parameter.grad.to_dense(), gradient.to_dense())
            learner.step()
        else:
            with pytest.raises(NonFiniteGradient, match="dense parameter"):
                learner.gradients_are_finite()
            assert all(map(torch.equal, network.parameters(), before))
        assert all(parameter.grad is None for parameter in network.parameters())


def test_under_loss_scaling_a_bad_batch_is_skipped_and_the_scale_falls(
    dataset: Any, network: Any, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    dense, sparse = model.learner.dense, model.learner.sparse
    scaled = StepLearner(
        model.network,
        Criterion("bce"),
        dense,
        sparse,
        precision=AmpPrecision(torch.bfloat16, scaled=True),
    )
    model.learner = scaled
    batches = list(dataset(640))
    model.fit(batches[:5], progress=False)
    assert scaled.skipped == 0
    before, scale = world.snapshot(model), scaled.network_pass.scaler.get_scale()
    model.fit([poisoned(batches[0], np.nan)], progress=False)
    assert scaled.skipped == 1
    assert scaled.network_pass.scaler.get_scale() == scale / 2
    assert world.same(before, world.snapshot(model))
    model.fit(batches[5:], progress=False)
    assert not world.same(before, world.snapshot(model))


def test_loss_scaling_leaves_the_size_of_gradients_as_it_is(dataset: Any, network: Any) -> None:
    example = prepare(next(iter(dataset(64))), torch.device("cpu"), labelled=True)
    gradients = []
    for scaled in (False, True):
        model = hb.RecModel(network(), "bce", "adam")
        dense, sparse = model.learner.dense, model.learner.sparse
        learner = StepLearner(
            model.network,
            Criterion("bce"),
            dense,
            sparse,
            precision=AmpPrecision(None, scaled=scaled),
        )
        learner.backward(learner.forward(example))
        assert learner.gradients_are_finite()
        gradients.append([parameter.grad.clone() for parameter in learner.parameters()])
    for plain, unscaled in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, unscaled)


def test_gradients_that_an_interrupted_fit_left_are_not_learned(
    dataset: Any, network: Any, world: Any
) -> None:
    class Interrupts:
        def on_gradients(self, run: Any) -> None:
            raise KeyboardInterrupt

    states = []
    for interrupted in (True, False):
        model = hb.RecModel(network(), "bce", "adam")
        batches = list(dataset(128))
        model.fit(batches, progress=False)
        kept = {name: buffer.clone() for name, buffer in model.network.named_buffers()}
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                model.fit(batches, callbacks=Interrupts(), progress=False)
            for name, buffer in model.network.named_buffers():
                buffer.copy_(kept[name])  # the forward pass itself happened
        model.fit(batches, progress=False)
        states.append(world.snapshot(model))
    assert world.same(*states)
