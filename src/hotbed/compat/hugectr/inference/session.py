# SPDX-License-Identifier: Apache-2.0
"""The sessions of HugeCTR: v3.0 with server and cache, v3.1 and later with `InferenceParams`."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed import checks
from hotbed.compat.hugectr.clause import by_order
from hotbed.compat.hugectr.clauses import DataReaderParams, OptParams, Solver
from hotbed.compat.hugectr.inference.served import ServedModel
from hotbed.compat.hugectr.json.inference import read_inference, read_json
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.compat.hugectr.model.tensors import Tensors
from hotbed.compat.hugectr.params import InferenceParams, check_names, check_share
from hotbed.compat.hugectr.reader import adds_sizes, columns_of, evaluation_data
from hotbed.compat.hugectr.translate import Translation, translate
from hotbed.config import did_you_mean
from hotbed.data.batch import Batch
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError, DataError
from hotbed.metrics import AUC
from hotbed.serving.cache import EmbeddingCache
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.session import InferenceSession as EngineSession

_MIN_CACHE_BYTES = 1 << 20
_REQUEST = ["dense_feature", "embeddingcolumns", "row_ptrs", "i64_input_key"]
_FILES = [
    "num_batches",
    "source",
    "data_reader_type",
    "check_type",
    "slot_size_array",
    "num_samples",
    "data_source_params",
    "reading_file_sequentially",  # of v23.02 to v23.08: they are
]
_NEEDED = (*_REQUEST[:3], *_FILES[:4])


class ServedModels:
    """Models by name, and the parameter server that has their rows.

    `CreateParameterServer` makes it.
    """

    def __init__(self) -> None:
        self.server = ParameterServer()
        self._models: dict[str, ServedModel] = {}

    def __getitem__(self, name: str) -> ServedModel:
        if name not in self._models:
            advice = did_you_mean(name, self._models)
            raise ConfigError(f"model {name!r}: the parameter server does not have it. {advice}")
        return self._models[name]

    def add(self, config: dict[str, Any], params: InferenceParams) -> ServedModel:
        """Load the model of a JSON file and of its weight files."""
        name = params.model_name
        if name in self._models:
            raise ConfigError(
                f"model {name!r}: the parameter server has a model of this name, got another. "
                "Rename one of them."
            )
        model = ServedModel(self.server, read_graph(config), params)
        self._models[params.model_name] = model
        return model


def CreateParameterServer(
    model_config_path: Sequence[str], model_name: Sequence[str], i64_input_key: bool
) -> ServedModels:
    """Load models of v3.0 and v3.0.1.

    Args:
        model_config_path: JSON files with the clauses `inference` and `layers`.
        model_name: the name of each.
        i64_input_key: whether keys have 64 bits; `input_key_type` of a file must agree.

    Raises:
        ConfigError: a file is wrong, or is still one of training, or two models have one name.
        PersistError, FormatError: a weight file is missing or has the wrong size.
    """
    for argument, value in (("model_config_path", model_config_path), ("model_name", model_name)):
        if isinstance(value, str):
            raise ConfigError(
                f"CreateParameterServer.{argument}: expected a list, got {value!r:.80}. Write "
                f"[{value!r:.80}]."
            )
    check_names("CreateParameterServer.model_name", model_name)
    if len(model_config_path) != len(model_name):
        raise ConfigError(
            f"CreateParameterServer.model_name: expected one for each of {len(model_config_path)} "
            f"files, got {list(model_name)}. Name each model."
        )
    models = ServedModels()
    for path, name in zip(model_config_path, model_name, strict=True):
        models.add(read_json(path), _params(path, name, i64_input_key))
    return models


def _params(path: str, name: str, i64: bool) -> InferenceParams:
    """Return the parameters in a file of v3.0, under the name of a model."""
    params = read_inference(read_json(path), path)
    if params.i64_input_key != i64:
        key_type = "I64" if params.i64_input_key else "I32"
        raise ConfigError(
            f"{path}: inference.input_key_type: it is {key_type}, got i64_input_key={i64}. Let "
            "both say the same."
        )
    return dataclasses.replace(params, model_name=name)


class ServedCache:
    """A model of a parameter server, with the rows that its requests keep in memory.

    `CreateEmbeddingCache` makes it.
    """

    def __init__(self, models: ServedModels, name: str, share: float | None) -> None:
        self.model = models[name]
        self.server = models.server
        self.rows: EmbeddingCache | None = None
        if share is not None:
            num_bytes = max(_MIN_CACHE_BYTES, int(share * self.model.num_row_bytes))
            self.rows = EmbeddingCache(models.server, name, num_bytes)


def CreateEmbeddingCache(
    parameter_server: ServedModels,
    cuda_dev_id: int,
    use_gpu_embedding_cache: bool,
    cache_size_percentage: float,
    model_config_path: str,
    model_name: str,
    i64_input_key: bool,
) -> ServedCache:
    """Return a cache of one model of a parameter server, in the memory of the host.

    Args:
        parameter_server: that has the model.
        cuda_dev_id: without effect: scores are computed on the CPU.
        use_gpu_embedding_cache: whether rows are kept in a cache; without, they are read from the
            files of the server.
        cache_size_percentage: share of the rows that the cache holds, 0 to 1.
        model_config_path: its JSON file, as the parameter server has read it.
        model_name: its name.
        i64_input_key: whether keys have 64 bits, as for the parameter server.

    Raises:
        ConfigError: an argument is not that of the model, or the share is not from 0 to 1.
        PersistError: the JSON file cannot be read.
    """
    if not isinstance(parameter_server, ServedModels):
        raise ConfigError(
            "CreateEmbeddingCache.parameter_server: expected what CreateParameterServer returns, "
            f"got {parameter_server!r:.80}. Give it first."
        )
    check_share("CreateEmbeddingCache.cache_size_percentage", cache_size_percentage)
    model = parameter_server[model_name]
    _check_file("CreateEmbeddingCache.model_config_path", model_config_path, model)
    if i64_input_key != model.params.i64_input_key:
        raise ConfigError(
            f"CreateEmbeddingCache.i64_input_key: expected {model.params.i64_input_key}, that of "
            f"the parameter server, got {i64_input_key!r}. Let both say the same."
        )
    KNOBS.log_no_effect("inference_params.use_gpu_embedding_cache", when=use_gpu_embedding_cache)
    return ServedCache(
        parameter_server, model_name, cache_size_percentage if use_gpu_embedding_cache else None
    )


def _check_file(where: str, path: str | Path, model: ServedModel) -> None:
    """Raise ConfigError unless a JSON file describes the model that is served."""
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"{where}: expected the path of a JSON file, got {path!r:.80}. Give it.")
    config = read_json(path)
    params = dataclasses.replace(read_inference(config, path), model_name=model.params.model_name)
    differing = [
        field.name
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != getattr(model.params, field.name)
    ]
    if read_graph(config) != model.graph:
        differing.append("layers")
    if differing:
        raise ConfigError(
            f"{where}: expected the file of model {model.params.model_name!r} as the parameter "
            f"server has read it, got {str(path)!r} with another {', '.join(differing)}. Give that "
            "file, or create the parameter server anew."
        )


class InferenceSession:
    """Score requests with one model.

    Args:
        config_file: the JSON file of the model, as the parameter server has read it.
        device_id: without effect: scores are computed on the CPU.
        embedding_cache: of `CreateEmbeddingCache`.

    Raises:
        ConfigError: the file describes another model than that of the cache.
        PersistError: the file cannot be read.

    Example:
        >>> server = CreateParameterServer(["dcn.json"], ["dcn"], False)
        >>> cache = CreateEmbeddingCache(server, 0, True, 0.2, "dcn.json", "dcn", False)
        >>> InferenceSession("dcn.json", 0, cache).predict(dense, keys, row_ptrs)
    """

    def __init__(self, config_file: str, device_id: int, embedding_cache: ServedCache) -> None:
        if not isinstance(embedding_cache, ServedCache):
            raise ConfigError(
                "InferenceSession.embedding_cache: expected what CreateEmbeddingCache returns, got "
                f"{embedding_cache!r:.80}. Write InferenceSession(config_file, device_id, cache)."
            )
        _check_file("InferenceSession.config_file", config_file, embedding_cache.model)
        KNOBS.log_no_effect("inference_params.device_id", when=device_id != 0)
        self._open(embedding_cache)

    def _open(self, cache: ServedCache) -> None:
        """Serve the model of a cache."""
        self._model = cache.model
        version = cache.server.model(self._model.params.model_name)
        self._session = EngineSession(version, cache.rows)
        self._last: tuple[Translation, Batch] | None = None

    def predict(self, *args: Any, **keywords: Any) -> Any:
        """Return predictions of a request, or of samples in files.

        `predict(dense_feature, embeddingcolumns, row_ptrs)` returns a list of floats: those of the
        first sample, then those of the second, and so on. `embeddingcolumns` has the keys as the
        table knows them, with the offsets of their slots. The fourth argument of v3.0,
        `i64_input_key=True`, changes nothing.

        `predict(num_batches, source, data_reader_type, check_type, slot_size_array=[],
        num_samples=0, data_source_params=...)` returns an array of `num_batches * max_batchsize`
        predictions [n], or [n, labels] for several. Reading starts anew at the end of the data.
        Without `slot_size_array`, that of training is taken where the JSON file says it.

        Raises:
            DataError, RowShapeError: the request does not fit the model.
            ConfigError: `slot_size_array` is neither given nor in the JSON file.
        """
        if _is_request(args, keywords):
            values = _values("predict", _REQUEST, args, keywords)
            scores = self._model.ask(
                self._session,
                values["dense_feature"],
                values["embeddingcolumns"],
                values["row_ptrs"],
            )
            return scores.reshape(-1).tolist()
        predictions = self._predict_files(_values("predict", _FILES, args, keywords))
        if predictions.shape[1] == 1:
            return predictions[:, 0]
        return predictions

    def evaluate(self, *args: Any, **keywords: Any) -> float:
        """Return the AUC of samples in files, the mean over labels if there are several.

        The arguments are those of `predict` over files.
        """
        values = _values("evaluate", _FILES, args, keywords)
        metrics = {label: AUC() for label in self._model.labels}
        for batch, scores in self._batches(values):
            for place, (label, metric) in enumerate(metrics.items()):
                metric.update(scores[:, place], batch.labels[label])
        return statistics.fmean(metric.eval() for metric in metrics.values())

    def refresh_embedding_cache(self) -> None:
        """Do nothing: a cache never holds rows that differ from those of the model."""

    def _predict_files(self, values: dict[str, Any]) -> NDArray[np.float32]:
        """Return predictions [n, labels] of samples in files."""
        parts = [scores for _, scores in self._batches(values)]
        return np.concatenate(parts)

    def _batches(self, values: dict[str, Any]) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
        """Yield batches of files with their predictions, until there are enough samples."""
        reader = self._reader(values)
        translation, dataset = self._dataset(reader)
        missing = values["num_batches"] * self._model.params.max_batchsize
        while missing > 0:
            before = missing
            for batch in dataset:
                part = batch[:missing]
                dense = [values.reshape(len(part), -1) for values in part.dense.values()]
                matrix = np.concatenate(dense, axis=1) if dense else None
                yield part, self._model.scores(self._session, matrix, part.ids)
                self._last = (translation, part)
                missing -= len(part)
                if not missing:
                    return
            if missing == before:
                raise DataError(
                    f"{reader.source}: no samples, got an empty source. Check the path."
                )

    def _reader(self, values: dict[str, Any]) -> DataReaderParams:
        """Return the reader of files that `predict` and `evaluate` name."""
        checks.whole_number("predict.num_batches", values["num_batches"], 1)
        optional = {}
        if "data_source_params" in values:
            optional["data_source_params"] = values["data_source_params"]
        reader = DataReaderParams(
            data_reader_type=values["data_reader_type"],
            source=values["source"],
            eval_source=values["source"],
            check_type=values["check_type"],
            num_samples=values.get("num_samples", 0),
            eval_num_samples=values.get("num_samples", 0),
            slot_size_array=values.get("slot_size_array", ()),
            adds_slot_offsets=self._model.adds_slot_offsets,
            **optional,
        )
        if "slot_size_array" in values or not adds_sizes(reader):
            return reader
        return dataclasses.replace(reader, slot_size_array=self._model.slot_sizes())

    def _dataset(self, reader: DataReaderParams) -> tuple[Translation, Dataset]:
        """Return the samples of files, and the translation of the graph for their columns."""
        graph = self._model.graph
        params = self._model.params
        solver = Solver(
            batchsize=params.max_batchsize,
            batchsize_eval=params.max_batchsize,
            i64_input_key=params.i64_input_key,
            drop_incomplete_batch=False,
        )
        translation = translate(graph, OptParams(), columns_of(reader, graph.input))
        return translation, evaluation_data(reader, graph.input, solver, translation.schema)


def _values(
    call: str, order: list[str], args: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Raises:
        ConfigError: one is unknown, or one of those without a default is missing.
    """
    values = by_order(call, order, args, keywords)
    for key in values:
        if key not in order:
            raise ConfigError(
                f"{call}.{key}: unknown argument, got {values[key]!r:.80}. "
                f"{did_you_mean(key, order)}"
            )
    for key in _NEEDED:
        if key in order and key not in values:
            got = ", ".join(values) or "no arguments"
            raise ConfigError(f"{call}.{key}: missing argument, got {got}. Add it.")
    return values


