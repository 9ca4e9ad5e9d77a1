# SPDX-License-Identifier: Apache-2.0
"""The input of a HugeCTR graph and its embeddings: columns, tables and inputs of a description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hotbed.compat.hugectr.clauses import (
    EmbeddingCollectionConfig,
    EmbeddingLookup,
    EmbeddingTableConfig,
    Graph,
    InitParams,
    Input,
    OptParams,
    SparseEmbedding,
)
from hotbed.compat.hugectr.enums import Embedding_t, Initializer_t, Update_t
from hotbed.compat.hugectr.reader import Columns, numbered, offsets_of_sizes
from hotbed.compat.hugectr.translate.network import Network
from hotbed.compat.hugectr.translate.translation import EmbeddingOf
from hotbed.config import did_you_mean
from hotbed.data.bad_rows import IdLimits
from hotbed.data.schema import Dense, Id, Label
from hotbed.data.transforms import Shift
from hotbed.embedding.init import Init, Uniform
from hotbed.embedding.rule import Rule
from hotbed.embedding.table import Table
from hotbed.embedding.tier import Ram, Tier
from hotbed.errors import ConfigError

_POOLINGS = {"sum": "sum", "mean": "mean", "average": "mean", "concat": "none"}


class Sparse(NamedTuple):
    """Sparse slots that the input reads together.

    Attributes:
        names: of the slots.
        raw_names: of their raw columns.
        offsets: what the reader adds to their ids.
        sizes: number of ids of each slot; 0 where none is given.
        hotness: the most ids of a sample in each slot.
    """

    names: tuple[str, ...]
    raw_names: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    hotness: tuple[int, ...]

    @property
    def keys(self) -> range | None:
        """The keys of all slots together; None if a size is not given."""
        if not all(self.sizes):
            return None
        return range(self.offsets[0], self.offsets[-1] + self.sizes[-1])


class Inputs:
    """The columns and tables of a graph.

    Args:
        network: takes the inputs of the description.
        graph: of HugeCTR.
        columns: raw columns of the reader.
        optimizer: of the tables that have none of their own.
        rule_of: returns the rule of an optimizer.
        seed: of the initial rows.
        tiers: of tables whose rows do not lie in memory, by name.

    Attributes:
        labels: columns by the name of the label in HugeCTR's graph.
        dense: columns.
        ids: columns, those of each embedding after one another.
        tables: by name.
        embeddings: in the order of HugeCTR's sparse files.
        limits: what the graph says of the ids of each column.
    """

    def __init__(
        self,
        network: Network,
        graph: Graph,
        columns: Columns,
        optimizer: OptParams,
        rule_of: Callable[[OptParams], Rule],
        seed: int,
        tiers: Mapping[str, Tier],
    ) -> None:
        self.labels: dict[str, tuple[Label, ...]] = {}
        self.dense: list[Dense] = []
        self.ids: list[Id] = []
        self.tables: dict[str, Table] = {}
        self.embeddings: list[EmbeddingOf] = []
        self.limits: dict[str, IdLimits] = {}
        self._network = network
        self._input = graph.input
        self._columns = columns
        self._optimizer = optimizer
        self._rule_of = rule_of
        self._seed = seed
        self._tiers = tiers
        self._slots = _slots(graph.input, columns)
        self._add_labels()
        self._add_dense()
        for embedding in graph.embeddings:
            if isinstance(embedding, SparseEmbedding):
                self._add_embedding(embedding)
            else:
                self._add_collection(embedding)

    def _add_labels(self) -> None:
        raw_names = iter(self._columns.labels)
        for name, dim in zip(self._input.label_names, self._input.label_dims, strict=True):
            labels = []
            for label in numbered(name, dim):
                labels.append(Label(label, column=_unless_equal(next(raw_names), label)))
            self.labels[name] = tuple(labels)
            self._network.labels[name] = tuple(label.name for label in labels)

    def _add_dense(self) -> None:
        if not self._input.dense_dim:
            return
        self.dense = list(self._columns.dense)
        width = sum(column.width for column in self.dense)
        if width != self._input.dense_dim:
            raise ConfigError(
                f"input.dense_dim: the reader has {width} dense values, got "
                f"{self._input.dense_dim}. Correct dense_dim."
            )
        keys = {"columns": [column.name for column in self.dense]}
        self._network.add_input("dense", self._input.dense_name, keys, (width,))

    def _add_embedding(self, embedding: SparseEmbedding) -> None:
        """Add one table, a column for each slot, and the input [n, slots, vec]."""
        sparse = self._sparse(embedding.bottom_name)
        if embedding.embedding_type is Embedding_t.HybridSparseEmbedding:
            sparse = _with_own_offsets(sparse, embedding.slot_size_array)
        _check_placement(self._input, embedding)
        name = embedding.sparse_embedding_name
        slots = self._add_slots(sparse, name, str(embedding.combiner), sparse.sizes)
        init: Init = Uniform(0.05)
        if embedding.slot_size_array:
            # HugeCTR draws the rows of each slot within sqrt(1 / its size)
            mean_size = sum(embedding.slot_size_array) / len(embedding.slot_size_array)
            init = Uniform(mean_size**-0.5)
        self._add_table(name, embedding.embedding_vec_size, embedding.optimizer, init)
        optimizer = embedding.optimizer or self._optimizer
        keeps_times = optimizer.update_type is Update_t.LazyGlobal
        self.embeddings.append(
            EmbeddingOf(embedding, name, slots, sparse.offsets, sparse.keys, keeps_times)
        )
        shape = (len(slots), embedding.embedding_vec_size)
        self._network.add_input("fields", name, {"columns": list(slots)}, shape)

    def _add_collection(self, collection: EmbeddingCollectionConfig) -> None:
        """Add the tables of an embedding collection, and a tensor for each of its lookups.

        A lookup is [n, 1, vec]; `concat` puts the rows of a sample side by side, padded to the
        hotness of the slot. Lookups of one call are side by side in one tensor [n, …].
        """
        slots: dict[str, tuple[str, ...]] = {}
        offsets: dict[str, tuple[int, ...]] = {}
        tables = {lookup.table.name: lookup.table for lookup in collection.lookups}
        for table in tables.values():
            optimizer = table.opt_params_or_empty or self._optimizer
            # its kernels update the rows of a batch alone, whatever the update type
            local = replace(optimizer, update_type=Update_t.Local)
            self._add_table(table.name, table.ev_size, local, _rows(table))
        together: dict[str, list[str]] = {}
        for lookup in collection.lookups:
            sparse = self._sparse(lookup.bottom_name)
            sizes = sparse.sizes
            if not any(sparse.offsets):  # else readers give the slots ranges of one table
                sizes = (max(lookup.table.max_vocabulary_size, 0),) * len(sparse.names)
            pooling = _POOLINGS[lookup.combiner]
            names = self._add_slots(sparse, lookup.table.name, pooling, sizes)
            slots[lookup.table.name] = (*slots.get(lookup.table.name, ()), *names)
            offsets[lookup.table.name] = (*offsets.get(lookup.table.name, ()), *sparse.offsets)
            top = lookup.top_name
            if lookup.is_part:
                top = f"{lookup.top_name}.{len(together.setdefault(lookup.top_name, []))}"
                together[lookup.top_name].append(top)
            self._add_lookup(lookup, names, top, sparse.hotness)
        for top, parts in together.items():
            self._network.add("concat", parts, [top])
        for name, table in tables.items():
            self.embeddings.append(EmbeddingOf(table, name, slots[name], offsets[name]))

    def _add_lookup(
        self, lookup: EmbeddingLookup, names: tuple[str, ...], top: str, hotness: tuple[int, ...]
    ) -> None:
        """Add the tensor `top`: [n, vec] for a part of a tensor, else [n, 1, vec]."""
        if len(names) != 1:
            raise ConfigError(
                f"embedding_lookup.bottom_name: a lookup takes one slot, got "
                f"{lookup.bottom_name!r} with {len(names)}. Give each slot sparse params of its "
                "own."
            )
        dim = lookup.table.ev_size
        columns = {"columns": list(names)}
        if lookup.combiner != "concat" and lookup.is_part:
            self._network.add_input("flat", top, columns, (dim,))
            return
        if lookup.combiner != "concat":
            self._network.add_input("fields", top, columns, (1, dim))
            return
        rows = f"{top}.rows"
        self._network.add_input(
            "sequence",
            rows,
            {"column": names[0], "length": hotness[0]},
            (hotness[0], dim),
            f"{top}.mask",
        )
        shape = [-1, hotness[0] * dim]
        if not lookup.is_part:
            shape.insert(1, 1)
        self._network.add("reshape", [rows], [top], {"shape": shape})

    def _sparse(self, bottom: str) -> Sparse:
        """Return the sparse slots of this name."""
        if bottom not in self._slots:
            raise ConfigError(
                f"sparse_embedding.bottom_name: the input has no such sparse slots, got "
                f"{bottom!r}. {did_you_mean(bottom, self._slots)}"
            )
        return self._slots[bottom]

    def _add_slots(
        self, sparse: Sparse, table: str, pooling: str, sizes: Sequence[int]
    ) -> tuple[str, ...]:
        """Add the Id columns of sparse slots for one table, and return their names."""
        names = sparse.names
        present = {column.name for column in self.ids}
        if present.intersection(names):  # a second table looks up the same slots
            names = tuple(f"{name}_of_{table}" for name in names)
        for name, raw, offset in zip(names, sparse.raw_names, sparse.offsets, strict=True):
            self.ids.append(
                Id(
                    name,
                    table=table,
                    transforms=[Shift(offset)] if offset else [],
                    pooling=pooling,
                    column=_unless_equal(raw, name),
                )
            )
        declared = zip(names, sparse.offsets, sizes, sparse.hotness, strict=True)
        for name, offset, size, hotness in declared:
            self.limits[name] = IdLimits(offset, size, hotness)
        return names

    def _add_table(self, name: str, dim: int, optimizer: OptParams | None, init: Init) -> None:
        if name in self.tables:
            raise ConfigError(
                f"sparse_embedding.sparse_embedding_name: two tables have this name, got {name!r}. "
                "Rename one of them."
            )
        rule = self._rule_of(optimizer or self._optimizer)
        tier = self._tiers.get(name, Ram())
        if rule.scope == "all" and not isinstance(tier, Ram):
            rule = replace(rule, scope="catch_up")  # the bits of "all", without reading every row
        self.tables[name] = Table(name, dim, rule=rule, init=init, tier=tier, seed=self._seed)


def _with_own_offsets(sparse: Sparse, sizes: tuple[int, ...]) -> Sparse:
    """Return slots with the offsets that a hybrid embedding adds where the reader adds none."""
    if not sizes or any(sparse.offsets):
        return sparse
    if len(sizes) != len(sparse.names):
        raise ConfigError(
            f"sparse_embedding.slot_size_array: expected one size for each of {len(sparse.names)} "
            f"slots, got {len(sizes)} sizes. Give a size for each slot."
        )
    return sparse._replace(offsets=offsets_of_sizes(sizes), sizes=sizes)


def _check_placement(input: Input, embedding: SparseEmbedding) -> None:
    """Raise ConfigError if the reader places slots otherwise than their embedding does."""
    kind = embedding.embedding_type
    for param in input.data_reader_sparse_param_array:
        if param.top_name != embedding.bottom_name or param.type is None:
            continue
        if not kind.name.startswith(param.type.value):
            raise ConfigError(
                f"sparse_embedding.embedding_type: {param.top_name!r} is read as "
                f"{param.type.value}, got {kind.name}. Give the slots and their embedding one kind."
            )


def _rows(table: EmbeddingTableConfig) -> Init:
    """Return the initial rows of a table of an embedding collection.

    HugeCTR draws them within sqrt(1 / rows) of a table of fixed size, else within 0.05. `Uniform`
    has a bound of its own.
    """
    params = table.init_param_or_empty or InitParams()
    kind = params.initializer_type
    if kind is Initializer_t.Uniform and params.up_bound is not None and params.up_bound > 0:
        return Uniform(params.up_bound)
    if kind is not Initializer_t.Default:
        problem = "up_bound above 0" if kind is Initializer_t.Uniform else "Default or Uniform"
        raise ConfigError(
            f"embedding_table.initializer_type: rows of {table.name!r} need {problem}, got "
            f"{kind.name} with up_bound {params.up_bound}. Give it, or leave the type out and load "
            "rows by model.learner.tables[name].load."
        )
    if table.max_vocabulary_size > 0:
        return Uniform(table.max_vocabulary_size**-0.5)
    return Uniform(0.05)


def _slots(input: Input, columns: Columns) -> dict[str, Sparse]:
    """Return the sparse slots of an input by name."""
    slots = {}
    start = 0
    for param in input.data_reader_sparse_param_array:
        end = start + param.slot_num
        slots[param.top_name] = Sparse(
            numbered(param.top_name, param.slot_num),
            columns.slots[start:end],
            columns.offsets[start:end],
            columns.sizes[start:end] or (0,) * param.slot_num,
            param.hotness,
        )
        start = end
    return slots


def _unless_equal(raw: str, name: str) -> str | None:
    """Return the raw column of a column of this name, None for the same name."""
    return None if raw == name else raw
