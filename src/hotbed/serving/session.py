# SPDX-License-Identifier: Apache-2.0
"""InferenceSession: columns in, predictions out. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.base import Memory
from hotbed.data.encode import Encoder
from hotbed.errors import ConfigError, DataError, MissingExtra
from hotbed.serving.rows import Lookup
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.stores.mapped import MappedVersion

Predictions = NDArray[np.float32] | dict[str, NDArray[np.float32]]


class InferenceSession:
    """Scores requests with one version of a model. Safe to call from several threads.

    `model`: what `ParameterServer.load` gave. `num_threads`: of ONNX Runtime for one request. Encoding is the plan of
    training, unknown ids read as in training, so scores are those of training.

    Example: `hb.InferenceSession(server.load("ranker", "exported")).predict({"user": [7, 7], "item": [1, 2]})`.
    """

    def __init__(self, model: ModelVersion, num_threads: int = 1) -> None:
        if not isinstance(model, MappedVersion):
            raise ConfigError(f"model {model.name!r}: its rows are in another process — received no cache — give one")
        self.model = model
        self._encoder = Encoder(model.schema)
        graph = model.graph
        self._lookups = {
            one["name"]: Lookup([tuple(f) for f in one["features"]], model.tables) for one in graph["lookups"]
        }
        self._dense = {f"dense/{name}": name for name in graph["dense"]}
        self._outputs: list[str] = graph["outputs"]
        self._session, self._weights = _onnx_session(model, num_threads)
        wanted = {one.name for one in self._session.get_inputs()}
        self._dense = {name: column for name, column in self._dense.items() if name in wanted}

    def predict(
        self, columns: Mapping[str, Any] | pa.RecordBatch | pa.Table, context: Mapping[str, Any] | None = None
    ) -> Predictions:
        """Predictions of n candidates: float32 [n], a dict of them for several labels.

        `columns`: raw columns as in training, without labels: lists, NumPy arrays or Arrow. `context`: columns with one
        value that holds for every candidate, such as the user's. Raises DataError for columns that do not fit.
        """
        rows = _batch(columns, context)
        batch = self._encoder(rows, labels=False)
        feeds: dict[str, Any] = {name: look(batch.ids, batch.num_samples)[0] for name, look in self._lookups.items()}
        feeds |= {name: batch.dense[column] for name, column in self._dense.items()}
        found = self._session.run(self._outputs, feeds)
        if len(found) == 1:
            single: NDArray[np.float32] = found[0]
            return single
        return dict(zip(self._outputs, found, strict=True))


def _batch(columns: Mapping[str, Any] | pa.RecordBatch | pa.Table, context: Mapping[str, Any] | None) -> pa.RecordBatch:
    if isinstance(columns, Mapping):
        columns = Memory(columns).table
    if isinstance(columns, pa.Table):
        columns = columns.combine_chunks()
        columns = columns.to_batches()[0] if columns.num_rows else pa.RecordBatch.from_pylist([], columns.schema)
    for name, value in (context or {}).items():
        one = pa.array([value])
        if name in columns.schema.names:
            raise DataError(f"column {name!r}: given twice — received it for the candidates and as context — give one")
        columns = columns.append_column(name, one.take(pa.array(np.zeros(columns.num_rows, np.int64))))
    return columns


def _onnx_session(model: ModelVersion, num_threads: int) -> tuple[Any, Any]:
    """The graph with the weights of this version in the place of those it was exported with; they must outlive it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra("serving needs onnxruntime — it is not installed — pip install hotbed[serve]") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = 3
    weights = [(name, onnxruntime.OrtValue.ortvalue_from_numpy(value)) for name, value in model.weights()]
    for name, value in weights:
        options.add_initializer(name, value)
    session = onnxruntime.InferenceSession(model.graph_bytes(), options, providers=["CPUExecutionProvider"])
    return session, weights
