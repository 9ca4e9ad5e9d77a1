# SPDX-License-Identifier: Apache-2.0
"""From a `Batch` to the tensors that layers take: embeddings and dense columns side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.data.batch import Batch, Ids, SideBySide
from hotbed.data.schema import Id, Schema
from hotbed.embedding.histories import HistoryStore
from hotbed.embedding.modules import EmbeddingCollection, Feature
from hotbed.embedding.tables import check_table
from hotbed.errors import ConfigError, RowShapeError, SchemaError
from hotbed.models.layers.sequence import PadSequence
from hotbed.models.layers.tasks import JointLogit

if TYPE_CHECKING:
    from hotbed.embedding.table import Table

Histories = Mapping[str, str] | Sequence[Mapping[str, str]]
"""Target columns by the sequence column that holds their history.

The columns of one mapping are one history: entry k of each belongs to the same event. A list of
mappings is one history each.
"""


class FeatureInputs(nn.Module):
    """All features of a schema as one matrix: pooled embeddings, then the dense columns.

    Both are in the order of the schema.

    Args:
        schema: the columns of the data.
        tables: one table for each table name in the schema.
        sequences: features of pooling "none" that the model reads; they are not in the matrix.

    Attributes:
        output_dim: columns of the matrix.
        widths: columns of each feature by its name, in their order.

    Raises ConfigError for a schema without features, and for other features of pooling "none".
    """

    def __init__(
        self, schema: Schema, tables: Mapping[str, Table], sequences: Collection[str] = ()
    ) -> None:
        super().__init__()
        _refuse_sequences(schema, sequences)
        self.dense_columns = [column.name for column in schema.dense]
        self.dense_dim = schema.dense_width
        fields = [column for column in schema.ids if column.name not in sequences]
        self.field_dims: tuple[int, ...] = tuple(table_of(tables, column).dim for column in fields)
        self.collection = EmbeddingCollection(schema, tables) if schema.ids else None
        self.embedding_dim = sum(self.field_dims)
        self.output_dim = self.embedding_dim + self.dense_dim
        if not self.output_dim:
            raise ConfigError("schema: no features, got no Id and no Dense column. Add one.")
        names = [column.name for column in fields]
        self.widths = dict(zip(names, self.field_dims, strict=True))
        self.widths |= {column.name: column.width for column in schema.dense}

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> float32 [n, output_dim]."""
        return self.with_sequences(batch)[0]

    def with_sequences(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what `forward` returns, and the rows [m, dim] of each sequence by name."""
        embeddings, dense, sequences = self._read(batch)
        parts = [part for part in (embeddings, dense) if part is not None]
        if len(parts) == 1:
            return parts[0], sequences
        return torch.cat(parts, dim=1), sequences

    def parts(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Return embeddings [n, embedding_dim] and dense columns [n, dense_dim].

        Each is None if the schema has none.
        """
        embeddings, dense, _ = self._read(batch)
        return embeddings, dense

    def _read(self, batch: Batch) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        embeddings = None
        sequences: dict[str, Tensor] = {}
        if self.collection is not None:
            embeddings, sequences = self.collection.flat_and_sequences(batch)
        if not self.dense_columns:
            return embeddings, None, sequences
        dense = dense_matrix(batch, self.dense_columns)
        if embeddings is not None:
            dense = dense.to(embeddings.device)
        return embeddings, dense, sequences

    def field(self, flat: Tensor, name: str) -> Tensor:
        """Return one feature, [n, its width], from the result of `forward`."""
        start = 0
        for other, width in self.widths.items():
            if other == name:
                break
            start += width
        return flat[:, start : start + self.widths[name]]

    def width(self, where: str, names: Sequence[str]) -> int:
        """Return the sum of the widths of some features; raise ConfigError if one is not here.

        `where`: the argument that lists them, for the message.
        """
        unknown = [name for name in names if name not in self.widths]
        if unknown:
            raise ConfigError(
                f"{where}: not a feature of this model, got {unknown}. Use some of "
                f"{', '.join(self.widths)}."
            )
        return sum(self.widths[name] for name in names)

    def select(self, flat: Tensor, names: Sequence[str]) -> Tensor:
        """Return some features side by side, [n, sum of widths], from the result of `forward`."""
        return torch.cat([self.field(flat, name) for name in names], dim=1)

    def fields(self, flat: Tensor) -> Tensor:
        """Return the embeddings as [n, fields, dim]; all tables must have the same dim.

        `flat`: the embeddings alone, or the result of `forward`.
        """
        if flat.shape[1] != self.embedding_dim:
            flat = flat[:, : self.embedding_dim]
        return flat.reshape(-1, len(self.field_dims), self.field_dims[0])

    def equal_dim(self, model: str) -> int:
        """Return the dim that all fields share; raise ConfigError if they differ.

        Models that multiply fields with each other need it. `model`: the name for the message.
        """
        if len(set(self.field_dims)) != 1:
            raise ConfigError(
                f"{model}: all fields must have the same dim, got dims "
                f"{sorted(set(self.field_dims))}. Give the same dim to every table."
            )
        return self.field_dims[0]


class History(NamedTuple):
    """A target and its history.

    Attributes:
        target: [n, dim].
        rows: [n, length, dim], oldest first, zeros behind them.
        mask: [n, length], 1 for entries, 0 for padding.
    """

    target: Tensor
    rows: Tensor
    mask: Tensor


class PackedHistory(NamedTuple):
    """A target and its history, without padding.

    Attributes:
        target: [n, dim].
        rows: [m, dim] of all samples, oldest first.
        offsets: int64 [n + 1], where the rows of each sample begin.
    """

    target: Tensor
    rows: Tensor
    offsets: Tensor


class HistoryInputs(nn.Module):
    """All features of a schema as one matrix, and histories beside their targets.

    Args:
        schema: the columns of the data.
        tables: one table for each table name in the schema; a target and its history have tables
            of the same dim, usually the same table.
        histories: the target column of each sequence column. The columns of one mapping are one
            history, side by side: `{"clicked_item": "item", "clicked_shop": "shop"}`. A list of
            mappings is one history each.
        length: the newest entries that are read; None takes the `max_length` of the columns.
        is_padded: whether `forward` is called, which needs a length; without it `packed` reads all
            entries where neither `length` nor `max_length` says how many.

    Attributes:
        dims: of each history.
        lengths: of each history; None reads all entries.

    Raises ConfigError if the columns and tables do not fit.
    """

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        histories: Histories,
        length: int | None = None,
        *,
        is_padded: bool = True,
    ) -> None:
        super().__init__()
        groups = [histories] if isinstance(histories, Mapping) else list(histories)
        self.groups = [dict(group) for group in groups]
        self.pads = nn.ModuleList()
        self.dims: list[int] = []
        self.lengths: list[int | None] = []
        for group in self.groups:
            columns = [_sequence(schema, name) for name in group]
            for column, target in zip(columns, group.values(), strict=True):
                _check_target(schema, tables, column, target)
            self.dims.append(sum(table_of(tables, column).dim for column in columns))
            self.lengths.append(_length(columns, length))
            if is_padded:
                self.pads.append(PadSequence(_known_length(self.lengths[-1], columns)))
        if not all(self.groups) or not self.groups:
            raise ConfigError(
                f"histories: no column, got {histories}. Give the target of each sequence column, "
                "for example {'clicked_item': 'item'}."
            )
        names = [name for group in self.groups for name in group]
        self.features = FeatureInputs(schema, tables, names)
        self.output_dim = self.features.output_dim

    def forward(self, batch: Batch) -> tuple[Tensor, list[History]]:
        """A batch of n samples -> float32 [n, output_dim], and the histories in order."""
        flat, packed = self.packed(batch)
        histories = []
        for history, pad in zip(packed, self.pads, strict=True):
            rows, mask = pad(history.rows, history.offsets)
            histories.append(History(history.target, rows, mask))
        return flat, histories

    def packed(self, batch: Batch) -> tuple[Tensor, list[PackedHistory]]:
        """Return what `forward` returns, with all rows of each history and without padding."""
        flat, sequences = self.features.with_sequences(batch)
        histories = []
        for group in self.groups:
            offsets = {name: bounds_of(batch.ids[name]) for name in group}
            if not torch.compiler.is_compiling():
                _check_aligned(offsets)
            target = _side_by_side([self.features.field(flat, name) for name in group.values()])
            rows = _side_by_side([sequences[name] for name in group])
            histories.append(PackedHistory(target, rows, next(iter(offsets.values()))))
        return flat, histories


