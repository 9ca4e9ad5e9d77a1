# SPDX-License-Identifier: Apache-2.0
"""Ranks that would train different things are refused by name, on each of them, before the first
step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import ranks_of
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.job import run
from hotbed.job.job import Job
from hotbed.parallel import software

NETWORK = """
import hotbed as hb

class Network(hb.models.DCNv2):
    def forward(self, batch):
        return super().forward(batch) * {factor}
"""
JOB: dict[str, Any] = {
    "schema": {"columns": [{"kind": "label", "name": "y"}, {"kind": "id", "name": "user"}]},
    "train": {"kind": "csv", "path": "rows.csv"},
    "stream": {"kind": "kafka", "servers": "localhost:1", "topic": "t"},
    "model": {"kind": "lr"},
    "fit": {"batch_size": 64},
    "grains": 4,
    "output": "model",
}


def batch(first: float = 1.0) -> hb.Batch:
    labels = np.ones(16, np.float32)
    labels[:4] = first
    return hb.Batch({"user": hb.Ids(np.arange(16))}, {}, {"y": labels})


def network_of(
    network: type[hb.models.DCNv2] = hb.models.DCNv2, rate: float = 0.1, dropout: float = 0.0
) -> hb.models.DCNv2:
    torch.manual_seed(0)
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    tables = hb.make_tables(schema, 2, rule=hb.Adagrad(lr=rate), admit=hb.MinCount(1))
    return network(schema, tables, hidden=(4,), dropout=dropout)


def model_of(
    network: type[hb.models.DCNv2] = hb.models.DCNv2,
    loss: Any = "bce",
    optimizer: Any = "adam",
    metrics: Any = None,
    *,
    rate: float = 0.1,
    dropout: float = 0.0,
    **options: Any,
) -> hb.RecModel:
    made = network_of(network, rate, dropout)
    return hb.RecModel(made, loss, optimizer, metrics, grains=4, **options)


def fit(model: hb.RecModel, valid: Any = None, callbacks: Any = (), **options: Any) -> None:
    model.fit([batch()], valid, callbacks=list(callbacks), progress=False, **options)


def fit_network_of(folder: str, rank: int) -> None:
    """Fit a network of a file of this rank's own, whose forward differs, and nothing else."""
    path = Path(folder) / f"network-{rank}.py"
    path.write_text(NETWORK.format(factor=1 + rank))
    spec = importlib.util.spec_from_file_location("network_of_rank", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    fit(model_of(module.Network))


def job_of(**changes: Any) -> Job:
    return Job.from_json({**JOB, **changes})


# --- what a program gives ------------------------------------------------------------------------

factor = 1.0


def weighed(scores: Tensor, labels: Tensor) -> Tensor:
    return factor * nn.functional.binary_cross_entropy_with_logits(scores, labels)


def around(other: float) -> Callable[..., Tensor]:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return other * weighed(scores, labels)

    return loss


def of_global(other: int) -> None:
    with patch.dict(globals(), factor=1.0 + other):
        fit(model_of(loss=weighed))


class Weigher:
    """A loss that is an object, with a name that it does not use."""

    def __init__(self, other: float) -> None:
        self.other = other
        self.rank = os.environ["RANK"]
        self.calls = 0

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        self.calls += int(os.environ["RANK"])
        return self.other * weighed(scores, labels)


class Scaled(hb.models.DCNv2):
    """A network that reads an attribute, one of its class, one of a bag, and a global."""

    other = 1.0

    def __init__(self, *arguments: Any, scale: float = 1.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scale = scale
        self.bag = SimpleNamespace(scale=1.0, rank=os.environ["RANK"])

    def forward(self, batch: hb.Batch) -> Tensor:
        scores: Tensor = super().forward(batch) * self.scale * self.other * self.bag.scale
        return scores * factor


def fit_changed(change: Callable[[Any], Any], **options: Any) -> None:
    model = model_of(Scaled, **options)
    change(model.network)
    fit(model)


def set_scale(network: Any, other: int) -> None:
    network.bag.scale = 1.0 + other


def of_class(other: int) -> None:
    with patch.object(Scaled, "other", 1.0 + other):
        fit(model_of(Scaled))


def steps(change: Callable[[hb.RecModel], Any], other: int, **options: Any) -> None:
    """Learn two steps; change the model before the second one on one rank."""
    model = model_of(**options)
    model.step(batch())
    if other:
        change(model)
    model.step(batch())


def edited(call: Callable[[hb.Table], Any], other: int, then: str = "step") -> None:
    """Learn a step; change the rows of a table on one rank; then learn, score or save."""
    model = model_of(metrics={"auc"})
    model.step(batch())
    if other:
        call(model.tables["user"])
    if then == "save":
        model.save("edited")
    else:
        getattr(model, then)([batch()] if then == "evaluate" else batch())


def edited_before_a_warm_start(other: int) -> None:
    model = model_of()
    model.step(batch())
    model.save("saved")
    if other:
        model.tables["user"].clear()
    model.warm_start("saved", optimizer_state=True)


def freeze_dense(model: hb.RecModel) -> None:
    next(iter(hb.dense_parameters(model.network))).requires_grad_(False)


def freeze(model: hb.RecModel) -> None:
    model.tables["user"].frozen = "rows"


def loop(other: int, rate: float = 0.1, clip: float = 1.0, dropout: float = 0.0) -> None:
    """A plain loop; `other`: a summand of its loss."""
    network = network_of(dropout=dropout)
    sparse = hb.SparseOptimizer(network)
    sparse.set_learning_rates(rate)
    sharded = hb.shard(network, torch.optim.SGD(hb.dense_parameters(network), 0.0), sparse)
    network.train()
    for _ in range(2):
        sharded.backward(batch(), lambda part: network(part).mean() * (1 + other))
        sharded.clip_gradients(clip)
        sparse.step()
        sparse.zero_grad()
    network.eval()
    network(batch(first=1.0))


def warm(**options: Any) -> None:
    model_of().save("saved")
    model_of().warm_start("saved", **options)


class PlainNetwork(nn.Module):
    """A network of torch alone, for `hb.auto`."""

    def __init__(self, dropout: float, scale: float) -> None:
        super().__init__()
        self.user = nn.Embedding(20, 4)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 1))
        self.scale = scale

    def forward(self, user: Tensor) -> Tensor:
        scores: Tensor = self.head(self.user(user)).squeeze(1)
        return scores * self.scale


