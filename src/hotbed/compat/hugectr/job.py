# SPDX-License-Identifier: Apache-2.0
"""Training files: `{"solver": …, "optimizer": …, "layers": […]}`, as `huge_ctr --train` read them.

`hotbed train config.json` finds `dialect` by the entry-point group `hotbed.jobs`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotbed.compat.hugectr.clauses import FitParams, Graph, OptParams, Solver
from hotbed.compat.hugectr.enums import MetricsType
from hotbed.compat.hugectr.json.keys import needed, read_clause
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.json.optimizer import read_optimizer
from hotbed.compat.hugectr.json.solver import read_solver
from hotbed.errors import DataError
from hotbed.job.dialect import Dialect

if TYPE_CHECKING:
    from hotbed.compat.hugectr.model import Model

CLAUSES = ("solver", "optimizer", "layers")
"""Clauses that a training file has to have. `inference` may stand beside them: nothing reads it."""


@dataclass(frozen=True)
class TrainingFile:
    """What a training file says."""

    solver: Solver
    optimizer: OptParams
    graph: Graph


def read_training(spec: Mapping[str, Any]) -> TrainingFile:
    """Return what a training file says.

    Raises:
        ConfigError: a key or a value is wrong; the message starts with its place.
    """
    values = read_clause(spec, "config", [*CLAUSES, "model_name"])
    needed(values, "config", CLAUSES)
    optimizer = read_optimizer(values["optimizer"])
    return TrainingFile(read_solver(values["solver"], optimizer), optimizer, read_graph(values))


def recognises(spec: Mapping[str, Any]) -> bool:
    """Return whether a file is a training file, a graph or a model to serve, of HugeCTR."""
    layers = spec.get("layers")
    if not isinstance(layers, list) or not layers:
        return False
    first = layers[0]
    return isinstance(first, Mapping) and first.get("type") == "Data"


def train(spec: Mapping[str, Any]) -> None:
    """Train what a training file says, and print what `huge_ctr --train` prints."""
    from hotbed.compat.hugectr.model import Model

    train_file(read_training(spec), Model)


dialect = Dialect("HugeCTR", recognises, train)


def train_file(file: TrainingFile, model_class: type[Model]) -> Model:
    """Return a model that has learned as a training file says.

    Args:
        file: the training file.
        model_class: makes the model.
    """
    model = model_class(file.solver, file.optimizer)
    model.add(file.graph.input)
    for clause in (*file.graph.embeddings, *file.graph.layers):
        model.add(clause)
    model.compile()
    _Loop(model).run()
    return model


class _Loop:
    """The loop of `huge_ctr --train`.

    Iterations are counted from 0, and nothing is displayed or evaluated after the first one. An
    AUC that equals the threshold ends training; in `Model.fit`, it has to be above it.
    """

    def __init__(self, model: Model) -> None:
        from hotbed.compat.hugectr.model.console import show

        self._show = show
        self._model = model
        self._solver = model.solver
        self._fit = model.solver.fit or FitParams()
        self._rates = model.get_learning_rate_scheduler()
        self._began = time.perf_counter()
        self._displayed = self._began

    def run(self) -> None:
        """Train to the end, or until an evaluation reaches its threshold."""
        self._show("HugeCTR training start:")
        if self._solver.repeat_dataset:
            self._run_iterations()
        else:
            self._run_epochs()

    def _run_iterations(self) -> None:
        self._model.start_data_reading()
        for iteration in range(self._fit.max_iter):
            self._learn(iteration)
            if self._is_due(self._fit.snapshot, iteration):
                self._model.save_params_to_files(self._fit.snapshot_prefix, iteration)
            if self._evaluated_well(
                iteration, f"at {iteration / self._fit.max_iter:.2%} of training"
            ):
                return

    def _run_epochs(self) -> None:
        iteration = 0
        for epoch in range(self._fit.num_epochs):
            self._show(f"Epoch: {epoch}")
            self._model.get_data_reader_train().set_source()
            while self._learn(iteration):
                if self._evaluated_well(iteration, f"at epoch {epoch}"):
                    return
                iteration += 1

    def _learn(self, iteration: int) -> bool:
        """Learn a batch; return False at the end of an epoch, with nothing learned."""
        rate = self._rates.get_next()
        self._model.set_learning_rate(rate)
        if not self._model.train():
            return False
        if self._is_due(self._fit.display, iteration):
            loss = self._model.get_current_loss()
            if math.isnan(loss):
                raise DataError(
                    f"iteration {iteration}: the loss is not a number, got {loss}. Lower the "
                    "learning rate, or check the dense columns."
                )
            now = time.perf_counter()
            self._show(
                f"Iter: {iteration} Time({self._fit.display} iters): "
                f"{now - self._displayed:.6f}s Loss: {loss:.6f} lr:{rate:.6f}"
            )
            self._displayed = now
        return True

    def _evaluated_well(self, iteration: int, where: str) -> bool:
        """Evaluate when it is time; return whether the AUC reached its threshold."""
        if not self._is_due(self._fit.eval_interval, iteration):
            return False
        began = time.perf_counter()
        self._evaluate(iteration)
        for name, value in self._model.get_eval_metrics():
            self._show(f"Evaluation, {name}: {value:.6f}")
            assert self._solver.metrics_spec is not None
            threshold = self._solver.metrics_spec.get(MetricsType.AUC, 1.0)
            if name == MetricsType.AUC.value and value >= threshold:
                self._print_success(threshold, where, iteration)
                return True
        took = time.perf_counter() - began
        self._show(f"Eval Time for {self._solver.max_eval_batches} iters: {took:.6f}s")
        return False

    def _evaluate(self, iteration: int) -> None:
        model = self._model
        if not self._solver.repeat_dataset:
            model.get_data_reader_eval().set_source()
        prefix = self._fit.export_predictions_prefix
        for _ in range(self._solver.max_eval_batches):
            if not model.eval():
                break
            if prefix:
                model.export_predictions(
                    f"{prefix}_prediction_{iteration}", f"{prefix}_label_{iteration}"
                )

    def _print_success(self, threshold: float, where: str, iteration: int) -> None:
        seconds = time.perf_counter() - self._began
        batch_size = self._solver.batchsize
        self._show(
            f"Hit target accuracy AUC {threshold:.6f} {where} with batchsize: {batch_size} in "
            f"{seconds:.2f} s. Average speed {iteration * batch_size / seconds:.2f} records/s."
        )

    @staticmethod
    def _is_due(interval: int, iteration: int) -> bool:
        return interval > 0 and iteration > 0 and iteration % interval == 0
