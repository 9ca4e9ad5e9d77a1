# SPDX-License-Identifier: Apache-2.0
"""HashEmbeddingLookup: MindSpore Recommender's embedding without a vocabulary size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotbed import checks
from hotbed.compat.mindspore_rec.map_parameter import MapParameter
from hotbed.compat.mindspore_rec.no_effect import ARGUMENTS
from hotbed.embedding.policy import ADMISSION_BYTES
from hotbed.embedding.rule import Rule


class HashEmbeddingLookup(nn.Module):
    """Integer keys of any shape -> rows [..., embedding_size]; the table grows with new keys.

    Its signature is that of `mindspore_rec.HashEmbeddingLookup`.

    Args:
        embedding_size: numbers of a row.
        key_dtype: int32 or int64; without effect, any 64-bit integer is a key.
        param_init: the start of a new row, as `default_value` of `MapParameter`.
        sparse: True or False; without effect on the result.
        max_norm: rows longer than this are scaled to it, in the result only.
        permit_filter_value: as of `MapParameter`.
        evict_filter_value: as of `MapParameter`.
        vocab_cache_size: with `ssd_data_path`, the rows that stay in memory.
        name: of the table; None = its place in the network, given by `RecModel`.
        rule: how a step changes rows, such as `hb.Ftrl(lr=5e-2)`; None = as the optimizer of
            `RecModel` does.
        admission_bytes: as of `MapParameter`.
        ssd_data_path: as of `MapParameter`.

    Attributes:
        embedding_table: the `MapParameter` of the rows.

    Raises:
        ConfigError: (a ValueError) an argument is wrong.

    Example:
        >>> deep = HashEmbeddingLookup(80, permit_filter_value=2, evict_filter_value=10_000)
        >>> deep(torch.tensor([[7, -1]])).shape
        torch.Size([1, 2, 80])
    """

    def __init__(
        self,
        embedding_size: int,
        key_dtype: Any = torch.int32,
        param_init: Any = "normal",
        sparse: bool = True,
        max_norm: float | None = None,
        permit_filter_value: int = 1,
        evict_filter_value: int = sys.maxsize,
        vocab_cache_size: int = 0,
        *,
        name: str | None = None,
        rule: Rule | None = None,
        admission_bytes: int = ADMISSION_BYTES,
        ssd_data_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        checks.whole_number("HashEmbeddingLookup.embedding_size", embedding_size, 1)
        checks.one_of("HashEmbeddingLookup.sparse", sparse, (True, False))
        if max_norm is not None:
            checks.finite_number("HashEmbeddingLookup.max_norm", max_norm, above=0)
        ARGUMENTS.log_no_effect("HashEmbeddingLookup.sparse", when=not sparse)
        self.embedding_size = embedding_size
        self.embedding_table = MapParameter(
            key_dtype,
            torch.float32,
            embedding_size,
            default_value=param_init,
            permit_filter_value=permit_filter_value,
            evict_filter_value=evict_filter_value,
            name=name,
            rule=rule,
            admission_bytes=admission_bytes,
            vocab_cache_size=vocab_cache_size,
            ssd_data_path=ssd_data_path,
        )
        self.embedding_table.embedding.max_norm = max_norm

    def forward(self, input_indices: Any) -> torch.Tensor:
        """Return the rows of keys, integers [...] -> float32 [..., embedding_size].

        A column of a `Batch`, `batch.ids[name]` with m ids, gives rows [m, embedding_size]. A
        network that looks up such columns only can be exported for servers.
        """
        return self.embedding_table.get(input_indices)
