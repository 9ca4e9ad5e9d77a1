# SPDX-License-Identifier: Apache-2.0
"""Model: HugeCTR's high-level face, over a `hb.RecModel`."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hotbed.compat.hugectr.clauses import (
    Clause,
    DataReaderParams,
    DataSourceParams,
    DenseLayer,
    EmbeddingCollectionConfig,
    EmbeddingTrainingCacheParams,
    FitParams,
    Graph,
    GroupDenseLayer,
    Input,
    LearningRate,
    OptParams,
    Solver,
    SparseEmbedding,
)
from hotbed.compat.hugectr.enums import Tensor_t
from hotbed.compat.hugectr.json.graph import write_graph
from hotbed.compat.hugectr.json.inference import read_json
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.compat.hugectr.model.arguments import checked, files_given, log_data_source, one_clause
from hotbed.compat.hugectr.model.batches import DataReader, KeysetReader
from hotbed.compat.hugectr.model.callback import tell_end
from hotbed.compat.hugectr.model.console import say, say_heading, show
from hotbed.compat.hugectr.model.files import ModelFiles
from hotbed.compat.hugectr.model.fitting import Iterations, Rates
from hotbed.compat.hugectr.model.increments import changed_rows, track
from hotbed.compat.hugectr.model.metrics import Results, engine_metrics, measured
from hotbed.compat.hugectr.model.predictions import append_predictions
from hotbed.compat.hugectr.model.ranks import grains_of, localized_tables, log_devices, seed_of
from hotbed.compat.hugectr.model.schedule import LearningRateScheduler
from hotbed.compat.hugectr.model.summary import summary_of
from hotbed.compat.hugectr.model.tensors import Tensors
from hotbed.compat.hugectr.paths import check_local
from hotbed.compat.hugectr.reader import (
    Columns,
    columns_of,
    evaluation_data,
    named_columns,
    offset_sizes,
    training_data,
    warn_of_sizes,
)
from hotbed.compat.hugectr.translate import Translation, translate
from hotbed.compat.hugectr.translate.losses import LOSSES
from hotbed.compat.hugectr.translate.tiers import tiers_of
from hotbed.config import did_you_mean
from hotbed.data.batch import Batch
from hotbed.data.dataset import Dataset
from hotbed.embedding.modules.state import device_of
from hotbed.embedding.rule import Ftrl
from hotbed.errors import ConfigError
from hotbed.files import writing
from hotbed.models.graph.network import Graph as Network
from hotbed.optim.sparse import dense_parameters
from hotbed.parallel import at
from hotbed.parallel.world import rank
from hotbed.training.model import Evaluation, RecModel
from hotbed.training.watching.history import History

_LOG = logging.getLogger("hotbed.compat.hugectr")


class Model:
    """A model of HugeCTR: add clauses, compile, then fit.

    Args:
        solver: how to train.
        reader_params: what to read. v3.0 has it in the `Input`, and `opt_params` here.
        opt_params: the optimizer, also of embeddings that name none.
        etc_params: of an embedding training cache. Data are given file by file. Rows of a `Cached`
            embedding lie on the disk of `local_paths` (`hb.Ssd`), those of a `Staged` one in
            memory.
        mos_params: the name of `etc_params` up to v3.2.1.
        solver_parser: the name of `solver` in v3.0.

    Attributes:
        translation: the graph as values of the engine; from `compile` on.
        network: the `hb.models.Graph`; from `compile` on.
        learner: the `hb.RecModel`, which trains, evaluates and saves; from `compile` on.
        tensors: gradients and values by the names of the graph; from `compile` on.

    Example:
        >>> model = hugectr.Model(solver, reader, optimizer)
        >>> model.add(hugectr.Input(…))
        >>> model.compile()
        >>> model.fit(max_iter=2000, eval_interval=500)
    """

    translation: Translation
    network: Network
    learner: RecModel
    tensors: Tensors

    def __init__(
        self,
        solver: Solver | None = None,
        reader_params: DataReaderParams | OptParams | None = None,
        opt_params: OptParams | None = None,
        etc_params: EmbeddingTrainingCacheParams | None = None,
        mos_params: EmbeddingTrainingCacheParams | None = None,
        solver_parser: Solver | None = None,
    ) -> None:
        solver = solver or solver_parser
        if isinstance(reader_params, OptParams):  # v3.0
            opt_params = reader_params
            reader_params = None
        self.solver = checked("solver", solver, Solver, "hugectr.CreateSolver(…)")
        self.reader = reader_params
        self.optimizer = opt_params or OptParams()
        self.etc_params = etc_params or mos_params
        self._input: Input | None = None
        self._embeddings: list[SparseEmbedding | EmbeddingCollectionConfig] = []
        self._layers: list[DenseLayer | GroupDenseLayer] = []
        rate = self.optimizer.learning_rate or self.solver.learning_rate
        self._scheduler = LearningRateScheduler.of(rate)
        self._rate = rate
        self._frozen: set[str] = set()
        self._dense_is_frozen = False
        self._is_compiled = False
        self._loss = 0.0
        self._evaluated: Batch | None = None
        self._evaluation: Evaluation | None = None  # of the batches since the last results
        self._results: Results | None = None

    # --- the graph --------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The clauses that were added, as one value."""
        if self._input is None:
            raise ConfigError("model: it has no input, got no hugectr.Input. Add one first.")
        return Graph(
            self._input, tuple(self._embeddings), tuple(self._layers), self.solver.model_name
        )

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self._input = graph.input
        self._embeddings = list(graph.embeddings)
        self._layers = list(graph.layers)
        if graph.input.reader is not None and self.reader is None:
            self.reader = graph.input.reader

    def add(self, *clauses: Clause, **by_keyword: Clause) -> None:
        """Add an input, an embedding or a layer, also by a keyword of HugeCTR such as `input`.

        Raises:
            ConfigError: the model is compiled, or has an input already.
        """
        clause = one_clause(clauses, by_keyword)
        if self._is_compiled:
            kind = type(clause).__name__
            raise ConfigError(f"model.add: the model is compiled, got {kind}. Add it before.")
        if isinstance(clause, Input):
            if self._input is not None:
                raise ConfigError("model.add: a model has one input, got a second. Remove it.")
            self._input = clause
            self.reader = self.reader or clause.reader
        elif isinstance(clause, (SparseEmbedding, EmbeddingCollectionConfig)):
            self._embeddings.append(clause)
        elif isinstance(clause, (DenseLayer, GroupDenseLayer)):
            self._layers.append(clause)
        else:
            raise ConfigError(
                f"model.add: not a clause of a graph, got {type(clause).__name__}. Give an Input, "
                "an embedding or a layer."
            )

    @at("compile")
    def compile(self, loss_names: Sequence[str] = (), loss_weights: Sequence[float] = ()) -> None:
        """Make the network, its tables and the data readers.

        Args:
            loss_names: names of labels whose losses are weighted.
            loss_weights: their weights; the others have the weight 1, or that of the `Input`.

        Raises:
            ConfigError: the graph cannot be translated; the message names the layer.
        """
        graph = self.graph
        if self.reader is None:
            raise ConfigError("model.compile: nothing to read, got no reader. Give reader_params.")
        weights = self._loss_weights(loss_names, loss_weights)
        say_heading("Model Compile")
        seed = seed_of(self.solver)
        say(f"Global seed is {seed}")
        torch.manual_seed(seed)
        columns = columns_of(self.reader, graph.input)
        warn_of_sizes(self.reader, columns.slots)
        self.translation = self._translated(columns, seed, weights)
        self._say_release()
        self.network = _network(self.translation)
        # without those that a layer keeps as they are, such as the second bias of a GRU
        self._learned = [weight for weight in self.dense_parameters() if weight.requires_grad]
        self.learner = RecModel(
            self.network,
            self.translation.loss,
            self.translation.rule,
            engine_metrics(self._metrics),
            amp_level="auto" if self.solver.use_mixed_precision else "O0",
            grains=grains_of(self.solver),
            whole_tables=localized_tables(self.translation),
        )
        log_devices(self.solver, device_of(self.network))
        self.tensors = Tensors(self.learner, self.translation)
        self._files = ModelFiles(
            self.learner, self.translation, graph, self.solver, self.etc_params
        )
        self._open_readers()
        self._is_compiled = True
        self.set_learning_rate(self._rate.lr)
        self._apply_frozen()
        self._files.load_first(self.solver.files)
        self._track_changes()

    def summary(self) -> None:
        """Print the layers with their tensors, and what parameters and rows take."""
        if self._is_compiled:
            translation = self.translation
            network = self.network
        else:
            translation = self._translated(None, 0, self._loss_weights((), ()))
            network = _network(translation)
        say_heading("Model Summary")
        text = summary_of(self.graph, translation, network)
        show(text)

    # --- training ---------------------------------------------------------------------------------

    @at("fit")
    def fit(self, *arguments: Any, **keywords: Any) -> History:
        """Train, and return the history of the engine.

        Args:
            num_epochs: passes over the data, if the solver has `repeat_dataset=False`.
            max_iter: iterations otherwise; 2000 by default.
            display: a line with loss and learning rate every so many iterations; 200.
            eval_interval: an evaluation every so many iterations; 1000.
            snapshot: files of weights every so many iterations; 10000. There are none at the end.
            snapshot_prefix: of their names.

        Raises:
            ConfigError: an argument is wrong, or the number of iterations or epochs is not above 0.
            NonFiniteGradient: a gradient is NaN or infinite.
        """
        self._require_compiled("fit")
        self._require_loss("fit")
        params = self.solver.fit
        if params is None or arguments or keywords:
            params = FitParams(*arguments, **keywords)
        repeats = self.solver.repeat_dataset
        epochs = params.max_iter if repeats else params.num_epochs
        if not repeats and self.etc_params is not None:
            epochs = max(epochs, 1)
        if epochs <= 0:
            name, mode = ("max_iter", "True") if repeats else ("num_epochs", "False")
            raise ConfigError(
                f"fit.{name}: not above 0 with repeat_dataset={mode}, got {epochs}. Give a "
                "number from 1."
            )
        return self._fit(params, epochs, params.max_iter if repeats else None)

    def _fit(self, params: FitParams, epochs: int, max_steps: int | None) -> History:
        """Train for epochs, of which `max_steps` iterations are the most."""
        repeats = self.solver.repeat_dataset
        self._say_fit(params, epochs)
        self._log_missing_evaluation(params.eval_interval)
        callbacks = self.solver.training_callbacks if repeats else ()
        for callback in callbacks:
            callback.on_training_start()
        self.start_data_reading()
        if not repeats:
            self._train_reader.set_source()
        iterations = Iterations(self, params)
        began = time.perf_counter()
        history = self.learner.fit(
            self._train_reader.lend(),
            epochs=epochs,
            callbacks=[iterations, Rates(self)],
            progress=False,
            max_steps=max_steps,
        )
        self._train_reader.arrive(iterations.position if repeats else None)
        self._loss = iterations.loss
        if not iterations.ended_early:
            tell_end(callbacks, iterations.steps - 1)
            seconds = time.perf_counter() - began
            unit = "" if repeats else f"{epochs} epochs "
            say(
                f"Finish {unit}{iterations.steps} iterations with batchsize: "
                f"{self.solver.batchsize} in {seconds:.2f}s."
            )
        return history

    def start_data_reading(self) -> None:
        """Let `train` and `eval` read; `fit` does so by itself."""
        self._require_compiled("start_data_reading")
        self._train_reader.start()
        self._eval_reader.start()

    @at("train")
    def train(self, is_first_batch: bool = True) -> bool:
        """Learn the next batch; return False at the end of the data, with nothing learned.

        `is_first_batch` is a hint of v3.3 to v4.3 to CUDA graphs, and is not read.
        """
        self._require_compiled("train")
        self._require_loss("train")
        batch = self._train_reader.next()
        if batch is None:
            return False
        self._loss = self.learner.step(batch)
        return True

    @at("eval")
    def eval(self, is_first_batch: bool = True, eval_batch: int = -1) -> bool:
        """Score the next batch of the evaluation data; return False at their end.

        `is_first_batch`, and `eval_batch` up to v3.2.1, are hints to CUDA graphs, and are not read.
        """
        self._require_compiled("eval")
        batch = self._eval_reader.next()
        if batch is None:
            return False
        if self._evaluation is None:
            self._evaluation = Evaluation(self.learner)
        self._evaluation.add(batch)
        self._evaluated = batch
        return True

    def get_current_loss(self) -> float:
        """Return the loss of the batch that `train` or `fit` learned last, before its update."""
        return self._loss

    @at("get_eval_metrics")
    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return name and value of each metric of the solver, of the batches since the last call.

        Without such batches they are those of the last call, or of the last evaluation of `fit`. A
        metric that is not defined, as before any evaluation, is nan.
        """
        self._require_compiled("get_eval_metrics")
        if self._evaluation is not None or self._results is None:
            evaluation = self._evaluation or Evaluation(self.learner)
            self._results = Results(self._metrics, measured(evaluation.results))
            if self._evaluation is None:
                _LOG.warning("get_eval_metrics: nothing was evaluated yet, so that all are nan")
            self._evaluation = None
        return list(self._results.by_name.items())

    def check_overflow(self) -> None:
        """Do nothing: tables grow, and no row is dropped."""

    def copy_weights_for_evaluation(self) -> None:
        """Do nothing: training and evaluation share their weights."""

    def get_data_reader_train(self) -> DataReader:
        """Return the reader of the training data."""
        self._require_compiled("get_data_reader_train")
        return self._train_reader

    def get_data_reader_eval(self) -> DataReader:
        """Return the reader of the evaluation data."""
        self._require_compiled("get_data_reader_eval")
        return self._eval_reader

    def set_source(
        self,
        source: str | Sequence[str],
        *others: Any,
        keyset: Sequence[str] = (),
        eval_source: str = "",
    ) -> None:
        """Read from other files from now on: `(source, eval_source)`.

        With an embedding training cache `(source, keyset, eval_source)`. Keysets are not read: a
        table holds all of its rows.

        Raises:
            ConfigError: the solver repeats its data.
        """
        self._require_compiled("set_source")
        KNOBS.log_no_effect("reader.keyset", when=bool(keyset) or len(others) > 1)
        if self.solver.repeat_dataset:
            raise ConfigError(
                "set_source: only a solver with repeat_dataset=False changes its files, got True. "
                "Train in epochs."
            )
        eval_source = eval_source or (others[-1] if others else "")
        self._train_reader.set_source(list(source) if not isinstance(source, str) else source)
        if eval_source:
            self._eval_reader.set_source(eval_source)

    # --- learning rates, frozen parts -------------------------------------------------------------

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps, of dense parameters and tables."""
        self._require_compiled("set_learning_rate")
        if self.learner.learner.dense is not None:
            self.learner.dense_learning_rate = lr
        if self.learner.learner.sparse is not None:
            self.learner.table_learning_rates = lr

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """Return the scheduler that `fit` reads; a loop of your own calls `get_next()`."""
        return self._scheduler

    def reset_learning_rate_scheduler(self, base_lr: float, *others: Any, **keywords: Any) -> None:
        """Begin a new schedule: `warmup_steps`, `decay_start`, …, as those of the solver."""
        self._scheduler.reset(LearningRate(base_lr, *others, **keywords))

    def freeze_dense(self) -> None:
        """Keep the dense parameters as they are."""
        self._dense_is_frozen = True
        self._apply_frozen()

    def unfreeze_dense(self) -> None:
        """Train the dense parameters again."""
        self._dense_is_frozen = False
        self._apply_frozen()

    def freeze_embedding(self, embedding_name: str = "") -> None:
        """Keep the rows of an embedding as they are; without a name, of all embeddings."""
        self._frozen |= self._embeddings_named(embedding_name)
        self._apply_frozen()

    def unfreeze_embedding(self, embedding_name: str = "") -> None:
        """Train the rows of an embedding again; without a name, of all embeddings."""
        self._frozen -= self._embeddings_named(embedding_name)
        self._apply_frozen()

    # --- what is inside ---------------------------------------------------------------------------

    @at("check_out_tensor")
    def check_out_tensor(self, tensor_name: str, tensor_type: Tensor_t = Tensor_t.Train) -> Any:
        """Return a tensor of the graph by its name, float32 [n, …].

        Args:
            tensor_name: as the clauses name it.
            tensor_type: `Train` for the gradient of the loss in it, of the last `train()` or
                iteration of `fit`, which is repeated for it; `Evaluate` for its values, of the last
                batch evaluated.

        Raises:
            ConfigError: there is no such tensor, or nothing was trained or evaluated.
        """
        self._require_compiled("check_out_tensor")
        if tensor_type is Tensor_t.Train:
            return self.tensors.gradient(tensor_name)
        return self.tensors.value(tensor_name, self._evaluated)

    @at("export_predictions")
    def export_predictions(
        self, output_prediction_file_name: str, output_label_file_name: str
    ) -> None:
        """Append predictions and labels of the batch that was evaluated last to two text files."""
        self._require_compiled("export_predictions")
        if self._evaluated is None:
            raise ConfigError(
                "export_predictions: nothing was evaluated yet, got "
                f"{output_prediction_file_name!r}. Evaluate first."
            )
        with writing(output_prediction_file_name):
            append_predictions(
                self.learner,
                self._evaluated,
                Path(output_prediction_file_name),
                Path(output_label_file_name),
            )

    @at("get_incremental_model")
    def get_incremental_model(self) -> list[tuple[Any, Any]]:
        """Return keys int64 [n] and vectors float32 [n, dim] of each embedding.

        These are the rows that have changed since the last call, at first since the files that were
        loaded before training; all rows of a table whose optimizer moves all rows at every step. On
        several ranks each gets those of all.
        """
        self._require_compiled("get_incremental_model")
        if self.etc_params is None:
            raise ConfigError(
                "get_incremental_model: changes are recorded with an embedding training cache "
                "only, got a model without one. Give etc_params=hugectr.CreateETC(…)."
            )
        return changed_rows(self._files.tables.values(), self.learner.learner.shard)

    def _track_changes(self) -> None:
        """Record changes for an embedding training cache from here on, before the first step."""
        if self.etc_params is not None and not self.learner.counters["steps"]:
            track(self._files.tables.values())

    def dump_incremental_model_2kafka(self) -> None:
        """Refuse to write to Kafka here: checkpoints publish changed rows.

        Raises:
            ConfigError: always; it says which callback publishes.
        """
        raise ConfigError(
            "dump_incremental_model_2kafka: rows are published by a checkpoint, got a call of the "
            "model. Train model.learner with hb.callbacks.Checkpoint(path, "
            "publish=hb.PublishTopic(…)), or send what get_incremental_model() returns."
        )

    def get_embedding_training_cache(self) -> KeysetReader:
        """Return what takes keysets; tables hold all of their rows, so that it reads none."""
        return KeysetReader()

    def get_model_oversubscriber(self) -> KeysetReader:
        """Return what takes keysets: the name up to v3.2."""
        return KeysetReader()

    @at("get_params_num")
    def get_params_num(self) -> int:
        """Return the number of dense parameters and of floats in rows."""
        self._require_compiled("get_params_num")
        dense = sum(weight.numel() for weight in self.dense_parameters())
        tables = self.learner.tables
        here = {name: {"floats": len(table) * table.dim} for name, table in tables.items()}
        (every,) = self.learner.learner.summed([here])
        return dense + sum(counts["floats"] for counts in every.values())

    # --- files ------------------------------------------------------------------------------------

    @at("save_params_to_files")
    def save_params_to_files(
        self, prefix: str, iter: int = 0, data_source_params: DataSourceParams | None = None
    ) -> None:
        """Save `<prefix>_dense_<iter>.model`, `<prefix>0_sparse_<iter>.model` and their states.

        `data_source_params` of v3.4, here and in the other methods, is without effect: a path is
        one of this machine.
        """
        self._require_compiled("save_params_to_files")
        log_data_source(data_source_params)
        self._files.save(prefix, iter)

    @at("load_dense_weights")
    def load_dense_weights(
        self, dense_model_file: str, data_source_params: DataSourceParams | None = None
    ) -> None:
        """Load a file of dense parameters."""
        self._require_compiled("load_dense_weights")
        log_data_source(data_source_params)
        self._files.load_dense(dense_model_file)

    @at("load_dense_optimizer_states")
    def load_dense_optimizer_states(
        self, dense_opt_states_file: str, data_source_params: DataSourceParams | None = None
    ) -> None:
        """Load the optimizer state of the dense parameters."""
        self._require_compiled("load_dense_optimizer_states")
        log_data_source(data_source_params)
        self._files.load_dense_states(dense_opt_states_file)

    @at("load_sparse_weights")
    def load_sparse_weights(self, *files: Any, **by_keyword: Any) -> None:
        """Load rows: a list with one file for each embedding, or a mapping of name to file."""
        self._require_compiled("load_sparse_weights")
        self._files.load_sparse(files_given("sparse_embedding_files", files, by_keyword))
        self._track_changes()

    @at("load_sparse_optimizer_states")
    def load_sparse_optimizer_states(self, *files: Any, **by_keyword: Any) -> None:
        """Load the optimizer states of the rows that `load_sparse_weights` has loaded."""
        self._require_compiled("load_sparse_optimizer_states")
        self._files.load_sparse_states(files_given("sparse_opt_states_files", files, by_keyword))
        self._track_changes()

    @at("embedding_dump")
    def embedding_dump(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Save tables of embedding collections in a folder; without names, all."""
        self._require_compiled("embedding_dump")
        self._files.save_collections(path, table_names)

    @at("embedding_load")
    def embedding_load(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Load tables of embedding collections; without names, all."""
        self._require_compiled("embedding_load")
        self._files.load_collections(path, table_names)

    def graph_to_json(self, graph_config_file: str) -> None:
        """Write the graph to a JSON file.

        Args:
            graph_config_file: its path.
        """
        graph = self.graph
        if self.reader is not None:
            sizes = offset_sizes(self.reader, named_columns(graph.input).slots)
            inputs = dataclasses.replace(
                graph.input,
                slot_size_array=sizes,
                adds_slot_offsets=bool(sizes) and self.reader.adds_slot_offsets,
            )
            graph = dataclasses.replace(graph, input=inputs)
        text = json.dumps(write_graph(graph, self.optimizer), indent=2)
        check_local("graph_to_json.graph_config_file", graph_config_file)
        with writing(graph_config_file):
            Path(graph_config_file).parent.mkdir(parents=True, exist_ok=True)
            Path(graph_config_file).write_text(text + "\n", encoding="utf-8")

    def construct_from_json(self, graph_config_file: str, include_dense_network: bool) -> None:
        """Take the graph of a JSON file.

        Args:
            graph_config_file: its path.
            include_dense_network: False takes the input and the embeddings only.
        """
        if self._is_compiled:
            raise ConfigError(
                "construct_from_json: the model is compiled, got "
                f"{graph_config_file!r}. Construct it before."
            )
        graph = read_graph(read_json(graph_config_file))
        if not include_dense_network:
            graph = dataclasses.replace(graph, layers=())
        self.graph = graph

    # --- for fit and summary ----------------------------------------------------------------------

    @property
    def can_evaluate(self) -> bool:
        """Whether there are evaluation data, and batches of them to evaluate."""
        return bool(self._eval_reader.source) and self.solver.max_eval_batches > 0

    def evaluated(self, prefix: str = "", iteration: int = 0) -> Results:
        """Return the metrics of the next `max_eval_batches` batches.

        With a `prefix`, their predictions and labels are appended to `<prefix>_prediction_<i>` and
        `<prefix>_label_<i>`.
        """
        batches = self._remembered(self._eval_reader.take(self.solver.max_eval_batches))
        if not prefix:
            results = Results(self._metrics, measured(partial(self.learner.evaluate, batches)))
            self._results = results
            return results
        evaluation = Evaluation(self.learner)
        for batch in batches:
            evaluation.add(batch)
            self.export_predictions(
                f"{prefix}_prediction_{iteration}", f"{prefix}_label_{iteration}"
            )
        results = Results(self._metrics, measured(evaluation.results))
        self._results = results
        return results

    def dense_parameters(self) -> list[torch.nn.Parameter]:
        """Return the dense parameters of the network."""
        return dense_parameters(self.network)

    # --- internals --------------------------------------------------------------------------------

    @property
    def _metrics(self) -> Mapping[Any, float]:
        return self.solver.metrics_spec or {}

    def _translated(
        self, columns: Columns | None, seed: int, loss_weights: Mapping[str, float]
    ) -> Translation:
        """Return the graph as values of the engine; `columns`: None without data."""
        return translate(
            self.graph,
            self.optimizer,
            columns,
            lr=self._rate.lr,
            batchsize=self.solver.batchsize,
            seed=seed,
            loss_weights=loss_weights,
            release=self.solver.release,
            tiers=tiers_of(self.etc_params, self.graph.embeddings, rank()),
        )

    def _remembered(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches, and keep the last one for `export_predictions` and `check_out_tensor`."""
        for batch in batches:
            self._evaluated = batch
            yield batch

    def _require_compiled(self, method: str) -> None:
        if not self._is_compiled:
            raise ConfigError(
                f"model.{method}: the model is not compiled, got a call before compile(). Call "
                "compile() first."
            )

    def _require_loss(self, method: str) -> None:
        for layer in reversed(self._layers):
            if isinstance(layer, DenseLayer) and layer.layer_type in LOSSES:
                return
        raise ConfigError(
            f"model.{method}: the graph has no loss, got {len(self._layers)} other "
            "layers. Add a loss layer, such as BinaryCrossEntropyLoss."
        )

    def _loss_weights(self, names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
        """Return the weights of losses by label: those of the input, and those of `compile`."""
        labels = self.graph.input.label_names
        if len(names) != len(weights):
            raise ConfigError(
                f"compile.loss_weights: one weight for each of {list(names)} is needed, got "
                f"{list(weights)}. Give as many."
            )
        for name in names:
            if name not in labels:
                raise ConfigError(
                    f"compile.loss_names: the input has no such label, got {name!r}. "
                    f"{did_you_mean(name, labels)}"
                )
        of_input = dict(zip(labels, self.graph.input.label_weights, strict=False))
        return {**of_input, **dict(zip(names, weights, strict=True))}

    def _open_readers(self) -> None:
        reader = self.reader
        assert reader is not None

        def train(source: Any) -> Dataset:
            changed = self._ready(dataclasses.replace(reader, source=source))
            schema = self.translation.schema
            data = training_data(
                changed, self.graph.input, self.solver, schema, short_keys=self._files.short_keys
            )
            for slots in self._files.seen.values():
                data = data.map(slots)
            return data

        def evaluate(source: Any) -> Dataset:
            changed = self._ready(dataclasses.replace(reader, eval_source=source))
            schema = self.translation.schema
            return evaluation_data(changed, self.graph.input, self.solver, schema)

        limits = self.translation.limits
        repeats = self.solver.repeat_dataset
        self._train_reader = DataReader(
            train, reader.source, limits, repeats=repeats, network=self.network
        )
        self._eval_reader = DataReader(evaluate, reader.eval_source, limits, repeats=repeats)

    def _ready(self, reader: DataReaderParams) -> DataReaderParams:
        """Return a reader whose data are to be read now; a rehearsal generates them first."""
        return reader

    def _embeddings_named(self, name: str) -> set[str]:
        """Return an embedding as a set; without a name, all of them."""
        names = []
        for embedding in self._embeddings:
            if isinstance(embedding, SparseEmbedding):
                names.append(embedding.sparse_embedding_name)
        if name and name not in names:
            raise ConfigError(
                f"freeze_embedding: the model has no such embedding, got {name!r}. "
                f"{did_you_mean(name, names)}"
            )
        return {name} if name else set(names)

    def _apply_frozen(self) -> None:
        if not self._is_compiled:
            return
        for parameter in self._learned:
            parameter.requires_grad_(not self._dense_is_frozen)
        for name, table in self._files.tables.items():
            table.requires_grad_(name not in self._frozen)

    def _say_release(self) -> None:
        """Print which release's Ftrl the model has, if it has one."""
        rules = [self.translation.rule, *(t.rule for t in self.translation.tables.values())]
        eps = [rule.eps for rule in rules if isinstance(rule, Ftrl)]
        if eps:
            added = "FLT_EPSILON" if eps[0] else "nothing"
            release = self.solver.release
            say(f"Ftrl is that of HugeCTR {release}: {added} is added under each root")

    def _log_missing_evaluation(self, interval: int) -> None:
        """Log why `fit` does not evaluate though it has an interval."""
        if interval > 0 and not self.can_evaluate:
            reason = "the reader has no eval_source"
            if self._eval_reader.source:
                reason = "the solver has max_eval_batches=0"
            _LOG.warning("fit: eval_interval=%d, but nothing is evaluated: %s", interval, reason)

    def _say_fit(self, params: FitParams, epochs: int) -> None:
        """Print the settings of a fit."""
        solver = self.solver
        say_heading("Model Fit")
        mode = "non-epoch mode with number of iterations"
        if not solver.repeat_dataset:
            mode = "epoch mode with number of epochs"
        say(f"Use {mode}: {epochs}")
        say(
            f"Training batchsize: {solver.batchsize}, evaluation batchsize: {solver.batchsize_eval}"
        )
        say(f"Evaluation interval: {params.eval_interval}, snapshot interval: {params.snapshot}")
        say(f"Dense network trainable: {not self._dense_is_frozen}")
        for name in self._files.tables:
            say(f"Sparse embedding {name} trainable: {name not in self._frozen}")
        rate = self._rate
        say(f"lr: {rate.lr:f}, warmup_steps: {rate.warmup_steps}, end_lr: {rate.end_lr:f}")
        say(
            f"decay_start: {rate.decay_start}, decay_steps: {rate.decay_steps}, "
            f"decay_power: {rate.decay_power:f}"
        )
        say(f"Training source file: {self._train_reader.source}")
        say(f"Evaluation source file: {self._eval_reader.source}")


def _network(translation: Translation) -> Network:
    return Network(translation.schema, translation.tables, translation.description)
