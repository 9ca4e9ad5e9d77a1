# SPDX-License-Identifier: Apache-2.0
"""Score requests with one version of a model, without torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.source import Source, not_endless
from hotbed.data.arrow_types import holds_text
from hotbed.data.batch import Ids
from hotbed.data.schema import Schema
from hotbed.errors import (
    ConfigError,
    DataError,
    DecodeError,
    FormatError,
    MissingExtra,
    RequestTooLarge,
)
from hotbed.frozen import IdArray, RowArray
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.container.store import MANIFEST_FILE, split
from hotbed.persist.publish.onnx_session import CPU_PROVIDERS, onnx_runtime, open_graph
from hotbed.serving.arguments import PlainInputs
from hotbed.serving.encoded import EncodedRequests
from hotbed.serving.kept import KeptColumns, KeptValues, kept_tables
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.request import Columns, RequestEncoder, ScoreRequest
from hotbed.serving.rows import FeatureIds, FeatureSpec, FrozenLookup, LookupCall
from hotbed.serving.stores.base import ModelVersion, Weight
from hotbed.serving.stores.mapped import MappedVersion

if TYPE_CHECKING:
    from hotbed.serving.cache import EmbeddingCache


@dataclass(frozen=True)
class Scores:
    """Predictions of one version.

    Attributes:
        version: number of the version.
        outputs: predictions by output, float32 [n].
        late: how many rows read as without one because they did not arrive in time.
        route: why a server chose this version; "" = no rule did.
        kept: histories and counts that the request did not bring, by feature.
    """

    version: int
    outputs: Mapping[str, RowArray]
    late: int = 0
    route: str = ""
    kept: KeptValues = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def nonfinite(self) -> int:
        """How many scores are NaN or infinite."""
        count = 0
        for scores in self.outputs.values():
            count += scores.size - int(np.count_nonzero(np.isfinite(scores)))
        return count


class InferenceSession:
    """Score requests with one version of a model. Safe to call from several threads.

    Requests are encoded as in training, and unknown ids read as in training, so the scores are
    those of training.

    Args:
        config_file: an exported model (its folder, or the MANIFEST.json in it), or a version that
            a parameter server returned.
        embedding_cache: source of the rows. None = the version itself; with a path the rows of the
            exported model. With a path and a cache, the session has the version that the cache's
            parameter server serves now.
        num_threads: threads of ONNX Runtime for one request.
        most_entries: rows of histories, over all candidates, that one request may read; None = any
            number. A history of the context counts once for each candidate.
        providers: of ONNX Runtime, which compute the network, the preferred one first, such as
            `["CUDAExecutionProvider", "CPUExecutionProvider"]`; not yet run on a GPU by us.

    Raises:
        ConfigError: the cache serves another model, the version has no rows, or ONNX Runtime does
            not have a provider.

    Example:
        >>> hb.InferenceSession("exported").predict({"item": [1, 2]}, context={"user": 7})
        >>> cache = hb.EmbeddingCache(server, "ranker")
        >>> session = hb.InferenceSession(server.model("ranker"), cache)
        >>> session.predict({"item": [1, 2]}, context={"user": 7})
    """

    def __init__(
        self,
        config_file: ModelVersion | str | Path,
        embedding_cache: EmbeddingCache | None = None,
        num_threads: int = 1,
        most_entries: int | None = None,
        *,
        providers: Sequence[str] = CPU_PROVIDERS,
    ) -> None:
        if isinstance(config_file, ModelVersion):
            model = config_file
        else:
            model = _open_version(config_file, embedding_cache)
        graph = model.graph
        self.model = model
        self._most_entries = most_entries
        self._lengths: Mapping[str, int] = graph.get("lengths", {})
        self._shares_histories: bool = graph.get("shares_histories", False)
        self._columns_together: list[list[str]] = graph.get("columns_together", [])
        self._encode = RequestEncoder(model.schema)
        self._encoded = EncodedRequests(model.schema)
        widths = {column.name: column.width for column in model.schema.dense}
        self._dense = [(name, widths[name]) for name in graph["dense"]]
        self._outputs: list[str] = graph["outputs"]
        self._session = _open_graph(
            model, model.graph_bytes(), model.weights(), num_threads, providers
        )
        self._plain: PlainInputs | None = None
        if "ids" in graph:
            ids_session = _open_graph(model, model.ids_bytes(), (), num_threads)
            self._plain = PlainInputs(graph["ids"], ids_session)
        # inputs that the network does not use are not in its graph
        self._inputs = {argument.name for argument in self._session.get_inputs()}
        poolings = {column.name: column.pooling for column in model.schema.ids}
        self._weighed = list[str]()
        self._features = dict[str, list[str]]()
        self._sequences = dict[str, list[str]]()
        self._lookups = dict[str, LookupCall]()
        for spec in graph["lookups"]:
            name = spec["name"]
            features = [tuple(feature) for feature in spec["features"]]
            sequences = [feature for feature, _, pooling in features if pooling == "none"]
            self._features[name] = [feature for feature, _, _ in features]
            self._sequences[name] = sequences
            if self._plain is None:
                self._weighed += [each for each in sequences if poolings[each] != "none"]
            # After all else that may fail: a cache advances to this version here, and requests of
            # the version before bypass it from then on.
            self._lookups[name] = _lookup(model, features, embedding_cache)
        self._kept: KeptColumns | None = None
        if model.schema.kept:
            tables = _lookup(model, kept_tables(model.schema), embedding_cache)
            self._kept = KeptColumns(model.schema, tables)

    def predict(self, columns: Columns, context: Mapping[str, Any] | None = None) -> Any:
        """Return predictions of n candidates: float32 [n], a dict of them for several labels.

        Its type is not declared: it depends on the model. The outputs of `ask` are always a
        mapping. The arguments are those of `ask`.
        """
        outputs = self.ask(columns, context).outputs
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return dict(outputs)

    def ask(
        self, columns: Columns, context: Mapping[str, Any] | None = None, waited: float = 0.0
    ) -> Scores:
        """Return predictions of n candidates by output, and the version that gave them.

        Args:
            columns: Raw columns as in training, without labels: lists, NumPy arrays or Arrow.
            context: columns with one value (or an array of one) that holds for every candidate,
                such as the user's.
            waited: seconds for which the request waited before this call. They are taken from the
                deadline of an `EmbeddingCache`.

        Raises:
            DataError: the columns do not fit.
            RequestTooLarge: histories have more than `most_entries` rows.

        Without candidates the outputs have shape [0].
        """
        if self._plain is not None:
            columns = self._plain.flat(columns)
            context = self._plain.flat(context, is_context=True)
        asked = monotonic() - waited
        return self._scores(self._encode(columns, context), asked)

    def ask_encoded(
        self, dense: Any, ids: Mapping[str, Any], time: IdArray | None = None
    ) -> Scores:
        """Return predictions of n candidates whose values are encoded: those of a `Batch`.

        No transform is applied. Otherwise the values are checked as raw columns are.

        Args:
            dense: numbers of the dense columns: float [n, sum of widths] in the order of the
                schema, or a mapping of names to [n] or [n, width]; None if there are none.
            ids: integers by feature: `hb.Ids`, an array [n], or a list of lists.
            time: when the candidates are shown, for columns that the model keeps: microseconds
                since 1970, int64 [n] or [1]; None = now.

        Raises:
            DataError: the values do not fit.

        Example:
            >>> batch = hb.Encoder(schema)(rows, labels=False)
            >>> session.ask_encoded(batch.dense, batch.ids, batch.time).outputs
        """
        asked = monotonic()
        return self._scores(self._encoded(dense, ids, time), asked)

    def _scores(self, request: ScoreRequest, asked: float) -> Scores:
        """Return predictions of an encoded request, which was made at `asked`."""
        version = self.model.version
        if request.num_samples == 0:
            return Scores(version, self._no_scores())
        filled: KeptValues = {}
        kept_late = 0
        if self._kept is not None:
            request, filled, kept_late = self._kept.fill(request, asked)
        feeds, late = self._feeds(_at_least_two(self._checked(request)), asked)
        values = self._session.run(self._outputs, feeds)
        outputs = {}
        for name, scores in zip(self._outputs, values, strict=True):
            outputs[name] = scores[: request.num_samples]
        return Scores(version, outputs, late + kept_late, kept=filled)

    def _no_scores(self) -> dict[str, RowArray]:
        """Return the outputs for no candidates."""
        widths = self.model.graph.get("ids", {}).get("widths", {})
        outputs = {}
        for name in self._outputs:
            outputs[name] = np.empty((0, *widths.get(name, ())), np.float32)
        return outputs

    def _checked(self, request: ScoreRequest) -> ScoreRequest:
        """Return a request that fits, with those entries of histories that the network reads."""
        for columns in self._columns_together:
            _check_together(request, columns)
        if self._lengths:
            request = replace(request, ids=self._newest(request.ids))
        lists = itertools.chain(*self._sequences.values())
        self._check_entries(request, lists if self._plain is None else request.ids)
        return request

    def _feeds(self, request: ScoreRequest, asked: float) -> tuple[dict[str, Any], int]:
        """Return the inputs of the graph by name, and the number of late rows."""
        if self._plain is not None:
            return self._plain_feeds(self._plain, request, asked)
        num_late = 0
        feeds = dict[str, Any]()
        if "dense" in self._inputs:
            feeds["dense"] = _concatenate(request, self._dense)
        looked_up = self._without_weights(request.ids)
        num_lists = self._num_lists(request)
        for name, lookup in self._lookups.items():
            flat, sequences, late = lookup(looked_up, request.num_samples, asked)
            num_late += late
            feeds[name] = flat
            features = self._sequences[name]
            for feature, rows in zip(features, sequences, strict=True):
                self._feed_sequence(feeds, name, feature, rows, request, num_lists)
        if len(feeds) > len(self._inputs):
            for name in feeds.keys() - self._inputs:
                del feeds[name]
        return feeds, num_late

    def _num_lists(self, request: ScoreRequest) -> int:
        """Return how many lists of each sequence the graph gets: one if candidates share them."""
        if self._shares_histories:
            features = itertools.chain(*self._sequences.values())
            if all(len(request.ids[name]) == 1 for name in features):
                return 1
        return request.num_samples

    def _newest(self, ids: FeatureIds) -> FeatureIds:
        """Return ids without those of histories that the network does not read."""
        newest = dict(ids)
        for name, length in self._lengths.items():
            history = ids[name]
            if isinstance(history, Ids) and history.offsets is not None:
                newest[name] = history.newest(length)
        return newest

    def _without_weights(self, ids: FeatureIds) -> FeatureIds:
        """Return ids without the weights of those that the graph weighs, so that it gets rows."""
        if not self._weighed:
            return ids
        changed = dict(ids)
        for name in self._weighed:
            weighed = ids[name]
            if isinstance(weighed, Ids):
                changed[name] = Ids(weighed.values, weighed.offsets)
        return changed

    def _check_entries(self, request: ScoreRequest, features: Iterable[str]) -> None:
        """Raise RequestTooLarge if lists, one for each candidate, have more than `most_entries`."""
        if self._most_entries is None:
            return
        num_entries = 0
        for name in features:
            ids = request.ids[name]
            if isinstance(ids, Ids):
                times = request.num_samples if len(ids) == 1 else 1
                num_entries += times * len(ids.values)
        if num_entries > max(self._most_entries, request.num_samples):
            raise RequestTooLarge(
                f"histories: expected at most {self._most_entries} entries over all candidates, "
                f"got {num_entries} for {request.num_samples}. Send fewer candidates or shorter "
                "histories, or raise request_entries of the server."
            )

    def _plain_feeds(
        self, inputs: PlainInputs, request: ScoreRequest, asked: float
    ) -> tuple[dict[str, Any], int]:
        """Return the inputs of the graph of a model that takes tensors, and the late rows."""
        num_late = 0
        feeds: dict[str, Any] = inputs.tensors(request)
        looked_up = inputs.lookups(feeds)
        for name, lookup in self._lookups.items():
            sequences = self._sequences[name]
            ids = {}
            num_bags = 1
            for feature in self._features[name]:
                if feature in sequences:
                    ids[feature] = looked_up[feature].rows()
                else:
                    ids[feature] = looked_up[feature].bags()
                    num_bags = len(ids[feature])
            flat, rows, late = lookup(ids, num_bags, asked)
            num_late += late
            feeds[name] = flat
            for feature, values in zip(sequences, rows, strict=True):
                shape = looked_up[feature].shape
                feeds[f"{name}/{feature}"] = values.reshape(*shape, values.shape[1])
        return {name: feeds[name] for name in self._inputs}, num_late

    def _feed_sequence(
        self,
        feeds: dict[str, Any],
        lookup: str,
        feature: str,
        rows: RowArray,
        request: ScoreRequest,
        num_lists: int,
    ) -> None:
        """Add the rows of a sequence feature, and where each of its lists begins."""
        ids = _with_offsets(request.ids[feature])
        offsets = ids.offsets
        num_rows = len(rows)
        if len(ids) != num_lists:  # context: each candidate has the same rows
            offsets = np.arange(num_lists + 1) * num_rows
            rows = np.tile(rows, (num_lists, 1))
        offsets_input = f"offsets/{feature}"
        if offsets_input not in self._inputs and len(rows) != num_lists:
            raise DataError(
                f"feature {feature!r}: the network takes one id a candidate, got "
                f"{num_rows} for {len(ids)}. Give each candidate one."
            )
        feeds[f"{lookup}/{feature}"] = rows
        feeds[offsets_input] = offsets
        for name, values in ((f"ids/{feature}", ids.values), (f"weights/{feature}", ids.weights)):
            if name in self._inputs:
                feeds[name] = np.tile(values, len(rows) // max(num_rows, 1))

    def predict_source(
        self, source: Source, batch_size: int = 4096, keep: Sequence[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield the predictions of every row of a source, in its order.

        A record batch has the columns of the source that `keep` names, and a column for each
        output: float32, or lists of float32 where an output is a vector; see `beside`. Labels need
        not be there. Text files are read with the types of training.

        Raises:
            ConfigError: the source never ends, or has no column that `keep` names.
            DataError: a row does not fit.

        Example: `pa.Table.from_batches(session.predict_source(hb.sources.Parquet("rows.parquet")))`
        """
        not_endless(source, "scoring")
        schema = self.model.schema
        types = dict(schema.number_types())
        for name, kind in schema.types.items():
            if holds_text(kind):
                types[name] = pa.string()
        columns = tuple(schema.raw_columns(labels=False))
        if schema.kept and schema.time is not None:  # histories are those of the time of each row
            columns = tuple(dict.fromkeys((*columns, schema.time.source)))
        plan = ReadPlan(tuple(dict.fromkeys((*columns, *keep))), types)
        for rows, position in source.read(None, batch_size, plan):
            try:
                scores = self.ask(rows.select(columns) if keep else rows)
            except DecodeError as error:
                rows_back = rows.num_rows - (error.row or 1) + 1
                place = source.locate(position, rows_back)
                raise DecodeError(
                    f"{place}: {error}", place.file, place.number, error.column
                ) from error
            yield pa.record_batch(beside(rows, keep, scores.outputs))