def fit_by_auto(dropout: float = 0.0, scale: float = 1.0) -> None:
    torch.manual_seed(0)
    network: nn.Module = PlainNetwork(dropout, scale)
    network, optimizer, _ = hb.auto(network, torch.optim.SGD(network.parameters(), 0.1))
    fit(hb.RecModel(network, "bce", optimizer, grains=4))


def evaluation(other: int) -> None:
    each = hb.Evaluation(model_of())
    each.add(batch())
    each.add(batch(1.0 - other))


def stream(other: int) -> None:
    valid = [batch(1.0 - other)]
    validate = hb.callbacks.Validate(every_steps=1)
    model_of(metrics={"auc"}).online_train([batch()] * 2, [validate], valid=valid, progress=False)


def best(metric: str) -> Any:
    return hb.callbacks.BestWeights(metric)


Differ = Callable[[int], Any]
"""What a rank does; 1: it is the one that differs."""
BCE = hb.losses.BCE
TORCH_BCE = nn.BCEWithLogitsLoss
CALLBACKS = hb.callbacks
NO_GRADS = np.zeros((1, 2), np.float32)
EDITS: dict[str, Callable[[hb.Table], Any]] = {
    "update": lambda table: table.update(np.array([-1]), NO_GRADS),
    "evict": lambda table: table.evict(5),
    "discard": lambda table: table.discard([3]),
    "load": lambda table: table.load([]),
    "load_scalars": lambda table: table.load_scalars(table.scalars()),
    "clear": lambda table: table.clear(),
    "load_candidates": lambda table: table.load_candidates([]),
    "load_sketch": lambda table: table.load_sketch([]),
}
"""Every method of a table that changes rows of this process alone, with the least that it does."""
OTHER_METHODS = {
    "compared otherwise": {"remove", "set_default", "set_min_count", "requires_grad_"},
    "of ids that are here": {"find_or_insert", "load_rows", "sweep"},
    "reads": {
        "candidates", "completed", "export", "find", "gather", "like",
        "lookup", "scalars", "sketch", "snapshot", "track", "watch_admission", "watch_capacity",
        "watch_rate",
    },
}  # fmt: skip
SAVED = functools.partial(edited, EDITS["discard"], then="save")
OTHERS: dict[str, tuple[Differ, str]] = {
    "rate": (lambda n: fit(model_of(rate=0.1 + n)), r"table 'user' \[.*lr=0\.1.*lr=1\.1"),
    "epochs": (
        lambda n: fit(model_of(), epochs=1 + n),
        r"the numbers of the first and the last epoch \[\(0, 0\),.* \(0, 1\)\]",
    ),
    "kind of loss": (
        lambda n: fit(model_of(loss=["bce", "focal"][n])),
        r"loss_fn\.kind \['bce',.* 'focal'\]",
    ),
    "weight of a loss": (
        lambda n: fit(model_of(loss=BCE(pos_weight=2.0 + n))),
        r"loss_fn\.pos_weight \[2\.0,.* 3\.0\]",
    ),
    "loss of torch": (
        lambda n: fit(model_of(loss=TORCH_BCE(pos_weight=torch.tensor(1.0 + n)))),
        r"loss_fn\.pos_weight \['torch\.float32 \[\] with the digest",
    ),
    "own loss": (lambda n: fit(model_of(loss=around(1.0 + n))), r"loss_fn\.other \[1\.0,.* 2\.0\]"),
    "global of a loss": (of_global, r"loss_fn\.factor \[1\.0,.* 2\.0\]"),
    "code of a loss": (
        lambda n: fit(model_of(loss=[weighed, lambda a, b: 2 * weighed(a, b)][n])),
        r"loss_fn\.code with the digest \[",
    ),
    "object as a loss": (
        lambda n: fit(model_of(loss=Weigher(1.0 + n))),
        r"loss_fn\.other \[1\.0,.* 2\.0\]",
    ),
    "partial loss": (
        lambda n: fit(model_of(loss=functools.partial(around(1.0 + n)))),
        r"loss_fn \[\[\{.*'other': 1\.0.*'other': 2\.0",
    ),
    "dropout": (lambda n: fit(model_of(dropout=n / 2)), r"network\.dropout \[0\.0,.* 0\.5\]"),
    "changed dropout": (
        lambda n: fit_changed(
            lambda network: [
                setattr(m, "rate", n / 2) for m in network.modules() if hasattr(m, "rate")
            ],
            dropout=0.2,
        ),
        r"network\.mlp\.1\.rate \[0\.0,.* 0\.5\]",
    ),
    "attribute": (
        lambda n: fit_changed(lambda network: setattr(network, "scale", 1.0 + n)),
        r"network\.scale \[1\.0,.* 2\.0\]",
    ),
    "attribute of a bag": (
        lambda n: fit_changed(functools.partial(set_scale, other=n)),
        r"network\.bag\.scale \[1\.0,.* 2\.0\]",
    ),
    "attribute of a class": (of_class, r"network\.class Scaled\.other \[1\.0,.* 2\.0\]"),
    "amp_level": (
        lambda n: fit(model_of(amp_level=["O0", "O1"][n])),
        r"amp_level \[.*compute=None.*compute=torch\.bfloat16",
    ),
    "optimizer": (
        lambda n: fit(model_of(optimizer=hb.Adam(lr=0.1 + n))),
        r"optimizer \w+ \[\[\{.*'lr': 0\.1.*'lr': 1\.1",
    ),
    "metrics": (
        lambda n: fit(model_of(metrics=[["auc"], ["log_loss"]][n])),
        r"metrics\.auc\S* \[.*None\]",
    ),
    "interval": (
        lambda n: fit(model_of(), callbacks=[CALLBACKS.Evict(step_interval=2 + n)]),
        r"callback 0\.step_interval \[2,.* 3\]",
    ),
    "patience": (
        lambda n: fit(model_of(), callbacks=[CALLBACKS.EarlyStopping("loss", 2 + n)]),
        r"callback 0\.patience \[None,.* 3\]",
    ),
    "schedule": (
        lambda n: fit(model_of(), callbacks=[CALLBACKS.LearningRate(lambda o: n)]),
        r"callback 0\.\w+\.n \[0,.* 1\]",
    ),
    "max_steps": (lambda n: fit(model_of(), max_steps=5 + n), r"max_steps \[\[5\],.* \[6\]\]"),
    "progressive": (
        lambda n: fit(model_of(), progressive=bool(n)),
        r"scores before a batch is learned \[None,.* False\]",
    ),
    "no validation": (
        lambda n: fit(model_of(metrics={"auc"}), [batch()] if n else None),
        r"validation data \[False,.* True\]|callbacks \[\[\],.* \['Validate'\]\]",
    ),
    "rows of a warm start": (
        lambda n: warm(optimizer_state=bool(n)),
        r"warm_start\.optimizer_state \[False,.* True\]",
    ),
    "moment of a warm start": (lambda n: warm(now=n), r"warm_start\.now \[0,.* 1\]"),
    "rows that are scored": (
        functools.partial(edited, EDITS["clear"], then="evaluate"),
        r"rows of table 'user' changed by \['none',.* 'clear, digest \w+'\]",
    ),
    "rows before a warm start": (
        edited_before_a_warm_start,
        r"rows of table 'user' changed by \['none',.* 'clear, digest \w+'\]",
    ),
    "exported state": (
        lambda n: model_of().export("exported", state="saved" if n else None),
        r"export\.state \[None,.* 'saved'\]",
    ),
    "loss of a loop": (loop, r"loss_of\.other \[0,.* 1\]"),
    "dropout of a loop": (lambda n: loop(0, dropout=n / 2), r"network\.dropout \[0\.0,.* 0\.5\]"),
    "rate of a loop": (lambda n: loop(0, rate=0.1 + n), r"optimizer SparseOptimizer \["),
    "dropout by auto": (lambda n: fit_by_auto(n / 2), r"network\.[\w.]*p \[0\.0,.* 0\.5\]"),
    "attribute by auto": (
        lambda n: fit_by_auto(scale=1.0 + n),
        r"network\.[\w.]*scale \[1\.0,.* 2\.0\]",
    ),
}
STEPS: dict[str, tuple[Differ, str]] = {
    **{
        name: (
            functools.partial(edited, call),
            rf"rows of table 'user' changed by \['none',.* '{name}\b.*, digest ",
        )
        for name, call in EDITS.items()
    },
    "rates of tables": (
        lambda n: steps(lambda model: setattr(model, "table_learning_rates", 0.5), n),
        r"learning rates \[\[.*\['user'\], 0\.1\).*\['user'\], 0\.5\)",
    ),
    "frozen table": (
        lambda n: steps(freeze, n),
        r"tables that are frozen\.user \[None,.* 'rows'\]",
    ),
    "frozen weight": (lambda n: steps(freeze_dense, n), r"weights with the digest \["),
    "default": (
        lambda n: steps(lambda model: model.tables["user"].set_default(1.0), n),
        r"defaults and min_count of tables \[\[\(0\.0, [^]]*\)\],.* \[\(1\.0, [^]]*\)\]\]",
    ),
    "min_count": (
        lambda n: steps(lambda model: model.tables["user"].set_min_count(3), n),
        r"defaults and min_count of tables \[",
    ),
    "labels": (
        lambda n: model_of().step(batch(1.0 - n)),
        r"label 'y' of a batch with the digest \[",
    ),
    "clipped loop": (lambda n: loop(0, clip=1.0 + n), r"clip_gradients\.max_norm \[1\.0,.* 2\.0\]"),
}
SCORED: dict[str, tuple[Differ, str]] = {
    "evaluate": (lambda n: model_of().evaluate([batch(1.0 - n)]), r"label 'y' of a batch"),
    "predict": (lambda n: model_of().predict([batch(1.0 - n)]), r"label 'y' of a batch"),
    "more batches": (
        lambda n: model_of().evaluate([batch()] * (1 + n)),
        r"batches to score next: \[1,.* 2\]",
    ),
    "Evaluation": (evaluation, r"label 'y' of a batch with the digest"),
    "valid": (
        lambda n: fit(model_of(metrics={"auc"}), [batch(1.0 - n)], [best("auc")]),
        r"label 'y' of a batch with the digest",
    ),
    "stream": (stream, r"label 'y' of a batch with the digest"),
}


