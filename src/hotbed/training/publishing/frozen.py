# SPDX-License-Identifier: Apache-2.0
"""What a server gets of a model: a state that is frozen, and the graph after the lookups."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.files import Where
from hotbed.optim.modes import on_host
from hotbed.persist.publish.export import export, export_graph
from hotbed.persist.publish.plain import export_plain
from hotbed.persist.publish.version import OnnxGraph
from hotbed.persist.state import checkpoint
from hotbed.training.learned_types import typed
from hotbed.training.run import Run
from hotbed.training.step.network import adapter_of
from hotbed.training.trained import TrainedModel


def freeze(model: TrainedModel, path: str | Path, state: str | Path | None) -> str | Path:
    """Freeze a model under `path`, see `RecModel.export`; all ranks call it, the first writes."""
    shard = model.learner.shard
    shard.check_equal({"export.state": None if state is None else str(state)})
    with ExitStack() as opened:
        now: Where = ""
        if state is None:
            now = shard.from_first(lambda: opened.enter_context(_temporary_folder()))
            checkpoint.save(now, model.state())

        def export_now() -> Where:
            graph = model.graph()
            schema = _request_schema(model)
            maps = () if schema is None else schema.maps
            return export(state or now, path, graph, maps).folder

        return shard.from_first(export_now)


def graph_of(model: TrainedModel) -> OnnxGraph:
    """Return the graph of a model after the lookups, see `RecModel.graph`."""
    criterion = model.learner.criterion
    activate = None if criterion is None else criterion.activate
    adapter = adapter_of(model.network)
    if adapter is not None:
        with on_host(model.network):
            return export_plain(adapter.plain_model(_request_schema(model)), activate)
    if model.schema is None:
        raise ConfigError(
            "export: the model has no schema, got none. Train or evaluate it on a Dataset."
        )
    schema = typed(model.schema, model.schema, model.encoder)
    with on_host(model.network):
        return export_graph(model.network, schema, activate)


def has_graph(run: Run) -> bool:
    """Return whether the network can be exported: a converted one needs a batch first."""
    adapter = adapter_of(run.model.network)
    return adapter is None or adapter.was_called


def _request_schema(model: TrainedModel) -> Schema | None:
    """Return the schema of a server's requests, with the types that were learned from."""
    if model.schema is None:
        return None
    learned: Schema = typed(model.schema, model.schema, model.encoder)
    return learned.raw or learned


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hotbed-export-")
