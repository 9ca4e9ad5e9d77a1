# SPDX-License-Identifier: Apache-2.0
"""The `solver` and `optimizer` clauses of training files become the values of the calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import knobs
from hotbed.compat.hugectr.json.optimizer import read_optimizer
from hotbed.compat.hugectr.json.solver import read_solver
from hotbed.compat.hugectr.model import LearningRateScheduler
from hotbed.errors import ConfigError

SOLVER: dict[str, Any] = {
    "lr_policy": "fixed",
    "display": 200,
    "max_iter": 2300,
    "gpu": [0, 1],
    "batchsize": 512,
    "snapshot": 1000,
    "snapshot_prefix": "./",
    "eval_interval": 100,
    "max_eval_batches": 30,
}
RATE: dict[str, Any] = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6}
ADAM: dict[str, Any] = {"type": "Adam", "update_type": "Global", "adam_hparam": RATE}


def test_solver_is_that_of_the_call() -> None:
    rate = hugectr.LearningRate(0.01, warmup_steps=5)
    optimizer = hugectr.OptParams(learning_rate=rate)
    assert read_solver(SOLVER, optimizer) == hugectr.CreateSolver(
        lr=0.01,
        warmup_steps=5,
        max_eval_batches=30,
        batchsize_eval=512,
        batchsize=512,
        vvgpu=[[0, 1]],
        fit=hugectr.FitParams(
            num_epochs=0,
            max_iter=2300,
            display=200,
            eval_interval=100,
            snapshot=1000,
            snapshot_prefix="./",
        ),
    )


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"seed": 7}, {"seed": 7}),
        ({"batchsize_eval": 64}, {"batchsize_eval": 64}),
        ({"mixed_precision": 256}, {"use_mixed_precision": True, "scaler": 256.0}),
        ({"input_key_type": "I64"}, {"i64_input_key": True}),
        ({"gpu": [[0], [0, 1]]}, {"vvgpu": ((0,), (0, 1))}),
        ({"algorithm_search": False}, {"use_algorithm_search": False}),
        ({"cuda_graph": False}, {"use_cuda_graph": False}),
        ({"eval_batches": 9, "max_eval_batches": None}, {"max_eval_batches": 9}),
        ({"max_eval_samples": 1100, "max_eval_batches": None}, {"max_eval_batches": 2}),
        (
            {"eval_metrics": ["AUC:0.8", "AverageLoss"]},
            {"metrics_spec": {hugectr.MetricsType.AUC: 0.8, hugectr.MetricsType.AverageLoss: 0.0}},
        ),
    ],
)
def test_key_of_the_solver(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = {key: value for key, value in {**SOLVER, **keys}.items() if value is not None}
    solver = read_solver(spec)
    for name, value in expected.items():
        assert getattr(solver, name) == value


def test_solver_without_iterations_learns_one_epoch() -> None:
    spec = {key: value for key, value in SOLVER.items() if key != "max_iter"}
    solver = read_solver(spec)
    assert not solver.repeat_dataset
    assert solver.fit is not None
    assert (solver.fit.num_epochs, solver.fit.max_iter) == (1, 0)


def test_solver_names_files_of_weights() -> None:
    solver = read_solver({**SOLVER, "dense_model_file": "d", "sparse_model_file": "s"})
    assert solver.files == hugectr.ParamFiles(dense_model_file="d", sparse_model_files=("s",))


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"batch_size": 5},
            "solver.batch_size: unknown key, got 'batch_size' with the value 5. Did you mean 'batchsize'",
        ),
        ({"num_epochs": 2}, "solver.num_epochs: cannot be combined with max_iter"),
        ({"max_eval_samples": 2}, "solver.max_eval_samples: cannot be combined"),
        ({"mixed_precision": 100}, "solver.mixed_precision: unknown scaler, got 100"),
        ({"mixed_precision": 128, "enable_tf32_compute": False}, "solver.mixed_precision: cannot"),
        ({"gpu": [-1]}, "solver.gpu: not numbers of devices"),
        ({"eval_metrics": ["AUC:2"]}, "the threshold is not between 0 and 1, got 'AUC:2'"),
        ({"eval_metrics": ["Auc"]}, "solver.eval_metrics: unknown name, got 'Auc'. Use one of AUC"),
        ({"input_key_type": "I16"}, "solver.input_key_type: unknown type"),
        ({"lr_policy": "poly"}, "solver.lr_policy: unknown name, got 'poly'"),
        ({"max_iter": 0}, "solver.max_iter: not a number from 1, got 0"),
        ({"display": "often"}, "display"),
    ],
)
def test_wrong_key_of_the_solver_is_rejected(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_solver({**SOLVER, **keys})


def test_missing_key_of_the_solver_is_rejected() -> None:
    for key in SOLVER:
        if key in ("max_iter", "eval_interval"):
            continue
        spec = {name: value for name, value in SOLVER.items() if name != key}
        with pytest.raises(ConfigError, match=f"solver.{key}: missing key"):
            read_solver(spec)


@pytest.mark.parametrize(
    "spec, expected",
    [
        (
            ADAM,
            hugectr.OptParams(
                beta1=0.8, beta2=0.99, epsilon=1e-6, learning_rate=hugectr.LearningRate(0.01)
            ),
        ),
        (
            {
                "type": "SGD",
                "global_update": True,
                "sgd_hparam": {
                    "learning_rate": 24.0,
                    "warmup_steps": 8000,
                    "decay_start": 48000,
                    "decay_steps": 24000,
                    "decay_power": 2.0,
                    "end_lr": 0.5,
                    "atomic_update": False,
                },
            },
            hugectr.OptParams(
                hugectr.Optimizer_t.SGD,
                atomic_update=False,
                learning_rate=hugectr.LearningRate(24.0, 8000, 48000, 24000, 2.0, 0.5),
            ),
        ),
        (
            {"type": "Nesterov", "nesterov_hparam": {"learning_rate": 1, "momentum_factor": 0.9}},
            hugectr.OptParams(
                hugectr.Optimizer_t.Nesterov,
                hugectr.Update_t.Local,
                momentum_factor=0.9,
                learning_rate=hugectr.LearningRate(1.0),
            ),
        ),
    ],
)
def test_optimizer_is_that_of_the_call(spec: dict[str, Any], expected: Any) -> None:
    assert read_optimizer(spec) == expected


def test_optimizer_of_an_embedding_may_have_no_learning_rate() -> None:
    spec = {
        "type": "Ftrl",
        "update_type": "Local",
        "ftrl_hparam": {"beta": 1, "lambda1": 0.1, "lambda2": 0.2},
    }
    optimizer = read_optimizer(spec, "layers.1.optimizer", needs_rate=False)
    assert optimizer.learning_rate is None
    assert (optimizer.beta, optimizer.lambda1, optimizer.lambda2) == (1, 0.1, 0.2)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"type": "Adagrad"}, "optimizer.type: unknown name, got 'Adagrad'. .*'AdaGrad'"),
        ({"type": "SGD"}, "optimizer.sgd_hparam: missing key"),
        ({"update_type": "Lazy"}, "optimizer.update_type: unknown name"),
        ({"sgd_hparam": {}}, "optimizer.sgd_hparam: belongs to another type, got type Adam"),
        ({"adam_hparam": {"beta1": 0.9}}, "optimizer.adam_hparam.learning_rate: missing key"),
        ({"adam_hparam": 3}, "optimizer.adam_hparam: not an object, got 3"),
        ({"lr": 3}, "optimizer.lr: unknown key"),
        ({"adam_hparam": RATE | {"learning_rate": -1}}, r"adam_hparam\.learning_rate: .*>= 0"),
        ({"adam_hparam": RATE | {"warmup_steps": 0}}, r"adam_hparam\.warmup_steps: .*got 0"),
        ({"adam_hparam": RATE | {"decay_steps": 0}}, r"adam_hparam\.decay_steps: .*got 0"),
        ({"adam_hparam": RATE | {"decay_power": 0.5}}, r"learning_rate\.decay_power: .*got 0\.5"),
    ],
)
def test_wrong_key_of_the_optimizer_is_rejected(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_optimizer({**ADAM, **keys})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"metrics_spec": {"AUC": 1.0}}, r"got 'AUC'\. Write \{hugectr\.MetricsType\.AUC: 1\.0\}"),
        ({"metrics_spec": {"auc": 1.0}}, r"expected keys of MetricsType, got 'auc'"),
        ({"lr": -0.1}, r"solver\.lr: .*>= 0, got -0\.1"),
        ({"warmup_steps": -1}, r"solver\.warmup_steps: .*got -1"),
        ({"decay_steps": -1}, r"solver\.decay_steps: .*got -1"),
        ({"decay_power": 0.0}, r"solver\.decay_power: .*>= 1, got 0"),
        ({"end_lr": -1.0}, r"solver\.end_lr: .*>= 0, got -1"),
    ],
)
def test_wrong_argument_of_a_solver_is_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hugectr.CreateSolver(**arguments)


def test_no_warmup_is_that_of_the_newest_releases() -> None:
    """Those up to v23.02 refuse 0 steps, and so do JSON files, which are of that time."""
    scheduler = LearningRateScheduler(0.5, warmup_steps=0)
    assert [scheduler.get_next() for _ in range(2)] == [0.5, 0.5]


def test_key_that_no_release_reads_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    knobs.KNOBS.logged.discard("solver.auc_threshold")
    with caplog.at_level(logging.INFO, "hotbed.compat.hugectr"):
        read_solver({**SOLVER, "auc_threshold": 0.75})
        read_solver({**SOLVER, "auc_threshold": 0.75})
    assert caplog.messages == [
        "hugectr: solver.auc_threshold has no effect, because no release reads it; eval_metrics "
        "has the threshold"
    ]
