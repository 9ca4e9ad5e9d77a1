# SPDX-License-Identifier: Apache-2.0
"""Run a script that says `import hugectr`, as it is.

    python -m hotbed.compat.hugectr.run dcn.py
    python -m hotbed.compat.hugectr.run dcn.py --max-iter 50 --data-scale 0.01   # a rehearsal

A rehearsal is short: it generates the data that the script reads, under the script's own paths and
from the parameters of its reader, and never over a file that exists. A training file (`.json`) is
run in the same way. Arguments that are not those of this module go to the script.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import runpy
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import converter
from hotbed.compat.hugectr.clauses import DataReaderParams, FitParams
from hotbed.compat.hugectr.clauses.training import NEWEST_RELEASE, release_number
from hotbed.compat.hugectr.job import read_training, train_file
from hotbed.compat.hugectr.model import Model
from hotbed.compat.hugectr.model.console import show
from hotbed.compat.hugectr.rehearsal import Reading, Rehearsal
from hotbed.errors import HotbedError
from hotbed.training.watching.history import History
from hotbed.yaml_files import read_mapping


class RehearsedModel(Model):
    """A model whose runs are as short as its class says; `rehearsed` makes such a class."""

    rehearsal: ClassVar[Rehearsal]
    _is_shortened = False
    _num_learned = 0
    _script_fit = FitParams()
    _script_reader: DataReaderParams

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        self._shorten()
        super().compile(*arguments, **keywords)

    def summary(self) -> None:
        self._shorten()
        super().summary()

    def fit(self, *arguments: Any, **keywords: Any) -> History:
        whole = self._script_fit
        params = self.solver.fit
        if params is None or arguments or keywords:
            whole = FitParams(*arguments, **keywords)
            params = self.rehearsal.fit(whole, repeats=self.solver.repeat_dataset)
        before = self.get_learning_rate_scheduler().get_step()
        history = super().fit(**vars(params))
        steps = self.get_learning_rate_scheduler().get_step() - before
        show(f"rehearsal: learned {steps} iterations")
        save_left_out(self, self.rehearsal, whole, steps)
        return history

    def train(self, is_first_batch: bool = True) -> bool:
        most = self.rehearsal.max_iter
        if most is not None and self._num_learned >= most:
            return False  # as at the end of the data
        has_learned = super().train(is_first_batch)
        self._num_learned += has_learned
        return has_learned

    def _fit(self, params: FitParams, epochs: int, max_steps: int | None) -> History:
        return super()._fit(params, epochs, max_steps or self.rehearsal.max_iter)

    def _shorten(self) -> None:
        """Shorten the solver, and generate what the reader lacks, before either is needed."""
        if self._is_shortened or self.reader is None:
            return
        self._is_shortened = True
        self._script_fit = self.solver.fit or self._script_fit
        self._script_reader = self.reader
        self.solver = self.rehearsal.solver(self.solver)
        reading = self.rehearsal.reading(self.reader, self.solver)
        self.reader = reading.reader
        if reading.is_generated:
            self.graph = self.rehearsal.graph(self.graph)
        show(
            f"rehearsal: batches of {self.solver.batchsize} samples, "
            f"{self.solver.max_eval_batches} of {self.solver.batchsize_eval} to evaluate"
        )
        self._generate(reading)

    def _ready(self, reader: DataReaderParams) -> DataReaderParams:
        """Generate the data of a source that the script sets after `compile`."""
        if reader == self.reader:
            return reader
        later = replace(self._script_reader, source=reader.source, eval_source=reader.eval_source)
        reading = self.rehearsal.reading(later, self.solver)
        self._generate(reading)
        return reading.reader

    def _generate(self, reading: Reading) -> None:
        sizes = ", ".join(map(str, reading.reader.slot_size_array)) or "1000"
        for source in reading.generate(self.solver, self.graph.input):
            show(f"rehearsal: generated {source}, with slots of {sizes} keys")


def rehearsed(rehearsal: Rehearsal) -> type[RehearsedModel]:
    """Return a `Model` whose runs are as short as a rehearsal says."""
    return type("RehearsedModel", (RehearsedModel,), {"rehearsal": rehearsal})


def save_left_out(model: Model, rehearsal: Rehearsal, fit: FitParams, steps: int) -> None:
    """Save the snapshots that a rehearsal did not reach, and say what they hold.

    Args:
        model: has learned.
        rehearsal: how it was shortened.
        fit: the arguments of the script.
        steps: iterations that were learned.
    """
    repeats = model.solver.repeat_dataset
    for iteration in rehearsal.left_out(fit, repeats=repeats):
        model.save_params_to_files(fit.snapshot_prefix, iteration)
        show(f"rehearsal: the snapshot of iteration {iteration} has {steps} iterations")
    if not repeats and steps < fit.snapshot:
        show(f"rehearsal: no weights are saved, with snapshot={fit.snapshot} in epochs")


def hugectr_module(replaced: Mapping[str, Any]) -> types.ModuleType:
    """Return the module `hugectr` for scripts.

    Args:
        replaced: names that stand for others than those of the door.
    """
    module = types.ModuleType("hugectr", hugectr.__doc__)
    for name in hugectr.__all__:
        setattr(module, name, getattr(hugectr, name))
    vars(module).update(replaced)
    return module


def mpi4py_module() -> types.ModuleType:
    """Return a module `mpi4py` for machines without it: one process."""
    module = types.ModuleType("mpi4py")
    vars(module)["MPI"] = types.SimpleNamespace(COMM_WORLD=_OneProcess())
    return module


class _OneProcess:
    """The communicator of one process."""

    rank = 0
    size = 1

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Barrier(self) -> None:
        """Wait for nobody."""

    def barrier(self) -> None:
        """Wait for nobody."""

    def bcast(self, value: Any, root: int = 0) -> Any:
        return value

    def gather(self, value: Any, root: int = 0) -> list[Any]:
        return [value]

    def allreduce(self, value: Any) -> Any:
        return value


def run_script(
    script: str, arguments: list[str], model_class: type[Model], release: str = NEWEST_RELEASE
) -> None:
    """Run a script as the main program, in which `import hugectr` gives this door.

    Args:
        script: its path.
        arguments: those of the script.
        model_class: what `hugectr.Model` is in it.
        release: of HugeCTR, whose arithmetic its models have.
    """
    module = hugectr_module(
        {
            "Model": model_class,
            "ModelPerfExt": model_class,
            "Session": type("Session", (hugectr.Session,), {"model_class": model_class}),
            "CreateSolver": functools.partial(hugectr.CreateSolver, release=release),
            "solver_parser_helper": functools.partial(
                hugectr.solver_parser_helper, release=release
            ),
        }
    )
    sys.modules["hugectr"] = module
    for name in hugectr.__all__:
        if isinstance(getattr(module, name), types.ModuleType):
            sys.modules[f"hugectr.{name}"] = getattr(module, name)
    hugectr2onnx = types.ModuleType("hugectr2onnx")
    hugectr2onnx.__dict__["converter"] = converter
    sys.modules["hugectr2onnx"] = hugectr2onnx
    sys.modules["hugectr2onnx.converter"] = converter
    if importlib.util.find_spec("mpi4py") is None:
        sys.modules["mpi4py"] = mpi4py_module()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def run_training_file(
    path: str, rehearsal: Rehearsal | None, release: str = NEWEST_RELEASE
) -> None:
    """Run a training file as `huge_ctr --train` ran it, with the arithmetic of a release."""
    training = read_training(read_mapping(path))
    training = replace(training, solver=replace(training.solver, release=release))
    if rehearsal is None:
        train_file(training, Model)
        return
    model = train_file(training, rehearsed(rehearsal))
    steps = model.get_learning_rate_scheduler().get_step()
    show(f"rehearsal: learned {steps} iterations")
    save_left_out(model, rehearsal, training.solver.fit or FitParams(), steps)


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments and run; return the exit code, 2 for a deliberate error."""
    parser = argparse.ArgumentParser(
        prog="python -m hotbed.compat.hugectr.run",
        description="Run a HugeCTR script, or a training file, as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a Python script, or a training file (.json)")
    parser.add_argument("--max-iter", type=int, help="end after this many iterations")
    parser.add_argument(
        "--data-scale",
        type=float,
        help="make batches, slots and generated data this much smaller, such as 0.01",
    )
    parser.add_argument("--data-root", type=Path, help="the folder that stands for / in paths")
    parser.add_argument(
        "--release",
        default=NEWEST_RELEASE,
        help="the release of HugeCTR whose arithmetic models have, such as v4.3.1 [%(default)s]",
    )
    options, rest = parser.parse_known_args(arguments)
    is_rehearsal = options.max_iter is not None or options.data_scale is not None
    if options.data_root is not None and not is_rehearsal:
        parser.error("--data-root: only for generated data. Give --max-iter or --data-scale too.")
    rehearsal = None
    try:
        release_number(options.release)
        if is_rehearsal:
            rehearsal = Rehearsal(options.max_iter, options.data_scale or 1.0, options.data_root)
        if options.script.endswith(".json"):
            run_training_file(options.script, rehearsal, options.release)
            return 0
    except HotbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model_class = Model if rehearsal is None else rehearsed(rehearsal)
    run_script(options.script, rest, model_class, options.release)
    return 0


if __name__ == "__main__":
    sys.exit(main())
