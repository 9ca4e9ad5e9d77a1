# SPDX-License-Identifier: Apache-2.0
"""Tables on a disk have the bits of tables in memory, over 300 steps of all rules, scopes, types and
policies, with frames for little more than the batches in flight.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed import _core
from hotbed.embedding.modules import Feature
from hotbed.persist import content_digest, open_checkpoint

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

STEPS, DIM, MOST_IDS = 300, 4, 260
RULES: list[Any] = [
    hb.Sgd(lr=0.1),
    hb.Momentum(lr=0.1),
    hb.Nesterov(lr=0.1),
    hb.Adagrad(lr=0.1),
    hb.RowwiseAdagrad(lr=0.1),
    hb.Adam(lr=0.01),
    hb.RmsProp(lr=0.01),
    hb.Ftrl(lr=0.1),
]
SCOPES = ["touched", "catch_up"]
DTYPES = ["float32", "bfloat16", "float16"]
POLICIES: dict[str, Any] = {
    "none": None,
    "Ttl": hb.Ttl(seconds=20),
    "Lru": hb.Lru(1024),
    "Lfu": hb.Lfu(1024, half_life_seconds=30),
}


def choices() -> list[tuple[Any, str, str, str]]:
    return [
        (
            type(rule)(lr=rule.lr, scope=SCOPES[(i + j // 2) % 2]),
            DTYPES[(i + j) % 3],
            policy,
            f"{i} {policy}",
        )
        for i, rule in enumerate(RULES)
        for j, policy in enumerate(POLICIES)
    ]


def test_choices_meet_in_pairs() -> None:
    rows = [(type(r).__name__, r.scope, dtype, policy) for r, dtype, policy, _ in choices()]
    for one, other in itertools.combinations(range(4), 2):
        values = [{row[number] for row in rows} for number in (one, other)]
        assert len({(row[one], row[other]) for row in rows}) == len(values[0]) * len(values[1])


class Network(nn.Module):
    looks_up_once = True

    def __init__(self, tier: Any) -> None:
        super().__init__()
        every = [
            hb.Table(name, DIM, rule=rule, dtype=dtype, evict=POLICIES[policy], tier=tier)
            for rule, dtype, policy, name in choices()
        ]
        self.tables = hb.EmbeddingCollection([Feature(t.name, t.name) for t in every], every)
        self.head = nn.Linear(DIM * len(every), 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        scores: Tensor = self.head(self.tables.flat(batch)).squeeze(1)
        return scores


def dataset(first: int, last: int) -> hb.Dataset:
    """Return steps whose ids wander."""
    names = [name for *_, name in choices()]
    draw = np.random.default_rng(first)
    steps = np.repeat(np.arange(first, last), MOST_IDS)
    rows = pa.table(
        {
            "id": draw.zipf(1.1, len(steps)) % 3000 + 10 * steps,
            "y": draw.integers(0, 2, len(steps)),
            "t": steps * 1_000_000 + np.arange(len(steps)),
        }
    )
    ids = [hb.Id(name, column="id") for name in names]
    schema = hb.Schema([hb.Label("y"), hb.Time("t", unit="us"), *ids])
    return hb.Dataset(hb.sources.Memory(rows), schema, batch_size=MOST_IDS)


def learn(tier: Any, folder: Path, grains: int | None, ahead: int = 0) -> dict[str, Any]:
    """Train for a time, then with the tables frozen, then as before; evaluate and save between."""
    torch.manual_seed(5)
    network = Network(tier)
    settings: dict[str, Any] = {} if grains is None else {"grains": grains}
    optimizer = torch.optim.Adam(hb.dense_parameters(network), lr=0.01)
    model = hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, **settings)
    metrics, losses = [], []
    for part, (first, last) in enumerate(itertools.pairwise([0, 140, 160, STEPS])):
        for table in model.tables.values():
            table.requires_grad_(part != 1)
        callbacks = [
            hb.callbacks.Evict(step_interval=7),
            hb.callbacks.Checkpoint(folder / str(part), every_steps=35, full_every=3),
        ]
        data = dataset(first, last)
        history = model.fit(hb.Ahead(data, depth=ahead), callbacks=callbacks, progress=False)
        losses.append(history.epochs[0]["loss"])
        metrics.append(model.evaluate(dataset(first, first + 3)))
    model.save(folder / "end")
    return {
        "losses": losses,
        "metrics": metrics,
        "digest": content_digest(open_checkpoint(folder / "end")),
        "tables": {name: content_digest({name: table}) for name, table in model.tables.items()},
    }


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def run(grains: int | None) -> dict[str, Any]:
        return learn(hb.Ram(), tmp_path_factory.mktemp("in_memory"), grains)

    return run


@pytest.mark.parametrize(
    ("fetch", "threads", "engine", "grains", "ahead"),
    [
        (0, 1, "threads", None, 0),
        (1, 2, "best", 4, 0),
        (8, 1, "best", None, 2),
        (8, 2, "threads", 4, 2),
        (0, 2, "best", None, 2),
        (1, 1, "threads", None, 0),
    ],
)
def test_rows_on_a_disk_have_the_bits_of_memory_over_300_steps(
    fetch: int,
    threads: int,
    engine: Any,
    grains: int | None,
    ahead: int,
    in_memory: Any,
    tmp_path: Path,
) -> None:
    expected = in_memory(grains)
    before = _core.num_threads()
    hb.set_num_threads(threads)
    # The rows of a step are kept until the next one is mapped; those of grains are not.
    in_flight = ahead + (2 if grains is None else 1)
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        tier = hb.Ssd(disk, int(1.2 * MOST_IDS) * in_flight, fetch=fetch, engine=engine)
        assert learn(tier, tmp_path / "state", grains, ahead) == expected
    finally:
        hb.set_num_threads(before)
    assert list(disk.iterdir()) == []  # the file has no name
