# SPDX-License-Identifier: Apache-2.0
"""How to train: solver, optimizer, learning rate, training over passes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hotbed import checks
from hotbed.compat.hugectr.clause import clause
from hotbed.compat.hugectr.clauses.data import DataSourceParams
from hotbed.compat.hugectr.enums import (
    AllReduceAlgo,
    DeviceLayout,
    LrPolicy_t,
    MetricsType,
    Optimizer_t,
    TrainPSType_t,
    Update_t,
)
from hotbed.errors import ConfigError

NEWEST_RELEASE = "v25.03"


@clause("learning_rate")
class LearningRate:
    """The learning rate: warm-up, constant, decay. hugectr.md 6.6 of the reference has formulas."""

    lr: float = 0.001
    warmup_steps: int = 1
    decay_start: int = 0
    decay_steps: int = 1
    decay_power: float = 2.0
    end_lr: float = 0.0

    def __post_init__(self) -> None:
        check_rate("learning_rate", self)


def check_rate(where: str, rate: LearningRate | Solver) -> None:
    """Raise ConfigError if a learning rate or a step of its schedule is out of its range.

    `where`: the place of the clause, in messages. No warm-up (0) is allowed, as from v23.04 on.
    """
    checks.finite_number(f"{where}.lr", rate.lr, least=0)
    checks.whole_number(f"{where}.warmup_steps", rate.warmup_steps, 0)
    checks.whole_number(f"{where}.decay_start", rate.decay_start, 0)
    checks.whole_number(f"{where}.decay_steps", rate.decay_steps, 0)
    checks.finite_number(f"{where}.decay_power", rate.decay_power, least=1)
    checks.finite_number(f"{where}.end_lr", rate.end_lr, least=0)


@clause("fit")
class FitParams:
    """The arguments of `Model.fit`; up to v3.0.1 the solver has them.

    `export_predictions_prefix` is a key of JSON files.
    """

    num_epochs: int = 0
    max_iter: int = 2000
    display: int = 200
    eval_interval: int = 1000
    snapshot: int = 10000
    snapshot_prefix: str = ""
    export_predictions_prefix: str = ""
    data_source_params: DataSourceParams = DataSourceParams()


@clause("files")
class ParamFiles:
    """Files of weights that a run starts from; up to v3.0.1 the solver names them."""

    dense_model_file: str = ""
    dense_opt_states_file: str = ""
    sparse_model_files: tuple[str, ...] = ()
    sparse_opt_states_files: tuple[str, ...] = ()


@clause("solver")
class Solver:
    """How to train: `CreateSolver` of v3.1 and later.

    Attributes:
        fit: arguments of `fit` that a solver of v2.3 to v3.0.1 or a JSON file holds, else None.
        files: files of weights that such a solver holds, else None.
        release: of HugeCTR, whose arithmetic the model has where releases differ: Ftrl adds
            FLT_EPSILON under each root from v23.04 on. It is an argument of Hotbed's.
        grains: of a step, see docs/grains.md; None = 1, and on several processes the most, up to 8,
            that have 512 samples each. It is an argument of Hotbed's, too.
    """

    model_name: str = ""
    seed: int = 0
    lr_policy: LrPolicy_t = LrPolicy_t.fixed
    lr: float = 0.001
    warmup_steps: int = 1
    decay_start: int = 0
    decay_steps: int = 1
    decay_power: float = 2.0
    end_lr: float = 0.0
    max_eval_batches: int = 100
    batchsize_eval: int = 2048
    batchsize: int = 2048
    vvgpu: tuple[tuple[int, ...], ...] = ((0,),)
    repeat_dataset: bool = True
    use_mixed_precision: bool = False
    enable_tf32_compute: bool = False
    scaler: float = 1.0
    metrics_spec: Mapping[MetricsType, float] | None = None
    i64_input_key: bool = False
    use_algorithm_search: bool = True
    use_cuda_graph: bool = True
    gen_loss_summary: bool = True
    train_intra_iteration_overlap: bool = False
    train_inter_iteration_overlap: bool = False
    eval_intra_iteration_overlap: bool = False
    eval_inter_iteration_overlap: bool = False
    device_layout: DeviceLayout = DeviceLayout.LocalFirst
    use_embedding_collection: bool = False
    all_reduce_algo: AllReduceAlgo = AllReduceAlgo.NCCL
    grouped_all_reduce: bool = False
    num_iterations_statistics: int = 20
    perf_logging: bool = False
    drop_incomplete_batch: bool = True
    kafka_brockers: str = ""
    training_callbacks: tuple[Any, ...] = ()
    data_source_params: DataSourceParams = DataSourceParams()
    fit: FitParams | None = None
    files: ParamFiles | None = None
    release: str = NEWEST_RELEASE
    grains: int | None = None

    def __post_init__(self) -> None:
        check_rate("solver", self)
        release_number(self.release)
        if self.metrics_spec is None:
            object.__setattr__(self, "metrics_spec", {MetricsType.AUC: 1.0})
        if self.use_mixed_precision and self.enable_tf32_compute:
            raise ConfigError(
                "solver.enable_tf32_compute: cannot be combined with use_mixed_precision, got "
                "True. Remove one of the two."
            )
        checks.whole_number("solver.max_eval_batches", self.max_eval_batches, 0)
        for key in ("batchsize", "batchsize_eval"):
            if getattr(self, key) < 1:
                raise ConfigError(
                    f"solver.{key}: below 1, got {getattr(self, key)}. Give a number of samples."
                )

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate of the run."""
        return LearningRate(
            self.lr,
            self.warmup_steps,
            self.decay_start,
            self.decay_steps,
            self.decay_power,
            self.end_lr,
        )


