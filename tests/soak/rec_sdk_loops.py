# SPDX-License-Identifier: Apache-2.0
"""One training in plain loops: of the engine, and of Rec SDK's door by its eight steps.

`switches` names those of the chapter's four features that are on: "expansion" (dynamic expansion,
with Adagrad; else lazy Adam), "dynamic" (dynamic shape), "automatic" (the model computes its ids;
else features of the data are looked up) and "aging" (admission and eviction). `of_engine` runs
without stops. `of_door` saves base and delta checkpoints on its way, and resumes from them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework
from hotbed.embedding.modules import Feature
from hotbed.training.decisions.eviction_schedule import EvictionSchedule
from hotbed.training.run import WallClock

SWITCHES = ("expansion", "dynamic", "automatic", "aging")
EVERY = [list(chosen) for size in range(5) for chosen in combinations(SWITCHES, size)]
"""The 16 combinations."""
DIM = 4
BATCH = 32
MIN_COUNT = 2
TTL_SECONDS = 7200
SAVE_STEPS = 5
EVICT_STEPS = 7


class Tower(nn.Module):
    """The dense part of both loops. Its dropout draws from torch's generator."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features * DIM + 1, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, rows: list[Tensor], x: Tensor) -> Tensor:
        scores: Tensor = self.layers(torch.cat([*rows, x.reshape(-1, 1)], dim=1)).squeeze(1)
        return scores


def data(root: Path) -> hb.Dataset:
    schema = hb.Schema(
        [hb.Label("y"), hb.Time("t", unit="s"), hb.Id("user"), hb.Id("item"), hb.Dense("x")]
    )
    return hb.Dataset(hb.sources.Parquet(str(root / "events" / "*.parquet")), schema, BATCH)


def crossed(batch: Any) -> Any:
    """The ids that the model of the automatic mode computes."""
    return batch.ids["user"].values % 12 * 1_000_003 + batch.ids["item"].values % 10


def digest(tables: Any, tower: nn.Module, dense: torch.optim.Optimizer) -> str:
    """What a training has learned: tables, network and the optimizer's state."""
    state = hb.checkpoints.State(tower, tables, {"dense": dense})
    with tempfile.TemporaryDirectory() as folder:
        hb.checkpoints.save(folder, state)
        return hb.checkpoints.content_digest(hb.checkpoints.open_checkpoint(folder))


# --- the engine -----------------------------------------------------------------------------------


def of_engine(root: Path, switches: Collection[str], journal: str | None = None) -> dict[str, Any]:
    """Train by tables, `SparseOptimizer` and `EvictionSchedule`.

    `journal`: a file with decisions of the clock, which this loop repeats instead of its steps'.
    """
    names = ["cross"] if "automatic" in switches else ["user", "item"]
    rule: Any = hb.Adam(lr=0.01, eps_hat=True)
    if "expansion" in switches:
        rule = hb.Adagrad(lr=0.05, initial_accumulator=0.9)
    aging: dict[str, Any] = {}
    if "aging" in switches:
        admit = hb.MinCount(MIN_COUNT, expire_seconds=TTL_SECONDS)
        aging = {"admit": admit, "evict": hb.Ttl(seconds=TTL_SECONDS)}
    init = hb.Normal(std=0.01)
    tables = {name: hb.Table(name, DIM, rule=rule, init=init, **aging) for name in names}
    torch.manual_seed(3)
    rows = hb.EmbeddingCollection([Feature(name, name, "none") for name in names], tables)
    tower = Tower(len(names))
    dense = torch.optim.Adam(tower.parameters(), lr=0.01)
    sparse = hb.SparseOptimizer(rows)
    schedule = EvictionSchedule(tables, EVICT_STEPS)
    if journal is not None:
        clock = WallClock(journal=hb.sources.Journal(journal))
        schedule = EvictionSchedule(tables, None, 1e9, clock="wall", wall_clock=clock)
    now = 0
    step = 0
    for step, columns in enumerate(data(root), 1):
        batch = columns.map_arrays(torch.from_numpy)
        if "automatic" in switches:
            batch = replace(batch, ids={"cross": hb.Ids(crossed(batch))})
        outputs = tower(list(rows(batch).values()), batch.dense["x"])
        functional.binary_cross_entropy_with_logits(outputs, batch.labels["y"]).backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
        now = max(now, int(batch.time.max()))
        if "aging" in switches:
            schedule.step(step, now)
    return {"digest": digest(tables, tower, dense), "steps": step}


# --- Rec SDK's door -------------------------------------------------------------------------------


class Crossed(nn.Module):
    """A model of the automatic mode: it computes its ids."""

    def __init__(self, table: Any, tower: Tower, lookup: dict[str, Any]) -> None:
        super().__init__()
        self.table = table
        self.tower = tower
        self._lookup = lookup

    def forward(self, batch: Any) -> Tensor:
        rows = mx.sparse_lookup(self.table, crossed(batch), modify_graph=True, **self._lookup)
        return self.tower([rows], batch.dense["x"])


