# SPDX-License-Identifier: Apache-2.0
"""InferenceSession: columns in, predictions out. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.plan import ReadPlan
from hotbed.connectors.source import Source, not_endless
from hotbed.data.batch import Ids
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError, DataError, DecodeError, FormatError, MissingExtra
from hotbed.persist.format import open_checkpoint
from hotbed.persist.store import MANIFEST_FILE, split
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.request import Columns, RequestEncoder, ScoreRequest
from hotbed.serving.rows import Lookup, LookupCall
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.stores.mapped import MappedVersion

if TYPE_CHECKING:
    from hotbed.serving.cache import EmbeddingCache

Predictions = NDArray[np.float32] | dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Scores:
    """Predictions, float32 [n] by output, all of one `version`; `late`: rows that did not come in
    time and read as default.
    """

    version: int
    outputs: Mapping[str, NDArray[np.float32]]
    late: int = 0


class InferenceSession:
    """Scores requests with one version of a model. Safe to call from several threads.

    `config_file`: where an exported model lies (its folder, or the MANIFEST.json in it), or a
    version that a parameter server gave. `embedding_cache`: where rows come from; None: from the
    version itself, the exported model's own rows where a path is given. `num_threads`: of ONNX
    Runtime for one request. Encoding is the plan of training, unknown ids read as in training, so
    scores are those of training.

    With a path and a cache the session is of the version that the cache's parameter server serves
    now. Raises ConfigError where that is another model, or where rows are nowhere to be found.

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
        model = (
            config_file
            if isinstance(config_file, ModelVersion)
            else _opened(config_file, embedding_cache)
        )
        self.model = model
        self._encode = RequestEncoder(model.schema)
        graph = model.graph
        self._dense = [
            (name, next(one.width for one in model.schema.dense if one.name == name))
            for name in graph["dense"]
        ]
        self._outputs: list[str] = graph["outputs"]
        self._session = _onnx_session(model, num_threads)
        # what the network does not look at is no input
        self._wanted = {one.name for one in self._session.get_inputs()}
        self._sequences = {
            one["name"]: [name for name, _, pooling in one["features"] if pooling == "none"]
            for one in graph["lookups"]
        }
        # last: with it a cache goes on to this version, and requests of the one before read past it
        self._lookups = {
            one["name"]: _lookup(model, [tuple(f) for f in one["features"]], embedding_cache)
            for one in graph["lookups"]
        }

    def predict(self, columns: Columns, context: Mapping[str, Any] | None = None) -> Predictions:
        """Predictions of n candidates: float32 [n], a dict of them for several labels. Arguments as
        in `ask`.
        """
        outputs = self.ask(columns, context).outputs
        return next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)

    def ask(self, columns: Columns, context: Mapping[str, Any] | None = None) -> Scores:
        """Predictions of n candidates, by output, and which version gave them.

        `columns`: raw columns as in training, without labels: lists, NumPy arrays or Arrow.
        `context`: columns with one value (or an array of one) that holds for every candidate, such
        as the user's. Raises DataError for columns that do not fit. Without candidates the outputs
        have shape [0].
        """
        request = self._encode(columns, context)
        n = request.num_samples
        late = 0
        feeds = dict[str, Any]()
        if n == 0:
            return Scores(
                self.model.version, {name: np.empty(0, np.float32) for name in self._outputs}
            )
        if "dense" in self._wanted:
            feeds["dense"] = _side_by_side(request, self._dense)
        for lookup, look in self._lookups.items():
            found = look(request.ids, n)
            late += found.late
            feeds[lookup] = found.flat
            for feature, rows in zip(self._sequences[lookup], found.sequences, strict=True):
                given = request.ids[feature]
                ids = (given if isinstance(given, Ids) else Ids(given)).with_offsets()
                once = len(ids) != n  # context: each candidate has it
                feeds[f"{lookup}/{feature}"] = np.tile(rows, (n, 1)) if once else rows
                feeds[f"offsets/{feature}"] = np.arange(n + 1) * len(rows) if once else ids.offsets
                if (
                    f"offsets/{feature}" not in self._wanted
                    and len(feeds[f"{lookup}/{feature}"]) != n
                ):
                    raise DataError(
                        f"feature {feature!r}: the network takes one id a candidate — received "
                        f"{len(rows)} for {len(ids)} — give each candidate one"
                    )
        if len(feeds) > len(self._wanted):
            feeds = {name: values for name, values in feeds.items() if name in self._wanted}
        outputs = self._session.run(self._outputs, feeds)
        return Scores(self.model.version, dict(zip(self._outputs, outputs, strict=True)), late)

    def predict_source(self, source: Source, batch_size: int = 4096) -> Iterator[pa.RecordBatch]:
        """Yield the predictions of every row of a source, in its order.

        A record batch has a float32 column for each output.

        Labels need not be there; text files are read with the types of training. Raises ConfigError
        for a source that never ends, DataError for rows that do not fit.

        Example: `pa.Table.from_batches(session.predict_source(hb.sources.Parquet("rows.parquet")))`
        """
        not_endless(source, "scoring")
        schema = self.model.schema
        text = {name: pa.string() for name, held in schema.types.items() if held == "text"}
        plan = ReadPlan(tuple(schema.raw_columns(labels=False)), {**schema.number_types(), **text})
        for rows, after in source.read(None, batch_size, plan):
            try:
                yield pa.record_batch(dict(self.ask(rows).outputs))
            except DecodeError as error:
                place = source.locate(after, rows.num_rows - (error.row or 1) + 1)
                raise DecodeError(
                    f"{place}: {error}", place.file, place.number, error.column
                ) from error