def _is_request(args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether the arguments of `predict` are a request, not files."""
    if args:
        return not isinstance(args[0], (int, np.integer))
    return keywords.keys().isdisjoint(_FILES)


def CreateInferenceSession(
    model_config_path: str | os.PathLike[str], inference_params: InferenceParams
) -> InferenceSession:
    """Return a session of v3.1 and later.

    Args:
        model_config_path: the graph of `Model.graph_to_json`. A loss in the last place is a
            sigmoid here, as in HugeCTR.
        inference_params: names the weight files.

    Raises:
        ConfigError: the graph is wrong.
        PersistError, FormatError: a weight file is missing or has the wrong size.
    """
    models = ServedModels()
    models.add(_graph(model_config_path), inference_params)
    name = inference_params.model_name
    share = None
    if inference_params.use_gpu_embedding_cache:
        share = inference_params.cache_size_percentage
    session = InferenceSession.__new__(InferenceSession)
    session._open(ServedCache(models, name, share))
    return session


def _graph(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON of a graph; a clause of training in it is an error."""
    config = read_json(Path(path))
    for clause in ("solver", "optimizer"):
        if clause in config:
            raise ConfigError(
                f"{path}: {clause}: a clause of training, got it in a graph for inference. Delete "
                f'the lines of "{clause}".'
            )
    return config


class InferenceModel(InferenceSession):
    """Score samples in files: v3.4.1 to v23.11, which did it on several GPUs.

    Args:
        model_config_path: as of `CreateInferenceSession`.
        inference_params: names the weight files.
    """

    def __init__(
        self, model_config_path: str | os.PathLike[str], inference_params: InferenceParams
    ) -> None:
        session = CreateInferenceSession(model_config_path, inference_params)
        self._model = session._model
        self._session = session._session
        self._last = None

    def predict(self, *args: Any, **keywords: Any) -> NDArray[np.float32]:
        """Return predictions [n, labels] of samples in files.

        The arguments are those of `InferenceSession.predict` over files.
        """
        return self._predict_files(_values("predict", _FILES, args, keywords))

    def check_out_tensor(self, tensor_name: str) -> NDArray[np.float32]:
        """Return a tensor of the network for the last batch that was scored.

        Args:
            tensor_name: the name of the tensor in the graph.

        Raises:
            ConfigError: nothing was scored yet, or there is no such tensor.
        """
        if self._last is None:
            raise ConfigError(
                f"check_out_tensor: nothing was scored yet, got {tensor_name!r}. Predict first."
            )
        translation, batch = self._last
        tensors = Tensors(self._model.learner(translation), translation)
        value: NDArray[np.float32] = tensors.value(tensor_name, batch)
        return value
