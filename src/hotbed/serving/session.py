# SPDX-License-Identifier: Apache-2.0
"""InferenceSession: columns in, predictions out. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.base import Memory
from hotbed.data.batch import Ids
from hotbed.data.encode import Encoder
from hotbed.errors import ConfigError, DataError, MissingExtra
from hotbed.persist.store import MANIFEST
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.rows import Looked, Lookup
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.stores.mapped import MappedVersion

if TYPE_CHECKING:
    from hotbed.serving.cache import EmbeddingCache

Look = Callable[[Mapping[str, Ids], int], Looked]
Predictions = NDArray[np.float32] | dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Scores:
    """Predictions, float32 [n] by output, all of one `version`; `late`: rows that did not come in time and read as default."""

    version: int
    outputs: Mapping[str, NDArray[np.float32]]
    late: int = 0


class InferenceSession:
    """Scores requests with one version of a model. Safe to call from several threads.

    `config_file`: where an exported model lies (its folder, or the MANIFEST.json in it), or a version that a parameter
    server gave. `embedding_cache`: where rows come from; None: from the version itself, the exported model's own rows
    where a path is given. `num_threads`: of ONNX Runtime for one request. Encoding is the plan of training, unknown ids
    read as in training, so scores are those of training.

    With a path and a cache the session is of the version that the cache's parameter server serves now. Raises ConfigError
    where that is another model, or where rows are nowhere to be found.

    Example:
        >>> hb.InferenceSession("exported").predict({"item": [1, 2]}, context={"user": 7})
        >>> cache = hb.EmbeddingCache(server, "ranker")
        >>> hb.InferenceSession(server.model("ranker"), cache).predict({"item": [1, 2]}, context={"user": 7})
    """

    def __init__(
        self,
        config_file: ModelVersion | str | Path,
        embedding_cache: EmbeddingCache | None = None,
        num_threads: int = 1,
    ) -> None:
        model = config_file if isinstance(config_file, ModelVersion) else _opened(config_file, embedding_cache)
        self.model = model
        self._encoder = Encoder(model.schema)
        graph = model.graph
        self._lookups = {
            one["name"]: _lookup(model, [tuple(f) for f in one["features"]], embedding_cache)
            for one in graph["lookups"]
        }
        self._dense = {f"dense/{name}": name for name in graph["dense"]}
        self._outputs: list[str] = graph["outputs"]
        self._session, self._weights = _onnx_session(model, num_threads)
        wanted = {one.name for one in self._session.get_inputs()}
        self._dense = {name: column for name, column in self._dense.items() if name in wanted}

    def predict(
        self, columns: Mapping[str, Any] | pa.RecordBatch | pa.Table, context: Mapping[str, Any] | None = None
    ) -> Predictions:
        """Predictions of n candidates: float32 [n], a dict of them for several labels. Arguments as in `ask`."""
        outputs = self.ask(columns, context).outputs
        return next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)

    def ask(
        self, columns: Mapping[str, Any] | pa.RecordBatch | pa.Table, context: Mapping[str, Any] | None = None
    ) -> Scores:
        """Predictions of n candidates, by output, and which version gave them.

        `columns`: raw columns as in training, without labels: lists, NumPy arrays or Arrow. `context`: columns with one
        value (or an Arrow array of one) that holds for every candidate, such as the user's. Raises DataError for columns
        that do not fit.
        """
        rows = _batch(columns, context)
        batch = self._encoder(rows, labels=False)
        feeds: dict[str, Any] = {name: batch.dense[column] for name, column in self._dense.items()}
        late = 0
        for name, look in self._lookups.items():
            found = look(batch.ids, batch.num_samples)
            feeds[name] = found.flat
            late += found.late
        outputs = self._session.run(self._outputs, feeds)
        return Scores(self.model.version, dict(zip(self._outputs, outputs, strict=True)), late)


def _opened(path: str | Path, cache: EmbeddingCache | None) -> ModelVersion:
    folder = Path(path).parent if Path(path).name == MANIFEST else path
    exported: ModelVersion = ParameterServer().load("model", folder)
    if cache is None:
        return exported
    served: ModelVersion = cache.parameter_server.model(cache.model)
    if served.schema != exported.schema or served.graph_bytes() != exported.graph_bytes():
        raise ConfigError(
            f"InferenceSession: {path} is not the model that the cache's server serves — received model {cache.model!r} with "
            "another graph or schema — export and load the same model"
        )
    return served


def _lookup(model: ModelVersion, features: Sequence[tuple[str, str, str]], cache: EmbeddingCache | None) -> Look:
    if cache is not None:
        return cache.lookup(model, features)
    if not isinstance(model, MappedVersion):
        raise ConfigError(
            f"InferenceSession: version {model.version} of {model.name!r} brings no rows — received no embedding_cache — "
            "give hb.EmbeddingCache(server, model)"
        )
    return Lookup(features, model.tables)


def _batch(columns: Mapping[str, Any] | pa.RecordBatch | pa.Table, context: Mapping[str, Any] | None) -> pa.RecordBatch:
    if isinstance(columns, Mapping):
        columns = Memory(columns).table
    if isinstance(columns, pa.Table):
        columns = columns.combine_chunks()
        columns = columns.to_batches()[0] if columns.num_rows else pa.RecordBatch.from_pylist([], columns.schema)
    for name, value in (context or {}).items():
        one = value if isinstance(value, pa.Array) else pa.array([value])
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
