# SPDX-License-Identifier: Apache-2.0
"""Arguments of MindSpore that have no effect here."""

from __future__ import annotations

from collections.abc import Mapping

from hotbed.compat.no_effect import NoEffect

_WHOLE = "a checkpoint holds the whole state, with its digests"
REASONS: Mapping[str, str] = {
    "CheckpointConfig.append_info": _WHOLE,
    "CheckpointConfig.async_save": "checkpoints are always written while training continues",
    "CheckpointConfig.crc_check": _WHOLE,
    "CheckpointConfig.exception_save": "a training that fails after a whole step is always saved",
    "CheckpointConfig.incremental": "each checkpoint is whole; hb.callbacks.Checkpoint has deltas",
    "CheckpointConfig.integrated_save": "a checkpoint is one, of the rows of all processes",
    "CheckpointConfig.keep_checkpoint_per_n_minutes": "the newest keep_checkpoint_max are kept",
    "HashEmbeddingLookup.sparse": "each distinct key of a batch is always looked up once",
    "MapParameter.set_param_ps": "the processes that train hold the values, without a server",
    "vocab_cache_size": "a table without ssd_data_path lies in memory and needs no cache",
    "RecModel.dataset_sink_mode": "train, fit, eval and predict move batch by batch",
    "RecModel.sink_size": "each epoch of train and fit learns all batches of the data",
}
"""Argument -> why it has no effect; ends the sentence `has no effect, because ...`."""

WARNED = (
    "CheckpointConfig.keep_checkpoint_per_n_minutes",
    "RecModel.sink_size",
    "vocab_cache_size",
)
"""Arguments about rows, steps and files that are kept: their lines are warnings."""

ARGUMENTS = NoEffect("mindspore_rec", REASONS, WARNED)
