# SPDX-License-Identifier: Apache-2.0
"""RecModel: `mindspore_rec.RecModel` on torch modules."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hotbed import checks
from hotbed.compat.mindspore_rec.boost import ArgumentTypeError, compiled_by
from hotbed.compat.mindspore_rec.callback import Adapter, CallbackParams, Training, adapted
from hotbed.compat.mindspore_rec.evaluation import evaluated_by
from hotbed.compat.mindspore_rec.map_parameter import MapParameter
from hotbed.compat.mindspore_rec.metrics import LOSS, translated
from hotbed.compat.mindspore_rec.no_effect import ARGUMENTS
from hotbed.compat.mindspore_rec.rates import FollowedRate
from hotbed.data.dataset import Dataset
from hotbed.data.grains import MOST_GRAINS
from hotbed.embedding.modules.parameter import TableRows
from hotbed.embedding.rule import Rule
from hotbed.errors import ConfigError
from hotbed.optim.dense import dense_optimizer
from hotbed.optim.precision import Compile
from hotbed.optim.torch_rules import rule_of
from hotbed.parallel import at
from hotbed.parallel.world import trains_together, world_size
from hotbed.training.ahead import unwrap
from hotbed.training.feed import BatchesOfRanks
from hotbed.training.model import RecModel as Engine
from hotbed.training.watching.history import History

log = logging.getLogger("hotbed.compat.mindspore_rec")


class RecModel:
    """A network that is trained, also on a stream that never ends, evaluated and asked.

    The eight arguments are those of `mindspore_rec.RecModel`. Networks are torch modules, which may
    look up rows by `HashEmbeddingLookup`, `MapParameter` or hotbed's own modules.

    Args:
        network: a torch module. With `loss_fn` it takes the data; without, it takes all items of
            the data and returns its loss.
        loss_fn: as of `hb.RecModel`; None: the network computes its loss.
        optimizer: a torch optimizer, a rule such as `hb.Adam(lr=1e-3)` or a name. It also updates
            the rows of `HashEmbeddingLookup` and `MapParameter`, those of a batch at a time. None:
            the network runs backward and updates itself.
        metrics: a set of names, or a dict of name to metric. MindSpore's names `loss`, `acc` and
            `F1` are taken, too; the loss is reported anyway, as the last result.
        eval_network: what evaluation runs; None: `network` with `loss_fn`.
        eval_indexes: None, or three positions in the outputs of `eval_network`: loss, prediction,
            label.
        amp_level: "O0", "O1", "O2", "O3" or "auto".
        boost_level: "O0", "O1" or "O2", or `hb.Compile(…)`.
        boost_config_dict: settings of `hb.Compile` for the levels O1 and O2, by name. Keys of
            MindSpore's `boost_config_dict` have no meaning here and are logged;
            {"boost": {"mode": "disable_all"}} is level O0.
        grains: runs of samples that a step is computed in, a power of two; see docs/grains.md.
            None: 1 on one process, and 8 or as many as there are ranks on several.
        data_parallel: on several ranks, whether an iterable that is not a `hb.Dataset` yields the
            batches of its rank, which together are the batch of a step, or the same ones on all of
            them. A `hb.Dataset` is always that of all ranks.

    Attributes:
        engine: the `hb.RecModel` that does the work: it saves, exports and restores.

    Raises:
        ConfigError: (a ValueError) arguments cannot work together.

    Example:
        >>> model = RecModel(network, "bce", "adam", metrics={"auc"})
        >>> model.online_train(stream, callbacks=[LossMonitor(100)])
        >>> model.engine.save("model")
    """

    @at("RecModel")
    def __init__(
        self,
        network: nn.Module,
        loss_fn: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        eval_network: Callable[..., Any] | None = None,
        eval_indexes: Sequence[int] | None = None,
        amp_level: str = "O0",
        boost_level: str | Compile = "O0",
        *,
        boost_config_dict: Mapping[str, Any] | None = None,
        grains: int | None = None,
        data_parallel: bool | None = None,
    ) -> None:
        checks.one_of("RecModel.data_parallel", data_parallel, (True, False, None))
        if grains is None:
            grains = grains_of_ranks(optimizer)
        self._data_parallel = data_parallel
        self._rates: list[FollowedRate] = []
        if optimizer is not None and isinstance(network, nn.Module):
            optimizer, self._rates = _settled(network, optimizer)
        reports_loss = eval_indexes is not None or (loss_fn is not None and eval_network is None)
        metrics = translated(metrics, reports_loss=reports_loss)
        compiled = compiled_by(
            boost_level,
            boost_config_dict,
            has_optimizer=optimizer is not None,
            is_evaluated=bool(metrics) or eval_network is not None,
        )
        self.engine = Engine(
            network,
            loss_fn,
            optimizer,
            metrics,
            evaluated_by(eval_network, eval_indexes),
            amp_level,
            compiled,
            grains,
        )
        self._eval_network = eval_network

    @property
    def train_network(self) -> nn.Module:
        """The network that is trained."""
        return self.engine.network

    @property
    def eval_network(self) -> Any:
        """What evaluation runs."""
        return self._eval_network or self.engine.network

    @at("online_train")
    def online_train(
        self,
        train_dataset: Iterable[Any],
        callbacks: Any = None,
        dataset_sink_mode: bool = True,
        sink_size: int = 1,
        *,
        max_steps: int | None = None,
        max_seconds: float | None = None,
    ) -> History:
        """Learn a stream batch by batch, until it ends or is stopped; return the history.

        The four arguments are those of `mindspore_rec.RecModel.online_train`. In sink mode on a
        device other than the CPU, `sink_size` batches are an epoch, at whose end `step_end` is
        called. The stream ends by `run_context.request_stop()`, SIGINT or SIGTERM, `max_steps` or
        `max_seconds`, always after a whole step.

        Args:
            train_dataset: a `hb.Dataset`, or an iterable of batches or tuples: (data, label) with
                `loss_fn`, otherwise everything that the network takes.
            callbacks: one or a list, of MindSpore's kind or of `hb.callbacks`.
            dataset_sink_mode: whether `sink_size` batches on a device are an epoch.
            sink_size: number of batches; without effect if `dataset_sink_mode` is False.
            max_steps: of the whole stream, those before a resumption included.
            max_seconds: of this call.

        Raises:
            ConfigError: (a ValueError) `sink_size` is not an integer of at least 1, or an argument
                cannot work. It is a TypeError as well if `dataset_sink_mode` is not a bool.
        """
        _check_sink_mode(dataset_sink_mode)
        if dataset_sink_mode:
            advice = "Give the number of batches of one call."
            checks.whole_number("sink_size", sink_size, 1, advice=advice)
        sinks = dataset_sink_mode and _can_sink(self.engine)
        if dataset_sink_mode and not sinks:
            log.info(
                "dataset_sink_mode: a CPU has nowhere to sink data to; training is batch by batch"
            )
        args = self._args("train", train_dataset, epoch_num=None, dataset_sink_mode=sinks)
        if dataset_sink_mode:  # also on a CPU, as there
            args.batch_num = sink_size
        data, _, _ = unwrap(train_dataset, self.engine.network)
        data = self._data_of_ranks("train_dataset", data)
        training = Training(self.engine, data, args, sink_size=sink_size if sinks else None)
        return self.engine.online_train(
            data if isinstance(data, BatchesOfRanks) else train_dataset,
            [*self._rates, *adapted(callbacks, training)],
            max_steps=max_steps,
            max_seconds=max_seconds,
            progress=False,
        )

    @at("train")
    def train(
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> History:
        """Learn the epochs from `initial_epoch` to `epoch`; return the history."""
        return self.fit(
            epoch,
            train_dataset,
            callbacks=callbacks,
            dataset_sink_mode=dataset_sink_mode,
            sink_size=sink_size,
            initial_epoch=initial_epoch,
        )

    @at("fit")
    def fit(
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        valid_dataset: Iterable[Any] | None = None,
        valid_frequency: int = 1,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        valid_dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> History:
        """Learn as `train` does, and evaluate `valid_dataset` after each epoch."""
        checks.whole_number("fit.epoch", epoch, 1)
        checks.whole_number("fit.initial_epoch", initial_epoch, 0, epoch - 1)
        for sink_mode in (dataset_sink_mode, valid_dataset_sink_mode):
            _check_sink_mode(sink_mode)
        sinks = bool(dataset_sink_mode or valid_dataset_sink_mode)
        ARGUMENTS.log_no_effect("RecModel.dataset_sink_mode", when=sinks)
        ARGUMENTS.log_no_effect("RecModel.sink_size", when=sinks and sink_size != -1)
        if valid_frequency != 1:
            raise ConfigError(
                "fit.valid_frequency: each epoch is validated, got "
                f"{valid_frequency!r}. Give 1, or call train() and eval() in turn."
            )
        args = self._args("train", train_dataset, epoch_num=epoch, dataset_sink_mode=False)
        data, _, _ = unwrap(train_dataset, self.engine.network)
        data = self._data_of_ranks("train_dataset", data)
        training = Training(self.engine, data, args, initial_epoch=initial_epoch)
        if valid_dataset is not None:
            valid_dataset = self._data_of_ranks("valid_dataset", valid_dataset)
        return self.engine.fit(
            data if isinstance(data, BatchesOfRanks) else train_dataset,
            valid_dataset,
            range(initial_epoch, epoch) if initial_epoch else epoch,
            [*self._rates, *adapted(callbacks, training)],
            progress=False,
        )

    @at("eval")
    def eval(
        self, valid_dataset: Iterable[Any], callbacks: Any = None, dataset_sink_mode: bool = False
    ) -> dict[str, float]:
        """Return the metrics of `valid_dataset` by name; nothing is learned."""
        _check_sink_mode(dataset_sink_mode)
        if dataset_sink_mode:
            ARGUMENTS.log_no_effect("RecModel.dataset_sink_mode")
        args = self._args("eval", valid_dataset, epoch_num=1, dataset_sink_mode=False)
        args.update(valid_dataset=valid_dataset, eval_network=self.eval_network)
        args.update(cur_epoch_num=1, cur_step_num=0)
        training = Training(self.engine, valid_dataset, args, evaluates=True)
        engine_callbacks = adapted(callbacks, training)
        adapters = [callback for callback in engine_callbacks if isinstance(callback, Adapter)]
        for event in ("begin", "epoch_begin"):
            for adapter in adapters:
                adapter.call(event)
        data = self._data_of_ranks("valid_dataset", valid_dataset)
        results = self.engine.evaluate(data, engine_callbacks)
        if LOSS in results:  # programs take the first value for that of their metric
            results[LOSS] = results.pop(LOSS)
        args.update(metrics=results, eval_results=results)
        for event in ("epoch_end", "end"):
            for adapter in adapters:
                adapter.call(event)
        return results

    @at("predict")
    def predict(self, *predict_data: Any, backend: None = None) -> Any:
        """Return the predictions of one batch of data; float32 [n], or a dict by label.

        On several ranks each gets those of its own data. There is one backend, this one.
        """
        checks.one_of("predict.backend", backend, (None,))
        data = self._data_of_ranks("predict_data", [predict_data])
        predicted = self.engine.predict(data)
        if not isinstance(data, BatchesOfRanks):
            return predicted
        return data.own_rows(predicted, self.engine.learner.shard)

    def _data_of_ranks(self, name: str, data: Any) -> Any:
        """Return the data of the argument `name` as the engine takes them.

        Raises:
            ConfigError: on several ranks: nothing says whose they are.
        """
        if isinstance(data, Dataset) or not trains_together():
            return data
        if self._data_parallel is None:
            raise ConfigError(
                f"{name}: tuples of several ranks are those of each rank, or the same on all, got "
                f"{world_size()} ranks and neither. Give RecModel data_parallel=True if each rank "
                "has batches of its own, and False if all yield the same; or give a hb.Dataset."
            )
        return BatchesOfRanks(data) if self._data_parallel else data

    def _args(
        self, mode: str, data: Any, *, epoch_num: int | None, dataset_sink_mode: bool
    ) -> CallbackParams:
        """Return what the callbacks of a call read before its first event."""
        return CallbackParams(
            mode=mode,
            network=self.engine.network,
            train_network=self.engine.network,
            loss_fn=self.engine.arguments["loss_fn"],
            optimizer=self.engine.learner.dense,
            train_dataset=data if mode == "train" else None,
            epoch_num=epoch_num,
            batch_num=_num_batches(data, of_epochs=epoch_num is not None),
            dataset_sink_mode=dataset_sink_mode,
            parallel_mode="data_parallel" if trains_together() else "stand_alone",
            device_number=world_size() if trains_together() else 1,
        )


def _num_batches(data: Any, *, of_epochs: bool) -> int:
    """Return the batches of an epoch; of a stream so many that it has no end, without asking it."""
    number: int | None = getattr(data, "num_batches", None)
    if number is not None:
        return number
    if not of_epochs and not isinstance(data, (list, tuple)):
        return sys.maxsize
    try:
        return len(data)
    except TypeError:  # as of a torch DataLoader over a stream
        return sys.maxsize


def grains_of_ranks(optimizer: Any) -> int:
    """Return the grains of a step for which none were given.

    Raises:
        ConfigError: on several ranks, without an optimizer.
    """
    if not trains_together():
        return 1
    if optimizer is None:
        raise ConfigError(
            "RecModel.optimizer: several ranks add up gradients before an update, got a network "
            f"that updates itself on {world_size()} ranks. Give the network that returns its loss, "
            "and an optimizer, or start one process."
        )
    return max(MOST_GRAINS, 1 << (world_size() - 1).bit_length())


def _can_sink(engine: Engine) -> bool:
    """Return whether the network is on a device that data could be sunk to."""
    return engine.learner.device.type != "cpu"


def _check_sink_mode(sink_mode: Any) -> None:
    if not isinstance(sink_mode, bool):
        raise ArgumentTypeError(
            f"dataset_sink_mode: must be a bool, got {sink_mode!r}. Give True or False."
        )


def _settled(network: nn.Module, optimizer: Any) -> tuple[Any, list[FollowedRate]]:
    """Name the tables of a network by their places, and let the optimizer update their rows.

    Returns the optimizer of the dense parameters, and what lets rows follow its learning rate.
    """
    parameters = {}
    for path, module in network.named_modules():
        if isinstance(module, MapParameter):
            parameters[path] = module
    if not parameters:
        return optimizer, []
    rule, number = _rule_of_rows(optimizer)
    followers = []
    for path, parameter in parameters.items():
        if parameter.settle(path or "embedding_table", rule):
            followers.append(parameter.name)
    if rule is None or not followers:
        return optimizer, []
    return optimizer, [FollowedRate(followers, rule.lr, number)]


def _rule_of_rows(optimizer: Any) -> tuple[Rule | None, int]:
    """Return the rule of the rows of tables, and the number of the parameter group that has them.

    The rows leave their group.
    """
    if isinstance(optimizer, Rule):
        return optimizer, 0
    if isinstance(optimizer, str):
        everything = [nn.Parameter(torch.zeros(1))]
        named = dense_optimizer(optimizer, everything)
        assert named is not None
        return _touched(named, named.param_groups[0]), 0
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None, 0
    of_rows = 0
    for number, group in enumerate(optimizer.param_groups):
        dense = [row for row in group["params"] if not isinstance(row, TableRows)]
        if len(dense) < len(group["params"]):
            of_rows = number
            group["params"] = dense
    return _touched(optimizer, optimizer.param_groups[of_rows]), of_rows


def _touched(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """Return the rule of an optimizer for the rows of a batch; other rows stay."""
    return dataclasses.replace(rule_of(optimizer, group), scope="touched")
