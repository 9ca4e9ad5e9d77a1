# SPDX-License-Identifier: Apache-2.0
"""CombinedOptimizer: one torch optimizer over dense parameters and rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.embedding.modules import TableModule, TableRows, table_modules
from hotbed.embedding.modules.parameter import StepsTables
from hotbed.errors import ConfigError
from hotbed.optim.closure import loss_of
from hotbed.optim.dense import unfuse_half
from hotbed.optim.sparse import SparseOptimizer

_LISTS = ("params", "param_names")
_FREE = ("lr", "foreach", "fused", "capturable", "differentiable")
"""The settings of a torch optimizer that may change although its rows are moved by a rule."""
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class CombinedOptimizer(torch.optim.Optimizer, StepsTables):
    """A torch optimizer whose embedding weights became rows of tables; `hb.auto` returns it.

    It has the parameter groups of the torch optimizer that it was made from, with the rows in the
    place of the weights. Schedulers, `clip_grad_norm_`, GradScaler, closures, accumulation and
    hooks work as before. Tables follow the `lr` of their group. A change of another setting that
    the rule of a table cannot follow, such as the betas that OneCycleLR cycles, is refused by
    `step()`. A frozen table stays as it is; torch would still apply a gradient that waits.

    Its `state_dict()` holds what torch keeps for the dense parameters. The optimizer state of rows
    lies in the tables, so `model.state_dict()` holds it.

    Args:
        optimizer: the torch optimizer before the conversion; it becomes `dense`, without the
            weights.
        model: after the conversion: its table modules hold `rows`.
        rows: of each weight that moved, the parameter that took its place. At least one of these
            weights is in `optimizer`.

    Attributes:
        dense: the part over dense parameters. A step of it alone is refused.
        sparse: the part over tables.

    Raises:
        NonFiniteGradient: in `step()`, a gradient of a row is not finite. It names table and id,
            and nothing has changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        rows: Mapping[nn.Parameter, TableRows],
    ) -> None:
        self.dense = optimizer
        groups = []
        for group in optimizer.param_groups:
            settings = dict(group)
            settings["params"] = [rows.get(parameter, parameter) for parameter in group["params"]]
            groups.append(settings)
        parameter_ids = {id(parameter) for group in groups for parameter in group["params"]}
        self.sparse = SparseOptimizer(nn.ModuleList(_modules_of(model, parameter_ids)))
        self.sparse.keeps_gradients = True
        self._settings: list[dict[str, Any]] = []
        self._stepping = False
        unnamed = [{"params": group["params"]} for group in groups]
        super().__init__(unnamed, optimizer.defaults)
        self.param_groups = groups
        self._settings = [_plain_settings(group) for group in groups]
        _leave_dense(optimizer, rows)
        self.state = optimizer.state
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(optimizer, hooks))
            setattr(optimizer, hooks, type(getattr(optimizer, hooks))())
        self._attach()

    def __getstate__(self) -> dict[str, Any]:
        # the part over tables first: a copy then finds the copies of their parameters
        return {
            "sparse": self.sparse,
            "dense": self.dense,
            "_settings": self._settings,
            "_stepping": False,
            **super().__getstate__(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of a copy, or what `load_state_dict` has read."""
        if "dense" in state:
            super().__setstate__(state)
            self._attach()
            return
        self._check_settings(state["param_groups"])
        super().__setstate__(state)
        dense_groups = []
        for group, dense in zip(self.param_groups, self.dense.param_groups, strict=True):
            lists = {key: dense[key] for key in _LISTS if key in dense}
            dense_groups.append({**group, **lists})
        self.dense.__setstate__({"state": self.state, "param_groups": dense_groups})
        self._settings = [_plain_settings(group) for group in self.param_groups]
        self._set_table_rates({n: settings["lr"] for n, settings in enumerate(self._settings)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the dense parameters and the tables whose gradients wait.

        Gradients stay until `zero_grad()`, as in torch.

        Raises:
            ConfigError: a setting has changed that the rule of a table cannot follow; several ranks
                train; a learning rate is not a number >= 0.
            NonFiniteGradient: a gradient of a row is not finite; nothing has changed.
        """
        loss = loss_of(closure)
        self._give_settings()
        self.sparse.check()
        with self._in_step():
            self.dense.step()
        self.sparse.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero.

        With gradients of zero a step moves what torch would move: rows and dense parameters with
        momentum or decay.
        """
        self.dense.zero_grad(set_to_none)
        self.sparse.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of dense parameters.

        Raises:
            ConfigError: it holds rows of tables.
        """
        if not self._settings:  # torch adds the groups of the constructor
            super().add_param_group(param_group)
            return
        parameters = param_group["params"]
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        parameters = list(parameters)
        for parameter in parameters:
            if isinstance(parameter, tuple):
                parameter = parameter[1]
            if isinstance(parameter, TableRows):
                raise ConfigError(
                    f"CombinedOptimizer.add_param_group: rows of tables cannot be added, got "
                    f"{parameter!r}. Give the optimizer all embedding weights before hb.auto."
                )
        self.dense.add_param_group({**param_group, "params": parameters})
        added = dict(self.dense.param_groups[-1])
        added["params"] = list(added["params"])
        self.param_groups.append(added)
        self._settings.append(_plain_settings(added))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the dense parameters and the settings of all groups, as torch does.

        Tables whose learning rate is not that of their group have it under `table_rates`.
        """
        state = super().state_dict()
        rates = {}
        for number, table_group in self._table_groups():
            if table_group["lr"] != self._settings[number]["lr"]:
                rates.update(dict.fromkeys(table_group["tables"], table_group["lr"]))
        if rates:
            state["table_rates"] = rates
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict()` of such an optimizer.

        Raises:
            ConfigError: it holds the state of an embedding weight, or a setting that the rule of a
                table does not have. Nothing has changed.
            ValueError: it has other groups.
        """
        self._refuse_weights(state_dict)
        super().load_state_dict(dict(state_dict))
        rates = state_dict.get("table_rates", {})
        for _, table_group in self._table_groups():
            name = table_group["tables"][0]
            table_group["lr"] = rates.get(name, table_group["lr"])

    def _refuse_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse the state of an optimizer that was saved before its model was converted."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for parameter, number in zip(group["params"], saved["params"], strict=False):
                if isinstance(parameter, TableRows) and state_dict["state"].get(number):
                    raise ConfigError(
                        f"CombinedOptimizer.load_state_dict: the state of parameter {number}, "
                        f"which is {parameter!r} now, lies in its table, got that of a weight. "
                        "Load model and optimizer before hb.auto."
                    )

    def _table_groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of a group, and a table group that follows it, for all of them."""
        of_rows = {id(group["params"][0]): group for group in self.sparse.param_groups}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if isinstance(parameter, TableRows):
                    yield number, of_rows[id(parameter)]

    def _set_table_rates(self, rates: Mapping[int, float]) -> None:
        """Set the learning rates of the tables in some groups, by the number of the group."""
        for number, table_group in self._table_groups():
            if number in rates:
                table_group["lr"] = rates[number]

    def _give_settings(self) -> None:
        """Give the settings that have changed since the last step on to both parts."""
        self._check_settings(self.param_groups)
        rates = {}
        for number, group in enumerate(self.param_groups):
            now = _plain_settings(group)
            before = self._settings[number]
            changed = [key for key in now if key not in before or before[key] != now[key]]
            for key in changed:
                self.dense.param_groups[number][key] = group[key]
            if "lr" in changed:
                rates[number] = now["lr"]
            before.update(now)
        if rates:
            self._set_table_rates(rates)

    def _check_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if a setting differs that tables of its group cannot follow."""
        fixed = [key for key in self.defaults if key not in _FREE]
        for number, (group, before) in enumerate(
            zip(self.param_groups, self._settings, strict=True)
        ):
            tables = _tables_of(group)
            if not tables:
                continue
            now = _plain_settings(groups[number])
            for key in fixed:
                if now.get(key) != before.get(key):
                    raise ConfigError(
                        f"CombinedOptimizer: the rules of tables {tables} keep their {key}, got "
                        f"{now.get(key)!r} for {before.get(key)!r} in parameter group {number}. "
                        f"Schedule lr alone (OneCycleLR and CyclicLR: cycle_momentum=False), or "
                        f"give hb.auto the optimizer with the {key} that you want."
                    )

    def _take_settings(self, dense: torch.optim.Optimizer) -> None:
        """Take over the state and the settings that the dense part has loaded."""
        self._check_settings(dense.param_groups)
        self.state = dense.state
        for group, loaded in zip(self.param_groups, dense.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key not in _LISTS})
        self._settings = [_plain_settings(group) for group in self.param_groups]

    def _attach(self) -> None:
        """Let the dense part report what it loads, and step only as a part of this one."""
        self.dense.register_load_state_dict_post_hook(self._take_settings)
        self.dense.register_step_pre_hook(self._refuse_alone)
        unfuse_half(self.dense)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _refuse_alone(self, dense: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            name = type(dense).__name__
            raise ConfigError(
                f"{name}: it is a part of the optimizer that hb.auto returned, got a step of it "
                "alone. Step the optimizer that hb.auto returned."
            )


@dataclass(frozen=True)
class Parts:
    """The optimizers that `hb.auto` returned for one model, as one of each kind.

    Attributes:
        optimizers: to step.
        dense: over dense parameters; None if there are none.
        sparse: over tables.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    dense: torch.optim.Optimizer | None
    sparse: SparseOptimizer

    @staticmethod
    def of(optimizer: Any) -> Parts | None:
        """Return the parts of an optimizer or of a list of them; None if none steps tables.

        Raises:
            ConfigError: several of them hold dense parameters.
        """
        optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        combined = [member for member in optimizers if isinstance(member, CombinedOptimizer)]
        if not combined:
            return None
        dense = []
        for member in optimizers:
            part = member.dense if isinstance(member, CombinedOptimizer) else member
            if any(group["params"] for group in part.param_groups):
                dense.append(part)
        if len(dense) > 1:
            names = [type(part).__name__ for part in dense]
            raise ConfigError(
                f"optimizer: one optimizer can hold dense parameters here, got {names}. Put all "
                "dense parameters into one, in groups, or train in a loop of your own."
            )
        for part in dense:
            unfuse_half(part)
        return Parts(
            optimizers,
            dense[0] if dense else None,
            SparseOptimizer.join([member.sparse for member in combined]),
        )


def _modules_of(model: nn.Module, parameter_ids: set[int]) -> list[TableModule]:
    """Return the table modules of a model whose rows are among the parameters `held`."""
    modules = []
    for module in table_modules(model):
        if any(id(rows) in parameter_ids for rows in module.rows):
            modules.append(module)
    return modules


def _leave_dense(optimizer: torch.optim.Optimizer, rows: Mapping[nn.Parameter, TableRows]) -> None:
    """Remove the weights that moved, and their state, from the torch optimizer."""
    for group in optimizer.param_groups:
        stays = [parameter not in rows for parameter in group["params"]]
        for key in _LISTS:
            if key in group:
                pairs = zip(group[key], stays, strict=True)
                group[key] = [item for item, remains in pairs if remains]
    for weight in rows:
        optimizer.state.pop(weight, None)


def _tables_of(group: Mapping[str, Any]) -> list[str]:
    """Return the names of the tables whose rows are in a parameter group."""
    names = []
    for parameter in group["params"]:
        if isinstance(parameter, TableRows):
            names += [table.name for table in parameter.tables]
    return names


def _plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group; those that are tensors, which change in place, as numbers."""
    settings = {}
    for key, value in group.items():
        if key in _LISTS:
            continue
        if isinstance(value, Tensor) and value.dim() == 0:
            value = value.item()
        settings[key] = value
    return settings