def columns_together(network: nn.Module) -> list[list[str]]:
    """Return the columns of each history of a network, whose lists go side by side."""
    layers = [layer for layer in network.modules() if isinstance(layer, HistoryInputs)]
    return [list(group) for layer in layers for group in layer.groups]


class LinearTerm(nn.Module):
    """First-order term: one weight for every id and every dense column, and a bias.

    The weights of table "x" lie in a table "x.linear" of dim 1 with the same rule and policies. The
    weights of the dense columns begin at zero.
    """

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        super().__init__()
        _refuse_sequences(schema)
        used = {name: table_of(tables, columns[0]) for name, columns in schema.tables.items()}
        weights = [table.like(f"{name}.linear", dim=1) for name, table in used.items()]
        features = [
            Feature(column.name, f"{column.table}.linear", column.pooling) for column in schema.ids
        ]
        self.collection: EmbeddingCollection | None = None
        if features:
            histories = HistoryStore.of(schema, tables)
            self.collection = EmbeddingCollection(features, weights, histories=histories)
        self.dense_columns = [column.name for column in schema.dense]
        self.dense_weights: nn.Parameter | None = None
        if schema.dense:
            self.dense_weights = nn.Parameter(torch.zeros(1, schema.dense_width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> float32 [n]."""
        logit: Tensor = self.bias
        if self.collection is not None:
            logit = logit + self.collection.flat(batch).sum(1)
        if self.dense_weights is not None:
            dense = dense_matrix(batch, self.dense_columns).to(self.bias.device)
            logit = logit + F.linear(dense, self.dense_weights).squeeze(-1)
        return logit


class PositionTerm(nn.Module):
    """The effect of the place at which an item was shown, on the logits of a network.

    Without a `DisplayPosition` in the schema, and for batches without places, as in serving,
    logits are as they were. Each label has effects of its own; see `DisplayPosition` for the two
    forms and their sources.

    Args:
        schema: the columns of the data.
        labels: the names of the outputs; empty = one without a name.

    Attributes:
        effects: [places, labels] without the first place: numbers that are added to the logit, or
            the logits of being looked at.
    """

    def __init__(self, schema: Schema, labels: Sequence[str] = ()) -> None:
        super().__init__()
        self.labels = tuple(labels)
        self.column = schema.display_position
        if self.column is not None:
            shape = (self.column.size - 1, max(1, len(self.labels)))
            self.effects = nn.Parameter(torch.zeros(shape))
            self.joint = JointLogit()

    def forward(self, outputs: Any, batch: Batch) -> Any:
        """Logits [n], or by label, and their batch -> logits at the places of the batch."""
        if self.column is None or self.column.name not in batch.dense:
            return outputs
        places = torch.as_tensor(batch.dense[self.column.name]).to(self.effects.device)
        if not isinstance(outputs, Mapping):
            return self._at(places, outputs, 0)
        numbers = {label: number for number, label in enumerate(self.labels)}
        return {
            label: self._at(places, logits, numbers[label]) for label, logits in outputs.items()
        }

    def _at(self, places: Tensor, logits: Tensor, number: int) -> Tensor:
        """Return the logits of one label at places, -1 where they are missing."""
        assert self.column is not None
        is_later = places > 0
        index = (places.long() - 1).clamp_min(0)
        effects = nn.functional.embedding(index, self.effects[:, number : number + 1]).squeeze(1)
        later = logits + effects
        if self.column.form == "factor":
            later = self.joint(logits, effects)
        return torch.where(is_later, later, logits)


def dense_matrix(batch: Batch, names: list[str]) -> Tensor:
    """Return dense columns of a batch side by side, float32 [n, sum of widths]."""
    if isinstance(batch.dense, SideBySide) and list(batch.dense) == names:
        matrix: Tensor = batch.dense.matrix
        return matrix
    columns = []
    missing = [name for name in names if name not in batch.dense]
    if missing:
        raise SchemaError(
            f"network: the batch lacks the dense columns {missing}, got {sorted(batch.dense)}. "
            "Encode it with the same schema. hb.RecModel fills columns that the model keeps."
        )
    for name in names:
        column = torch.as_tensor(batch.dense[name], dtype=torch.float32)
        columns.append(column if column.dim() == 2 else column.unsqueeze(1))
    return torch.cat(columns, dim=1)


def table_of(tables: Mapping[str, Table], column: Id) -> Table:
    """Return the table of an Id column; raise ConfigError if `tables` lacks it."""
    if not isinstance(tables, Mapping):
        raise ConfigError(
            f"tables: expected a mapping of names to tables, got {tables!r:.60}. Give what "
            "hb.make_tables returns, such as {'user': hb.Table('user', dim=16)}."
        )
    name = column.table or column.name
    if name not in tables:
        raise ConfigError(
            f"tables: no table for column {column.name!r}, got {sorted(tables)}. "
            f"Add {name!r}, for example with hb.make_tables(schema, dim=16)."
        )
    check_table(f"tables.{name}", tables[name])
    return tables[name]


def _refuse_sequences(schema: Schema, known: Collection[str] = ()) -> None:
    """Raise ConfigError for a feature of pooling "none" that a model does not read."""
    ages = set[str]()
    if schema.time is not None:
        ages = {f"{column.name}_{schema.time.name}" for column in schema.kept}
    for column in schema.ids:
        if column.pooling == "none" and column.name not in known:
            advice = "Use sum, mean or max, a model with histories (DIN, DIEN, BST)"
            if column.name in ages:
                advice = "Take the Time column out of the history"
            elif column in schema.kept_features:
                advice = "Name it in the histories of DIN, DIEN or BST, keep an hb.Count instead"
            raise ConfigError(
                f"{column.name}: this model takes no sequence features, got pooling 'none'. "
                f"{advice}, or write your own network around hb.EmbeddingCollection and "
                "hb.models.layers.PadSequence (docs/histories.md)."
            )


def _sequence(schema: Schema, name: str) -> Id:
    for column in schema.ids:
        if column.name == name and column.pooling == "none":
            return column
    sequences = [column.name for column in schema.ids if column.pooling == "none"]
    raise ConfigError(
        f"histories: expected Id columns with pooling 'none', got {name!r}. The schema has "
        f"{sequences}."
    )


def _check_target(schema: Schema, tables: Mapping[str, Table], history: Id, name: str) -> None:
    targets = {column.name: column for column in schema.ids if column.pooling != "none"}
    if name not in targets:
        raise ConfigError(
            f"histories.{history.name}: the target must be an Id column that is pooled, got "
            f"{name!r}. Use one of {', '.join(targets)}."
        )
    makers = [
        [step for step in column.transforms[-1:] if step.gives_ids]
        for column in (history, targets[name])
    ]
    is_one_table = table_of(tables, history) is table_of(tables, targets[name])
    if is_one_table and makers[0] != makers[1]:
        raise ConfigError(
            f"histories.{history.name}: the history and its target {name!r} must make ids alike, "
            f"got {makers[0] or 'no Hash'} and {makers[1] or 'no Hash'} at the end of their "
            "transforms. Give both the same one."
        )
    dim = table_of(tables, targets[name]).dim
    if dim != table_of(tables, history).dim:
        raise ConfigError(
            f"histories.{history.name}: the history and its target {name!r} must have the same "
            f"dim, got {table_of(tables, history).dim} and {dim}. Give both columns the same table."
        )


def _length(columns: Sequence[Id], length: int | None) -> int | None:
    """Return how many of the newest entries are read; None reads all."""
    lengths = [column.max_length for column in columns if column.max_length is not None]
    if length is not None or len(lengths) < len(columns):
        return length
    return max(lengths, default=1)


def _known_length(length: int | None, columns: Sequence[Id]) -> int:
    if length is not None:
        return length
    name = next(column.name for column in columns if column.max_length is None)
    raise ConfigError(
        f"length: not given, and column {name!r} has no max_length, got None. Give the newest "
        "entries to read, for example length=50."
    )


def bounds_of(ids: Ids) -> Tensor:
    """Return where the entries of each sample begin; without offsets each sample has one."""
    if ids.offsets is None:
        return torch.arange(ids.values.shape[0] + 1)
    return torch.as_tensor(ids.offsets)


def _side_by_side(columns: list[Tensor]) -> Tensor:
    """Return matrices [n, dims] as one, without a copy of a single one."""
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _check_aligned(offsets: Mapping[str, Tensor]) -> None:
    (first, starts), *others = offsets.items()
    for name, other in others:
        if not torch.equal(starts, other):
            raise RowShapeError(
                f"histories: columns {first!r} and {name!r} are one history, got other numbers of "
                "entries in a sample. Give histories of their own in a list of mappings."
            )
