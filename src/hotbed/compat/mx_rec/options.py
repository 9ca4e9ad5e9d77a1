# SPDX-License-Identifier: Apache-2.0
"""Options: the keywords of `init`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The keywords of `init`.

    Attributes:
        max_steps: training steps at most; -1 = not limited.
        train_steps: training steps between two evaluations; -1 = none.
        eval_steps: not needed: an evaluation ends with its loop.
        save_steps: training steps between two saves; -1 = none.
        use_dynamic: whether shapes follow the batch; else each lookup has a `send_count`.
        use_dynamic_expansion: whether optimizers update by address.
        if_load: whether a saved state is loaded.
        is_incremental_checkpoint: whether a `Saver` writes deltas.
        save_checkpoint_due_time: seconds between two whole saves.
        save_delta_checkpoints_secs: seconds between two deltas.
        restore_model_version: global step of the state to load; None = the newest.
    """

    max_steps: int = -1
    train_steps: int = -1
    eval_steps: int = -1
    save_steps: int = -1
    use_dynamic: bool = True
    use_dynamic_expansion: bool = False
    if_load: bool = False
    is_incremental_checkpoint: bool = False
    save_checkpoint_due_time: int | None = None
    save_delta_checkpoints_secs: int | None = None
    restore_model_version: int | None = None
