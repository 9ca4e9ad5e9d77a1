# SPDX-License-Identifier: Apache-2.0
"""Session: the low-level API of v2.3 to v3.0.1, a loop of your own over a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hotbed.compat.hugectr.clauses import LearningRate, Solver
from hotbed.compat.hugectr.json.inference import read_json
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.json.optimizer import read_optimizer
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.compat.hugectr.model import DataReader, LearningRateScheduler, Model
from hotbed.compat.hugectr.model.batches import KeysetReader
from hotbed.errors import ConfigError
from hotbed.parallel import at

__all__ = ["Session", "get_learning_rate_scheduler"]


class Session:
    """A model from a solver and a JSON file, whose `optimizer` and `layers` are read.

    Args:
        solver_config: of `solver_parser_helper`. The `solver` clause of the file is not read.
        config_file: path of the JSON file.
        use_model_oversubscriber: not needed, since tables hold all of their rows.
        temp_embedding_dir: not needed either.

    Attributes:
        model: the `Model` that does the work.

    Example:
        >>> scheduler = hugectr.get_learning_rate_scheduler("dcn.json")
        >>> session = hugectr.Session(solver, "dcn.json")
        >>> session.start_data_reading()
        >>> for _ in range(1000):
        ...     session.set_learning_rate(scheduler.get_next())
        ...     session.train()
        >>> session.evaluation()
        [('AUC', 0.78)]
    """

    model_class: ClassVar[type[Model]] = Model  # a rehearsal has another one

    def __init__(
        self,
        solver_config: Solver,
        config_file: str,
        use_model_oversubscriber: bool = False,
        temp_embedding_dir: str = "",
    ) -> None:
        KNOBS.log_no_effect("solver.use_model_oversubscriber", when=use_model_oversubscriber)
        KNOBS.log_no_effect("solver.temp_embedding_dir", when=bool(temp_embedding_dir))
        spec = _read(config_file)
        graph = read_graph(spec)
        optimizer = read_optimizer(spec["optimizer"])
        self.model = self.model_class(solver_config, graph.input.reader, optimizer)
        self.model.graph = graph
        self.model.compile()

    def start_data_reading(self) -> None:
        """Let `train` and `eval` read."""
        self.model.start_data_reading()

    def train(self) -> bool:
        """Learn the next batch; return False at the end of the data, with nothing learned."""
        return self.model.train()

    def eval(self) -> bool:
        """Score the next batch of the evaluation data; return False at their end."""
        return self.model.eval()

    def get_current_loss(self) -> float:
        """Return the loss of the batch that `train` learned last, before its update."""
        return self.model.get_current_loss()

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return name and value of each metric, of the batches since the last call."""
        return self.model.get_eval_metrics()

    @at("evaluation")
    def evaluation(
        self, export_predictions_out_file: str = "", export_labels_out_file: str = ""
    ) -> list[tuple[str, float]]:
        """Return the metrics of a whole evaluation.

        It reads `max_eval_batches` batches if data repeat, else all of them, after which the data
        begin again. HugeCTR's own reads one batch only.

        Args:
            export_predictions_out_file: text file for the predictions, which is written anew.
            export_labels_out_file: text file for the labels.

        Raises:
            ConfigError: one of the two files is given without the other.
        """
        files = (export_predictions_out_file, export_labels_out_file)
        if any(files) and not all(files):
            raise ConfigError(
                f"evaluation: predictions and labels are exported together, got {files}. Give "
                "both files, or none."
            )
        for file in filter(None, files):
            Path(file).unlink(missing_ok=True)
        solver = self.model.solver
        num_batches = solver.max_eval_batches if solver.repeat_dataset else None
        reader = self.get_data_reader_eval()
        if not reader.is_started:
            reader.set_source()
        number = 0
        while number != num_batches and self.eval():
            number += 1
            if all(files):
                self.model.export_predictions(*files)
        if num_batches is None:
            reader.set_source()
        return self.get_eval_metrics()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps, of dense parameters and tables."""
        self.model.set_learning_rate(lr)

    def check_overflow(self) -> None:
        """Do nothing: tables grow, and no row is dropped."""

    def copy_weights_for_evaluation(self) -> None:
        """Do nothing: training and evaluation share their weights."""

    def download_params_to_files(self, prefix: str, iter: int) -> None:
        """Save `<prefix>_dense_<iter>.model`, `<prefix>0_sparse_<iter>.model` and their states."""
        self.model.save_params_to_files(prefix, iter)

    def init_params(self, model_file: str) -> None:
        """Load a file of dense parameters."""
        self.model.load_dense_weights(model_file)

    def get_params_num(self) -> int:
        """Return the number of dense parameters and of floats in rows."""
        return self.model.get_params_num()

    def get_data_reader_train(self) -> DataReader:
        """Return the reader of the training data."""
        return self.model.get_data_reader_train()

    def get_data_reader_eval(self) -> DataReader:
        """Return the reader of the evaluation data."""
        return self.model.get_data_reader_eval()

    def get_model_oversubscriber(self) -> KeysetReader:
        """Return what takes keysets; tables hold all of their rows, so that it reads none."""
        return self.model.get_embedding_training_cache()


def get_learning_rate_scheduler(configure_file: str) -> LearningRateScheduler:
    """Return the scheduler of the `optimizer` clause of a JSON file."""
    optimizer = read_optimizer(_read(configure_file)["optimizer"])
    return LearningRateScheduler.of(optimizer.learning_rate or LearningRate())


def _read(path: str) -> Mapping[str, Any]:
    """Return a JSON file with an `optimizer`."""
    spec = read_json(path)
    if "optimizer" not in spec:
        raise ConfigError(
            f"{path}: an object with optimizer and layers is needed, got {spec!s:.60}. Add them."
        )
    return spec
