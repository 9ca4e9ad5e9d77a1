# SPDX-License-Identifier: Apache-2.0
"""ModelCheckpoint and CheckpointConfig: MindSpore's names for checkpoints while training."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed import checks
from hotbed.compat.mindspore_rec.callback import Training
from hotbed.compat.mindspore_rec.no_effect import ARGUMENTS
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError
from hotbed.persist.container.format import refuse_others
from hotbed.persist.container.store import open_store
from hotbed.persist.state import checkpoint
from hotbed.training.decisions.checkpoint import Checkpoint
from hotbed.training.decisions.eviction_schedule import Evict
from hotbed.training.run import Run, passed

log = logging.getLogger("hotbed.compat.mindspore_rec")
_DEFAULTS: Mapping[str, Any] = {
    "keep_checkpoint_per_n_minutes": 0,
    "integrated_save": True,
    "async_save": False,
    "append_info": None,
    "exception_save": False,
    "crc_check": False,
    "incremental": False,
}
_NUMBERS = (
    "save_checkpoint_steps",
    "save_checkpoint_seconds",
    "keep_checkpoint_max",
    "keep_checkpoint_per_n_minutes",
)


@dataclass(frozen=True)
class CheckpointConfig:
    """When `ModelCheckpoint` saves, and how much it keeps.

    Args:
        save_checkpoint_steps: steps between two checkpoints; 0 = only by seconds. None is 0, also
            in the three below.
        save_checkpoint_seconds: seconds between two checkpoints; used if `save_checkpoint_steps` is
            0.
        keep_checkpoint_max: number of checkpoints that are kept; 0 = 1, as in MindSpore.
        keep_checkpoint_per_n_minutes: without effect, as the four below; it does not take the
            place of `keep_checkpoint_max`.
        integrated_save: all tables lie in one process.
        async_save: checkpoints are always written while training continues.
        saved_network: None; a part of the network cannot be saved alone.
        append_info: a checkpoint always holds epochs, steps and learning rates.
        enc_key: None; checkpoints are not encrypted.
        enc_mode: used with `enc_key`.
        exception_save: a training that fails after a whole step is always saved.
        crc_check: the digest of each file is always checked.
        incremental: without effect: each checkpoint holds all keys.

    Raises:
        ConfigError: (a ValueError) a value is wrong, or something is asked for that does not exist.
    """

    save_checkpoint_steps: int = 1
    save_checkpoint_seconds: int = 0
    keep_checkpoint_max: int = 5
    keep_checkpoint_per_n_minutes: int = 0
    integrated_save: bool = True
    async_save: bool = False
    saved_network: Any = None
    append_info: Sequence[Any] | None = None
    enc_key: bytes | None = None
    enc_mode: str = "AES-GCM"
    exception_save: bool = False
    crc_check: bool = False
    incremental: bool = False

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, 0)
            checks.whole_number(f"CheckpointConfig.{name}", getattr(self, name), 0)
        if not self.keep_checkpoint_max:
            if self.keep_checkpoint_per_n_minutes:
                raise ConfigError(
                    "CheckpointConfig.keep_checkpoint_per_n_minutes: the newest "
                    "keep_checkpoint_max are kept, got 0 of them. Give keep_checkpoint_max."
                )
            object.__setattr__(self, "keep_checkpoint_max", 1)
        if not self.save_checkpoint_steps and not self.save_checkpoint_seconds:
            raise ConfigError(
                "CheckpointConfig: it needs an interval, got save_checkpoint_steps=0 and "
                "save_checkpoint_seconds=0. Give one of them."
            )
        if self.saved_network is not None:
            raise ConfigError(
                "CheckpointConfig.saved_network: the whole network is saved, got "
                f"{type(self.saved_network).__name__}. Leave it out."
            )
        if self.enc_key is not None:
            raise ConfigError(
                "CheckpointConfig.enc_key: checkpoints are not encrypted, got a key. Leave it out, "
                "and encrypt the disk."
            )
        for name, plain in _DEFAULTS.items():
            differs = getattr(self, name) != plain
            ARGUMENTS.log_no_effect(f"CheckpointConfig.{name}", when=differs)


class ModelCheckpoint:
    """Save the training in the folder `directory/prefix`, as `config` says.

    Before each checkpoint, tables with an `evict_filter_value` erase what is too old, as MindSpore
    does. With a `hb.Dataset`, or a stream that has `position` and `resume`, a later call with the
    same folder resumes where this one ended or was killed, to the same bits. Other data have no
    position: their checkpoints hold the model, for `RecModel.engine.restore(path)`.

    Args:
        prefix: name of the folder.
        directory: the folder around it; None = the working directory.
        config: a `CheckpointConfig`; None = every step, five are kept.
    """

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | Path | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            raise ConfigError(
                f"ModelCheckpoint.prefix: must be a name without '/', got {prefix!r}. Give the "
                "folder as directory."
            )
        if config is not None and not isinstance(config, CheckpointConfig):
            raise ConfigError(
                f"ModelCheckpoint.config: must be a CheckpointConfig, got {config!r:.60}. Give one."
            )
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise ConfigError(
                f"ModelCheckpoint.directory: must be a folder, got {directory!r:.60}. Give its "
                "path."
            )
        self.path = Path(directory or ".") / prefix
        self.config = CheckpointConfig() if config is None else config

    @property
    def latest_ckpt_file_name(self) -> str:
        """The folder of the newest checkpoint; empty before the first."""
        if not self.path.exists():
            return ""
        newest = open_store(self.path).newest_state()
        return "" if newest is None else str(self.path / newest.folder)

    def for_engine(self, training: Training) -> list[Any]:
        """Return the callbacks of the engine that evict and save."""
        steps = self.config.save_checkpoint_steps or None
        seconds = None if steps else self.config.save_checkpoint_seconds
        callbacks: list[Any] = []
        tables = training.engine.tables.values()
        if any(table.clock == "steps" for table in tables):
            callbacks.append(Evict(steps, seconds, clock="wall"))
        if isinstance(training.data, Dataset) or hasattr(training.data, "resume"):
            keep = self.config.keep_checkpoint_max
            callbacks.append(Checkpoint(self.path, steps, seconds, full_every=1, keep=keep))
        else:
            callbacks.append(SavesModel(self.path, self.config))
        return callbacks


class SavesModel:
    """Saves the model of data without positions, as `ModelCheckpoint` says."""

    runs_last = True

    def __init__(self, path: Path, config: CheckpointConfig) -> None:
        self._path = path
        self._config = config
        self._step = -1  # of the last checkpoint
        self._looked = 0
        self._at = 0.0

    def on_fit_begin(self, run: Run) -> None:
        shard = run.learner.shard
        with shard.together():
            store = open_store(self._path)
            refuse_others(store)  # keep_checkpoint_max would remove them
            num_earlier = len(store.folders())
        if num_earlier and run.model.parent is None and shard.is_first:
            log.warning(
                "ModelCheckpoint: %s holds %d checkpoints of another training, and "
                "keep_checkpoint_max=%d removes them; load the newest by model.engine.restore(path)"
                ", or give a prefix of its own",
                self._path,
                num_earlier,
                self._config.keep_checkpoint_max,
            )
        self._looked = run.step
        self._at = run.clock()

    def barrier(self, step: int, now: int | None) -> bool:
        return True

    def on_step_end(self, run: Run) -> None:
        steps = self._config.save_checkpoint_steps
        if steps:
            is_due = passed(run.step, self._looked, steps)
        else:
            here = run.clock() - self._at >= self._config.save_checkpoint_seconds
            is_due = run.learner.shard.from_first(lambda: here)
        self._looked = run.step
        if is_due:
            self._save(run)

    def on_fit_end(self, run: Run) -> None:
        is_whole = run.ending is None or run.ending.whole
        # after an error of one rank, the others would not save
        saves = run.error is None or (is_whole and run.learner.shard.size == 1)
        if saves and run.step != self._step:
            self._save(run)

    def _save(self, run: Run) -> None:
        saved = checkpoint.save(self._path, run.model.state(), self._config.keep_checkpoint_max)
        run.model.parent = saved.digest
        self._step = run.step
        self._at = run.clock()
