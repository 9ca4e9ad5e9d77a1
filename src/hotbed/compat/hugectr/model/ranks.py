# SPDX-License-Identifier: Apache-2.0
"""A model on several processes: where its tables lie, its grains and its devices."""

from __future__ import annotations

import logging
import random

import torch

from hotbed.compat.hugectr.clauses import Solver, SparseEmbedding
from hotbed.compat.hugectr.translate import Translation
from hotbed.data.grains import grains_for
from hotbed.errors import ConfigError
from hotbed.parallel import Ranks
from hotbed.parallel.world import trains_together, world_size

_LOG = logging.getLogger("hotbed.compat.hugectr")


def grains_of(solver: Solver) -> int:
    """Return the grains of a step: those of the solver, else as many as several processes want.

    Raises:
        ConfigError: there are more processes than grains.
    """
    grains = solver.grains
    if grains is None:
        grains = grains_for(solver.batchsize) if trains_together() else 1
    if trains_together() and grains < world_size():
        raise ConfigError(
            f"solver.grains: each rank computes at least one, got {grains} grains of a batchsize "
            f"of {solver.batchsize} and a world of {world_size()} ranks. Give "
            "CreateSolver(grains=8), a batchsize with 512 samples for each rank, or start fewer."
        )
    return grains


def localized_tables(translation: Translation) -> list[str]:
    """Return the names of the tables that lie on one rank each: those of localized embeddings."""
    names = []
    for embedding in translation.embeddings:
        clause = embedding.clause
        if isinstance(clause, SparseEmbedding) and clause.embedding_type.name.startswith("Local"):
            names.append(embedding.table)
    return names


def seed_of(solver: Solver) -> int:
    """Return the seed of the solver; of 0, a random one, which is that of all ranks."""
    seed = solver.seed or random.randrange(1, 2**31)
    if trains_together():
        seed = Ranks.of_job().gather_objects(seed)[0]
    return int(seed)


def log_devices(solver: Solver, device: torch.device) -> None:
    """Warn of devices that do not train, and say how to start as many processes as `vvgpu` has.

    Mixed precision is that of a GPU: warn, too, where the model is not on one.
    """
    if solver.use_mixed_precision and device.type == "cpu":
        _LOG.warning(
            "hugectr: solver.use_mixed_precision has no effect on a CPU: it computes in float32"
        )
    devices = sum(len(of_node) for of_node in solver.vvgpu)
    if devices not in (1, world_size()):
        _LOG.warning(
            "hugectr: solver.vvgpu names %d devices, and %d process(es) train. To train on %d, "
            "start `torchrun --nproc-per-node %d -m hotbed.compat.hugectr.run script.py`",
            devices,
            world_size(),
            devices,
            devices,
        )
