# SPDX-License-Identifier: Apache-2.0
"""ServedModel: a graph and weight files of HugeCTR as an exported model of the engine."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotbed.compat.hugectr.clauses import DenseLayer, Graph, OptParams, SparseEmbedding
from hotbed.compat.hugectr.enums import Embedding_t, Layer_t
from hotbed.compat.hugectr.params import InferenceParams
from hotbed.compat.hugectr.reader import known_sizes
from hotbed.compat.hugectr.translate import Translation, translate
from hotbed.compat.hugectr.weights import SparseFile, load_dense, load_served
from hotbed.data.arrays import offsets_of
from hotbed.data.batch import Ids, as_ids
from hotbed.embedding.init import Constant
from hotbed.embedding.rule import Sgd
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, DataError
from hotbed.serving.parameter_server import ParameterServer

if TYPE_CHECKING:
    from hotbed.serving.session import InferenceSession
    from hotbed.training.model import RecModel

_LOSSES = (
    Layer_t.BinaryCrossEntropyLoss,
    Layer_t.CrossEntropyLoss,
    Layer_t.MultiCrossEntropyLoss,
    Layer_t.Sigmoid,
)
_LOCALIZED = (
    Embedding_t.LocalizedSlotSparseEmbeddingHash,
    Embedding_t.LocalizedSlotSparseEmbeddingOneHot,
)


class ServedModel:
    """A model in a parameter server, and how HugeCTR's requests become requests to it.

    The graph with its weight files is exported once, into a folder that is removed when the server
    has its rows. A key without a row reads the default value of its table, 0 unless
    `default_value_for_each_table` says otherwise.

    Args:
        server: loads the exported model under the name in `params`.
        graph: of HugeCTR.
        params: names the weight files.

    Attributes:
        graph: of HugeCTR.
        params: as given.
        num_row_bytes: the memory that all rows take in a cache.

    Raises:
        ConfigError: the graph is wrong, or there are not as many sparse files as embeddings.
        PersistError, FormatError: a file is missing or has the wrong size.
    """

    def __init__(self, server: ParameterServer, graph: Graph, params: InferenceParams) -> None:
        self.graph = graph
        self.params = params
        translation = translate(graph, OptParams())
        self._slots = _slots(graph, translation)
        self.labels = [label.name for label in translation.schema.labels]
        learner = self.learner(translation)
        self.num_row_bytes = 0
        for table in learner.tables.values():
            self.num_row_bytes += len(table) * (table.dim * 4 + 16)
        with tempfile.TemporaryDirectory(prefix="hotbed-hugectr-") as folder:
            learner.export(folder)
            server.load(params.model_name, folder)

    def learner(self, translation: Translation) -> RecModel:
        """Return the model in memory, with the weights of its files.

        Args:
            translation: of the graph, for the columns of some reader.
        """
        return learner_of(self.graph, self.params, translation, tables_of(self.params, translation))

    @property
    def adds_slot_offsets(self) -> bool:
        """Whether training added offsets to the keys of Raw files, as up to v3.0.1."""
        inputs = self.graph.input
        if inputs.reader is not None:
            return inputs.reader.adds_slot_offsets
        return inputs.adds_slot_offsets

    def slot_sizes(self) -> tuple[int, ...]:
        """Return the `slot_size_array` of training; () if it had none.

        Raises:
            ConfigError: the JSON file does not say it, and slots share a table.
        """
        inputs = self.graph.input
        sizes = known_sizes(inputs)
        if sizes is not None:
            return sizes
        params = inputs.data_reader_sparse_param_array
        by_bottom: dict[str, tuple[int, ...]] = {}
        for embedding in self.graph.embeddings:
            if isinstance(embedding, SparseEmbedding) and embedding.slot_size_array:
                by_bottom[embedding.bottom_name] = embedding.slot_size_array
        of_params = [by_bottom.get(param.top_name, ()) for param in params]
        if all(
            len(sizes) == param.slot_num for sizes, param in zip(of_params, params, strict=True)
        ):
            return tuple(itertools.chain.from_iterable(of_params))
        if len(self._slots) > 1:
            raise ConfigError(
                "predict.slot_size_array: missing argument, got a graph that does not say the "
                f"sizes of its {len(self._slots)} slots. Give that of training, or [] if it had "
                "none."
            )
        return ()

    def ask(
        self,
        session: InferenceSession,
        dense: Sequence[float],
        keys: Sequence[int],
        row_ptrs: Sequence[int],
    ) -> NDArray[np.float32]:
        """Return the predictions [n, labels] of a request in HugeCTR's form.

        Args:
            session: of this model.
            dense: values of the samples, one after another.
            keys: of the samples, one after another, each with its slots of all tables in order.
            row_ptrs: where the keys of each slot begin. With one table: `n * slots + 1` entries.
                With several: for each table its own entries, which begin at 0; one run over all
                slots of all tables is taken too.

        Raises:
            DataError: the sizes do not fit each other or the model.
            RowShapeError: `row_ptrs` do not rise from 0 to the number of keys.
        """
        slot_nums = [param.slot_num for param in self.graph.input.data_reader_sparse_param_array]
        pointers = as_ids(row_ptrs, "row_ptrs")
        num_slots = sum(slot_nums)
        num_samples, rest = divmod(len(pointers) - 1, num_slots)
        offsets = pointers
        if rest:
            num_samples, rest = divmod(len(pointers) - len(slot_nums), num_slots)
            if rest or num_samples < 0:
                raise DataError(
                    f"row_ptrs: expected n * {num_slots} entries for {slot_nums} slots, and one "
                    f"more or one more a table, got {len(pointers)}. Give where the keys of each "
                    "slot begin."
                )
            offsets = _joined(pointers, slot_nums, num_samples)
        width = self.graph.input.dense_dim
        self._check(num_samples, len(dense), len(keys))
        matrix = _numbers(dense).reshape(num_samples, width) if width else None
        slots = iter(Ids(as_ids(keys, "embeddingcolumns"), offsets).unstack(num_slots))
        ids = {}
        for names in self._slots:
            slot = next(slots)
            for name in names:
                ids[name] = slot
        return self.scores(session, matrix, ids)

    def scores(self, session: InferenceSession, dense: Any, ids: Any) -> NDArray[np.float32]:
        """Return the predictions [n, labels] of encoded values."""
        outputs = session.ask_encoded(dense, ids).outputs
        if len(outputs) == 1:
            (scores,) = outputs.values()
            return scores.reshape(-1, 1)
        return np.stack([outputs[label] for label in self.labels], axis=1)

    def _check(self, num_samples: int, num_dense: int, num_keys: int) -> None:
        """Raise DataError for sizes that the model does not take."""
        most = self.params.max_batchsize
        if num_samples > most:
            raise DataError(
                f"row_ptrs: expected at most {most} samples, the max_batchsize, got {num_samples}. "
                "Ask for fewer, or raise it."
            )
        width = self.graph.input.dense_dim
        if num_dense != num_samples * width:
            raise DataError(
                f"dense_feature: expected {width} values for each of {num_samples} samples, got "
                f"{num_dense} values. Give all of them."
            )
        most = sum(_most_keys(param) for param in self.graph.input.data_reader_sparse_param_array)
        if num_keys > num_samples * most:
            raise DataError(
                f"embeddingcolumns: expected at most {most} keys for each of {num_samples} "
                f"samples, got {num_keys} keys. Give fewer, or raise max_feature_num_per_sample."
            )


def learner_of(
    graph: Graph, params: InferenceParams, translation: Translation, tables: dict[str, Table]
) -> RecModel:
    """Return a model with the dense weights of its file.

    Args:
        graph: of HugeCTR.
        params: names the file.
        translation: of the graph.
        tables: with their rows.
    """
    from hotbed.models.graph.network import Graph as Network
    from hotbed.models.losses import MSE
    from hotbed.training.model import RecModel

    network = Network(translation.schema, tables, translation.description)
    if translation.dense_weights or params.dense_model_file:
        load_dense(params.dense_model_file, network, translation, params.non_trainable_params_file)
    last = graph.layers[-1]
    loss: Any = translation.loss
    if isinstance(last, DenseLayer) and last.layer_type not in _LOSSES:
        labels = [label.name for label in translation.schema.labels]
        loss = MSE() if len(labels) == 1 else {label: MSE() for label in labels}
    return RecModel(network, loss, "sgd")


def tables_of(params: InferenceParams, translation: Translation) -> dict[str, Table]:
    """Return the tables of the embeddings, with the rows of their files."""
    files = params.sparse_model_files
    if len(files) != len(translation.embeddings):
        raise ConfigError(
            f"model {params.model_name!r}: expected one sparse file for each of "
            f"{len(translation.embeddings)} embeddings, got {list(files)}. Name them in the order "
            "of the embeddings."
        )
    defaults = params.default_value_for_each_table
    tables = {}
    for number, (embedding, file) in enumerate(zip(translation.embeddings, files, strict=True)):
        name = embedding.table
        default = defaults[number] if number < len(defaults) else 0.0
        table = Table(name, translation.tables[name].dim, rule=Sgd(), init=Constant(default))
        clause = embedding.clause
        localized = isinstance(clause, SparseEmbedding) and clause.embedding_type in _LOCALIZED
        form = SparseFile(localized=localized, i64=params.i64_input_key, keys=embedding.keys)
        load_served(file, table, form)
        tables[name] = table
    return tables


def _numbers(dense: Sequence[float]) -> NDArray[np.float32]:
    try:
        return np.asarray(dense, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"dense_feature: expected numbers, one after another, got {dense!r:.80}. Give floats."
        ) from error


def _most_keys(param: Any) -> int:
    """Return the most keys of a sample in sparse slots."""
    most: int = param.max_feature_num or sum(param.hotness)
    return most


def _slots(graph: Graph, translation: Translation) -> list[list[str]]:
    """Return the names of the features of each slot, over all sparse inputs in their order."""
    names = []
    for param in graph.input.data_reader_sparse_param_array:
        embeddings = []
        for embedding in translation.embeddings:
            if getattr(embedding.clause, "bottom_name", None) == param.top_name:
                embeddings.append(embedding)
        for number in range(param.slot_num):
            names.append([embedding.slots[number] for embedding in embeddings])
    return names


def _joined(
    pointers: NDArray[np.int64], slot_nums: Iterable[int], num_samples: int
) -> NDArray[np.int64]:
    """Return offsets over the slots of all tables, from those of each table."""
    lengths = []
    first = 0
    for slot_num in slot_nums:
        end = first + num_samples * slot_num + 1
        part = Ids(pointers, pointers[first:end]).lengths()
        lengths.append(part.reshape(num_samples, slot_num))
        first = end
    return offsets_of(np.concatenate(lengths, axis=1).reshape(-1))