def _opened(path: str | Path, cache: EmbeddingCache | None) -> ModelVersion:
    root, name = split(path)
    folder = root if name == MANIFEST_FILE else path
    if cache is None:
        version: ModelVersion = ParameterServer().load("model", folder)
        return version
    served: ModelVersion = cache.parameter_server.model(cache.model)
    link = open_checkpoint(folder).links[0]  # its rows are not needed
    graph = link.manifest.get("graph")
    schema = Schema.from_json(link.manifest["schema"])
    if (
        not graph
        or schema != served.schema
        or bytes(link.read(graph["file"])) != served.graph_bytes()
    ):
        raise ConfigError(
            f"InferenceSession: {path} is not the model that the cache's server serves — received "
            f"model {cache.model!r} with "
            "another graph or schema — export and load the same model"
        )
    return served


def _lookup(
    model: ModelVersion, features: Sequence[tuple[str, str, str]], cache: EmbeddingCache | None
) -> LookupCall:
    if cache is not None:
        return cache.lookup(model, features)
    if not isinstance(model, MappedVersion):
        raise ConfigError(
            f"InferenceSession: version {model.version} of {model.name!r} brings no rows — "
            "received no embedding_cache — "
            "give hb.EmbeddingCache(server, model)"
        )
    return Lookup(features, model.tables)


def _side_by_side(request: ScoreRequest, columns: Sequence[tuple[str, int]]) -> NDArray[np.float32]:
    """Dense columns as one matrix [n, sum of widths]."""
    matrix = np.empty((request.num_samples, sum(width for _, width in columns)), np.float32)
    first = 0
    for name, width in columns:
        values = request.dense[name]
        if width == 1:
            matrix[:, first] = values
        else:
            matrix[:, first : first + width] = values
        first += width
    return matrix


def _onnx_session(model: ModelVersion, num_threads: int) -> Any:
    """The graph with the weights of this version, from which ONNX Runtime then derives what it
    likes.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra(
            "serving needs onnxruntime — it is not installed — pip install hotbed[serve]"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    weights = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in model.weights()
    }
    options.add_external_initializers(list(weights), list(weights.values()))
    try:
        return onnxruntime.InferenceSession(
            model.graph_bytes(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # of types of its own
        raise FormatError(
            f"model {model.name!r}: the graph of version {model.version} cannot be opened — "
            f"onnxruntime {onnxruntime.__version__} "
            f"says {str(error).splitlines()[0][:300]} — export the model that is trained now, or "
            "upgrade onnxruntime"
        ) from error