def of_door(
    root: Path, switches: Collection[str], *, hook: dict[str, Any] | None = None, pause: float = 0.0
) -> dict[str, Any]:
    """Train by the eight steps; save at first and every five steps, and resume from the newest.

    `hook`: more keywords of the EvictHook. `pause`: seconds that each step lasts longer.
    """
    mx.init(
        save_steps=SAVE_STEPS,
        use_dynamic="dynamic" in switches,
        use_dynamic_expansion="expansion" in switches,
        is_incremental_checkpoint=True,
        save_checkpoint_due_time=1000,
        save_delta_checkpoints_secs=1,
    )
    try:
        return _trained(root, switches, {"evict_step_interval": EVICT_STEPS} | (hook or {}), pause)
    finally:
        mx.terminate_config_initializer()


def _trained(
    root: Path, switches: Collection[str], hook: dict[str, Any], pause: float
) -> dict[str, Any]:
    if "expansion" in switches:
        sparse = mx.optimizers.adagrad_by_addr.create_hash_optimizer_by_address(0.05)
    else:
        sparse = mx.optimizers.lazy_adam.create_hash_optimizer(0.01)
    thresholds = {}
    if "aging" in switches:
        thresholds = {"access_threshold": MIN_COUNT, "eviction_threshold": TTL_SECONDS}
    lookup = {} if "dynamic" in switches else {"send_count": BATCH}
    evict = mx.EvictHook("aging" in switches, **hook)
    torch.manual_seed(3)
    start = _automatic if "automatic" in switches else _of_features
    model, tower, batches = start(root, thresholds, lookup)
    dense = torch.optim.Adam(tower.parameters(), lr=0.01)
    saver = mx.Saver([model if isinstance(model, nn.Module) else tower, dense], max_to_keep=2)
    place = root / "state"
    begin = 0
    if mx.latest_checkpoint(place) is None:
        saver.save(place, global_step=0)
    else:
        begin = saver.restore(place)
    step = begin
    for step, batch in enumerate(batches, begin + 1):
        outputs = model(batch)
        loss = functional.binary_cross_entropy_with_logits(outputs, batch.labels["y"])
        learn(loss, sparse, dense, by_address="expansion" in switches)
        evict.after_run(global_step=step)
        if step % SAVE_STEPS == 0:
            saver.save(place, global_step=step)
        time.sleep(pause)
    if step % SAVE_STEPS:
        saver.save(place, global_step=step)
    learned = digest(framework.current().started("digest").tables, tower, dense)
    return {"digest": learned, "steps": step, "resumed": begin}


def _automatic(
    root: Path, thresholds: dict[str, int], lookup: dict[str, int]
) -> tuple[Callable[[Any], Tensor], Tower, Iterable[Any]]:
    """A model of the automatic mode, its dense part and its batches, up to step 8."""
    tower = Tower(1)
    model = Crossed(_table("cross"), tower, {**lookup, "access_and_evict_config": thresholds})
    mx.modify_graph_and_start_emb_cache(model, train=data(root))
    return model, tower, mx.get_initializer(True)()


def _of_features(
    root: Path, thresholds: dict[str, int], lookup: dict[str, int]
) -> tuple[Callable[[Any], Tensor], Tower, Iterable[Any]]:
    """The same of the FeatureSpec mode."""
    specs = [mx.FeatureSpec(name, **thresholds) for name in ("user", "item")]
    tables = [_table(spec.name) for spec in specs]
    clock = mx.FeatureSpec("t", is_timestamp=True)
    batches = data(root).map(mx.get_asc_insert_func([clock, *specs]))
    tower = Tower(2)

    def model(batch: Any) -> Tensor:
        rows = [
            mx.sparse_lookup(table, spec, batch=batch, **lookup)
            for table, spec in zip(tables, specs, strict=True)
        ]
        return tower(rows, batch.dense["x"])

    mx.start_asc_pipeline()
    return model, tower, batches


def _table(name: str) -> Any:
    return mx.create_table(
        key_dtype=torch.int64,
        dim=DIM,
        name=name,
        emb_initializer=hb.Normal(std=0.01),
        device_vocabulary_size=1000,
    )


def learn(loss: Tensor, sparse: Any, dense: torch.optim.Optimizer, *, by_address: bool) -> None:
    """Step 7: by gradients of the two collections with dynamic expansion, else by `backward`."""
    dense.zero_grad()
    if not by_address:
        loss.backward()
        sparse.step()
        dense.step()
        return
    rows = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
    addresses = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
    parameters = dense.param_groups[0]["params"]
    grads = torch.autograd.grad(loss, [*rows, *parameters])
    sparse.apply_gradients(list(zip(grads[: len(rows)], addresses, strict=True)))
    for parameter, grad in zip(parameters, grads[len(rows) :], strict=True):
        parameter.grad = grad
    dense.step()