def beside(
    rows: pa.RecordBatch | pa.Table, keep: Sequence[str], outputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the kept columns of rows, and their predictions; vectors [n, dim] are lists of `dim`.

    A prediction that has the name of a kept column, as of a label, is called `predicted_NAME`.
    Raises ConfigError for a column that the rows do not have.
    """
    missing = [name for name in keep if name not in rows.schema.names]
    if missing:
        raise ConfigError(
            f"keep: the source has no such column, got {missing[0]!r}. Name one of its columns."
        )
    columns = {name: rows.column(name) for name in keep}
    for name, values in outputs.items():
        if getattr(values, "ndim", 1) == 2:  # vectors
            flat = pa.array(np.ascontiguousarray(values).ravel())
            values = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        columns[f"predicted_{name}" if name in columns else name] = values
    return columns


def _open_version(path: str | Path, cache: EmbeddingCache | None) -> ModelVersion:
    """Return the version of an exported model; with a cache, the version that its store serves."""
    root, name = split(path)
    folder = root if name == MANIFEST_FILE else path
    if cache is None:
        version: ModelVersion = ParameterServer().load("model", folder)
        return version
    served: ModelVersion = cache.parameter_server.model(cache.model)
    link = open_checkpoint(folder).links[0]  # only the graph is compared, not the rows
    graph = link.manifest.graph
    schema = Schema.from_json(link.manifest.schema or {})
    if (
        graph is None
        or schema != served.schema
        or graph.ids != served.graph.get("ids")
        or link.read(graph.file) != served.graph_bytes()
    ):
        raise ConfigError(
            f"InferenceSession: {path} is not the model that the cache's server serves, got model "
            f"{cache.model!r} with another graph or schema. Export and load the same model."
        )
    return served


def _lookup(
    model: ModelVersion, features: Sequence[FeatureSpec], cache: EmbeddingCache | None
) -> LookupCall:
    if cache is not None:
        return cache.lookup(model, features)
    if not isinstance(model, MappedVersion):
        raise ConfigError(
            f"InferenceSession: version {model.version} of {model.name!r} does not hold rows, got "
            "no embedding_cache. Give hb.EmbeddingCache(server, model)."
        )
    return FrozenLookup(features, model.tables)


def _check_together(request: ScoreRequest, columns: Sequence[str]) -> None:
    """Raise DecodeError unless the columns of one history have lists of equal lengths."""
    first, *others = [_with_offsets(request.ids[name]) for name in columns]
    for name, other in zip(columns[1:], others, strict=True):
        if np.array_equal(first.offsets, other.offsets):
            continue
        lengths, other_lengths = np.broadcast_arrays(first.lengths(), other.lengths())
        differs = lengths != other_lengths
        if differs.any():
            row = int(differs.argmax())
            raise DecodeError(
                f"candidate {row + 1}: columns {columns[0]!r} and {name!r} are one history, got "
                f"lists of {lengths[row]} and {other_lengths[row]} entries. Send an entry in each "
                "column for each event of the history.",
                row=row + 1,
            )


def _at_least_two(request: ScoreRequest) -> ScoreRequest:
    """Return a request in which a candidate that is alone is there twice.

    The network multiplies a matrix of one row by another kernel than one of several. So the scores
    of a candidate would not have the same bits in each batch.
    """
    if request.num_samples > 1:
        return request
    return replace(request, num_samples=2)  # each of its values holds for both


def _with_offsets(ids: Ids | IdArray) -> Ids:
    return (ids if isinstance(ids, Ids) else Ids(ids)).with_offsets()


def _concatenate(request: ScoreRequest, columns: Sequence[tuple[str, int]]) -> RowArray:
    """Return dense columns, each with its width, as one matrix [n, sum of widths]."""
    total = sum(width for _, width in columns)
    matrix = np.empty((request.num_samples, total), np.float32)
    first = 0
    for name, width in columns:
        values = request.dense[name]
        if width == 1:
            matrix[:, first] = values
        else:
            matrix[:, first : first + width] = values
        first += width
    return matrix


def _open_graph(
    model: ModelVersion,
    graph: bytes,
    weights: Iterable[Weight],
    num_threads: int,
    providers: Sequence[str] = CPU_PROVIDERS,
) -> Any:
    """Open a graph of a version with weights."""
    try:
        onnx_runtime()
    except ImportError as error:
        raise MissingExtra(
            f"InferenceSession: {error.name} is not installed. Run pip install hotbed[serve]."
        ) from error
    values = list(weights)
    try:
        return open_graph(graph, values, num_threads, providers)
    except ConfigError:
        raise
    except Exception as error:  # ONNX Runtime has error types of its own
        reason = str(error).splitlines()[0][:300]
        raise FormatError(
            f"model {model.name!r}: the graph of version {model.version} cannot be opened, got "
            f"{reason!r} from onnxruntime {onnx_runtime().__version__}. Export the model that is "
            "trained now, or upgrade onnxruntime."
        ) from error