def errors(folder: str) -> dict[str, str]:
    """What each kind of difference of the last rank ends with, and that nothing was learned."""
    os.chdir(folder)
    Path("rows.csv").write_text("y,user\n1,1\n")
    rank = int(os.environ["RANK"])
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
    torch_capability = patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    cases: dict[str, tuple[Any, Callable[[], None]]] = {
        "version": (patch.object(hb, "__version__", "9.9"), lambda: fit(model_of())),
        "code": (
            patch.object(software, "_digest_of_hotbed", lambda: "other"),
            lambda: fit(model_of()),
        ),
        "instructions": (torch_capability, lambda: fit(model_of())),
    }
    calls: dict[str, Callable[[], None]] = {
        "network": lambda: fit_network_of(folder, int(is_last)),
        "callbacks": lambda: fit(
            model_of(), callbacks=[] if is_last else [hb.callbacks.Checkpoint(f"{folder}/state")]
        ),
        "job": lambda: run.train(job_of(fit={"batch_size": 64 + is_last})),
        "flag": lambda: run.online(job_of(), max_steps=5 + is_last),
        "command": lambda: (run.online if is_last else run.train)(job_of()),
    }
    calls["save"] = functools.partial(SAVED, int(is_last))
    for name, (differ, _) in {**OTHERS, **STEPS, **SCORED}.items():
        calls[name] = functools.partial(differ, int(is_last))
    found = {}
    for name, call in calls.items():
        cases[name] = (contextlib.nullcontext(), call)
    for name, (change, call) in cases.items():
        with change if is_last else contextlib.nullcontext():
            try:
                call()
            except HotbedError as error:
                found[name] = f"{type(error).__name__}: {error}"
    torch.set_num_threads(1 + is_last)
    try:
        fit(model_of())
    except HotbedError as error:
        found["threads"] = f"{type(error).__name__}: {error}"
    return found


