# SPDX-License-Identifier: Apache-2.0
"""Translation: what a graph of HugeCTR is in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotbed.compat.hugectr.clauses import EmbeddingTableConfig, SparseEmbedding

if TYPE_CHECKING:
    from hotbed.data.bad_rows import IdLimits
    from hotbed.data.schema import Schema
    from hotbed.embedding.rule import Rule
    from hotbed.embedding.table import Table
    from hotbed.models.losses import Loss, MultiTask


@dataclass(frozen=True)
class DenseWeight:
    """A parameter or a statistic of the network, as HugeCTR's files hold it.

    Attributes:
        layer: name of the layer's first output in HugeCTR's graph.
        path: of the parameter in the network, as in its `state_dict`; empty for one that HugeCTR
            stores and the network does not have, such as the bias of a layer without bias: zeros.
        transposed: whether HugeCTR stores the matrix as [inputs, outputs].
        shape: in HugeCTR's file.
    """

    layer: str
    path: str
    transposed: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EmbeddingOf:
    """A table of HugeCTR in the engine.

    Attributes:
        clause: that made it.
        table: name of the table.
        slots: names of its Id columns in the schema.
        offsets: what the reader adds to the ids of each slot.
        keys: the keys that `slot_size_array` gives its slots; None without it.
        keeps_times: whether its files of states hold the step of each row's last update: those of
            LazyGlobal do.
    """

    clause: SparseEmbedding | EmbeddingTableConfig
    table: str
    slots: tuple[str, ...]
    offsets: tuple[int, ...]
    keys: range | None = None
    keeps_times: bool = False


@dataclass(frozen=True)
class Translation:
    """A graph as values of the engine.

    Attributes:
        schema: the columns of a batch.
        tables: by name.
        description: of the network, for `hb.models.Graph`.
        loss: for `hb.RecModel`.
        rule: the optimizer of the dense parameters, with the regularizer of the losses.
        tensors: names of tensors in the description by their names in HugeCTR's graph.
        dense_weights: the parameters in the order of HugeCTR's dense file.
        statistics: means and variances of batch normalization, in the order of its JSON file.
        embeddings: tables in the order of HugeCTR's sparse files.
        labels: names of labels of the schema by the name of the label in HugeCTR's graph.
        limits: what the graph says of the ids of each column; ids that exceed it are counted.
    """

    schema: Schema
    tables: dict[str, Table]
    description: dict[str, Any]
    loss: Loss | MultiTask
    rule: Rule
    tensors: Mapping[str, str]
    dense_weights: tuple[DenseWeight, ...]
    statistics: tuple[DenseWeight, ...]
    embeddings: tuple[EmbeddingOf, ...]
    labels: Mapping[str, tuple[str, ...]]
    limits: Mapping[str, IdLimits]