def release_number(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release of HugeCTR, such as (23, 4) of "v23.04.00".

    Raises:
        ConfigError: it is not a release from v2.0 to v25.03.
    """
    parts = re.fullmatch(r"v?(\d+)\.(\d+)([._]\w+)*", release)
    number = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    if not (2, 0) <= number <= (25, 3):
        raise ConfigError(
            f"solver.release: not a release of HugeCTR, got {release!r:.80}. Give one from v2.0 to "
            f"{NEWEST_RELEASE}, such as v4.3.1."
        )
    return number


@clause("optimizer")
class OptParams:
    """An optimizer: `CreateOptimizer`.

    Attributes:
        learning_rate: that a call or a JSON file of v2.3 to v3.0.1 gives here, else None.
    """

    optimizer_type: Optimizer_t = Optimizer_t.Adam
    update_type: Update_t = Update_t.Global
    beta: float = 0.0
    lambda1: float = 0.0
    lambda2: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7
    initial_accu_value: float = 0.0
    momentum_factor: float = 0.0
    atomic_update: bool = True
    learning_rate: LearningRate | None = None

    def __post_init__(self) -> None:
        is_adam = self.optimizer_type is Optimizer_t.Adam
        if self.update_type is Update_t.LazyGlobal and not is_adam:
            raise ConfigError(
                "optimizer.update_type: LazyGlobal is an update type of Adam only, got "
                f"{self.optimizer_type.name}. Use Local or Global."
            )


@clause("hmem_cache")
class HMemCacheConfig:
    """Blocks of rows in host memory: `CreateHMemCache`."""

    num_blocks: int = 1
    target_hit_rate: float = 0.5
    max_num_evict: int = 0


@clause("etc")
class EmbeddingTrainingCacheParams:
    """Training over passes of a data set: `CreateETC`; `CreateMOS` up to v3.2."""

    ps_types: tuple[TrainPSType_t, ...] = ()
    sparse_models: tuple[str, ...] = ()
    local_paths: tuple[str, ...] = ()
    hmem_cache_configs: tuple[HMemCacheConfig, ...] = ()