DIFFER = {
    "version": r"the versions of hotbed and torch \[\('[^']*', '[^']*'\),.* \('9.9', '[^']*'\)\]",
    "code": r"code of hotbed with the digest \[.*'other'\]",
    "instructions": r"the instruction set, which ATEN_CPU_CAPABILITY can lower, \[.*'OTHER'\]",
    "threads": r"the threads of torch \[1,.* 2\]",
    "network": r"code of the network with the digest \[",
    "callbacks": r"callbacks \[\['Checkpoint'\],.* \[\]\]",
    "job": r"job\.fit\.batch_size \[64,.* 65\]",
    "flag": r"--max-steps \[5,.* 6\]",
    "command": r"the command \['hotbed train',.* 'hotbed online'\]",
}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_that_differ_are_refused_by_name_on_each(ranks: int, tmp_path: Path) -> None:
    found = ranks_of(errors, ranks, str(tmp_path))
    assert found == found[:1] * ranks
    starts = {
        "train the same model with the same settings": DIFFER | _texts(OTHERS),
        "get the same batches and random numbers, and hold the same weights": _texts(STEPS),
        "evaluate and predict the same batches": _texts(SCORED),
    }
    wrong = {}
    for start, texts in starts.items():
        for name, differ in texts.items():
            text = found[0].get(name, "no error")
            is_right = text.startswith(f"ConfigError: ranks: all ranks must {start}")
            if not (is_right and re.search(rf"got {differ}", text)):
                wrong[name] = text
    assert not wrong, wrong
    saved = r"PersistError: table 'user': all ranks must make the calls .* \['none',.* 'discard,"
    assert re.match(saved, found[0]["save"])
    assert not (tmp_path / "state").exists()
    assert not list(tmp_path.glob("edited/*/MANIFEST.json"))


def test_every_method_of_a_table_that_changes_rows_is_compared() -> None:
    methods = {n for n, value in vars(hb.Table).items() if inspect.isfunction(value)}
    others = set().union(*OTHER_METHODS.values())
    assert {name for name in methods if not name.startswith("_")} == EDITS.keys() | others


def _texts(cases: dict[str, tuple[Differ, str]]) -> dict[str, str]:
    return {name: text for name, (_, text) in cases.items()}
