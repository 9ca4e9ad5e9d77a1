# SPDX-License-Identifier: Apache-2.0
"""The loop: how deep it is, and that a plain PyTorch loop gives the bits of RecModel."""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from table_bits import bits_of

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.embedding.modules.base import table_modules
from hotbed.embedding.modules.state import dense_state
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.checkpoint import State, save
from hotbed.persist.state.restoring import restore
from hotbed.training.callbacks import Checkpoint, Evict
from hotbed.training.decisions.eviction_schedule import EvictionSchedule
from hotbed.training.run import Run

SOURCE = str(Path(hb.__file__).parent)


def frames_of_hotbed() -> list[str]:
    """The functions of hotbed that are on the stack, innermost first."""
    frame: Any = sys._getframe(1)
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


class Watched(torch.nn.Module):
    """A network that records the functions of hotbed that lie above its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.stacks: list[list[str]] = []

    def forward(self, data: Any) -> Any:
        self.stacks.append(frames_of_hotbed())
        return self.linear(data)


BATCHES = [(torch.ones(4, 1), torch.ones(4))] * 2


@pytest.mark.parametrize("verb", ["fit", "online_train"])
def test_loop_is_at_most_four_functions_deep(verb: str) -> None:
    network = Watched()
    model = hb.RecModel(network, "bce", "sgd")
    arguments: dict[str, Any] = {"progress": False}
    if verb == "online_train":
        arguments["progressive"] = False
    getattr(model, verb)(BATCHES, **arguments)
    assert len(network.stacks) == 2
    for stack in network.stacks:
        assert stack[-1] == verb
        assert len(stack) <= 4, stack


def test_run_is_small_and_typed() -> None:
    fields = dataclasses.fields(Run)
    assert len(fields) <= 15
    import hotbed.training.model

    names = {**vars(sys.modules["hotbed.training.run"]), "RecModel": hotbed.training.model.RecModel}
    hints = typing.get_type_hints(Run, names)
    assert not [field.name for field in fields if hints[field.name] is Any]


def rows_of(tables: Any) -> dict[str, list[bytes]]:
    return {name: bits_of(table.export()) for name, table in tables.items()}


def test_plain_loop_with_schedule_and_checkpoint_gives_the_bits_of_the_callbacks(
    dataset: Any, network: Any, tmp_path: Path
) -> None:
    """The plain loop is resumed in the middle, while an eviction is under way."""
    stale = {"evict": hb.Ttl(seconds=150)}
    model = hb.RecModel(network(**stale), "bce", "adam")
    callbacks = [Evict(step_interval=3), Checkpoint(tmp_path / "model", every_steps=4)]
    model.online_train(dataset(640), callbacks, progressive=False, progress=False)

    def plain_loop(num_steps: int) -> tuple[Any, Any]:
        here = network(**stale)
        tables = {table.name: table for module in table_modules(here) for table in module.tables}
        dense = torch.optim.Adam(hb.dense_parameters(here), fused=True)  # as RecModel makes it
        sparse = hb.SparseOptimizer(here)
        schedule = EvictionSchedule(tables, step_interval=3)
        data = dataset(640)
        state = State(here, tables, {"dense": dense, "sparse": sparse})
        step = 0
        now = None
        if (tmp_path / "plain").exists():
            reader = open_checkpoint(tmp_path / "plain")
            restore(reader, state)
            data.resume(hb.Position.from_json(reader.manifest.positions["data"]))
            schedule.load_state(reader.progress["eviction"])
            step = reader.progress["step"]
            now = reader.progress["now"]
        position = None
        for raw in data:
            if step == num_steps:
                break
            batch = raw.map_arrays(torch.from_numpy)
            logits = here(batch).squeeze()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels["y"])
            loss.backward()
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            latest = int(raw.time.max())
            now = latest if now is None else max(now, latest)
            position = raw.position
            schedule.step(step, now)
        progress = {"eviction": schedule.state(), "step": step, "now": now}
        positions = {"data": position.to_json()}
        save(tmp_path / "plain", dataclasses.replace(state, positions=positions, progress=progress))
        return here, tables

    plain_loop(6)
    here, tables = plain_loop(10)
    assert sum(table.stats["evicted"] for table in tables.values()) > 0
    assert rows_of(tables) == rows_of(model.tables)
    mine = dense_state(here)
    for name, tensor in dense_state(model.network).items():
        assert torch.equal(tensor, mine[name]), name


class Own(torch.nn.Module):
    """A network of the user's own, which looks up a collection not at all, twice, or other ids."""

    def __init__(self, inner: Any, way: str) -> None:
        super().__init__()
        self.inner = inner
        self.way = way

    def forward(self, batch: Any) -> Any:
        if self.way == "not at all":
            return self.inner.head.linear.weight.sum() * batch.dense["x"]
        if self.way == "twice":
            self.inner(batch)
        if self.way == "other":
            user = batch.ids["user"]
            shifted = dataclasses.replace(user, values=user.values + 1)
            batch = dataclasses.replace(batch, ids={**batch.ids, "user": shifted})
        return self.inner(batch)


@pytest.mark.parametrize("way", ["as it is", "not at all", "twice", "other"])
def test_map_stage_gives_the_bits_of_mapping_in_the_forward_pass(
    dataset: Any, network: Any, world: Any, way: str
) -> None:
    admit = {"admit": hb.MinCount(3)}

    def learned(*, mapped_first: bool) -> hb.RecModel:
        net = network(**admit)
        net.looks_up_once = mapped_first
        if way != "as it is":
            net = Own(net, way)
        model = hb.RecModel(net, "bce", "adam")
        model.fit(dataset(640), epochs=2, progress=False)
        return model

    ahead = learned(mapped_first=True)
    mapped_ahead = ahead.learner.planner is not None
    assert mapped_ahead == (way == "as it is")
    in_forward = learned(mapped_first=False)
    assert in_forward.learner.planner is None
    assert world.same(world.snapshot(ahead), world.snapshot(in_forward))


class Saying(Own):
    """A network of the user's own that says how it looks up its batches."""

    looks_up_once = True


class Heir(Saying):
    """A subclass may look up other ids."""


def test_a_network_that_looks_up_once_is_mapped_first_to_the_same_bits(
    dataset: Any, network: Any, world: Any
) -> None:
    def learned(kind: type[Own], depth: int) -> hb.RecModel:
        torch.manual_seed(0)
        model = hb.RecModel(kind(network(admit=hb.MinCount(3)), "as it is"), "bce", "adam")
        data = dataset(640)
        model.fit(hb.Ahead(data, depth=depth, torch_threads=1), epochs=2, progress=False)
        return model

    plain = learned(Own, 0)
    assert plain.learner.planner is None
    assert learned(Heir, 0).learner.planner is None
    for depth in (0, 2):
        mapped = learned(Saying, depth)
        assert mapped.learner.planner is not None
        assert world.same(world.snapshot(plain), world.snapshot(mapped))


def test_map_stage_hands_the_plans_of_a_batch_to_its_lookups(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    learner: Any = model.learner
    plans: list[Any] = []
    forward = learner.forward

    def recorded(example: Any) -> Any:
        plans.append(example.batch.plans)
        before = len(plans[-1].left())
        loss = forward(example)
        plans[-1] = (before, len(plans[-1].left()))
        return loss

    learner.forward = recorded
    model.fit(dataset(256), progress=False)
    assert plans[0] == (0, 0)  # the first batch shows what the network looks up
    assert set(plans[1:]) == {(1, 0)}
