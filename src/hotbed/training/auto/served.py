# SPDX-License-Identifier: Apache-2.0
"""A converted model as the exporter takes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hotbed.data.schema import Dense, Id, Schema
from hotbed.errors import ConfigError
from hotbed.optim.modes import in_eval_mode
from hotbed.persist.publish.plain import Part, PlainModel, ServedLookup, TensorSpec
from hotbed.persist.publish.rejection import packed_rejection

from .lookups import MovedLookup
from .network import Converted
from .signature import ENDS, SAMPLES, WEIGHTS, Leaf, Signature
from .trace import Call, inspect
from .tracing.packed import packed_layers


def plain_model(state: Converted, schema: Schema | None) -> PlainModel:
    """Return a converted model as `hotbed.persist.publish.plain` exports it.

    Args:
        state: of the model.
        schema: of the Dataset that it learned from, if there was one.

    Raises:
        ConfigError: the model was not called yet, cannot be traced, or its ids depend on more than
            the batch.
    """
    signature = state.signature
    if signature is None:
        reason = state.problem or "it was not called yet"
        raise ConfigError(
            f"export: a server needs the arguments of the model, got none: {reason}. Call the "
            "model with a batch first, or give hb.auto a batch."
        )
    name = type(state.model).__name__
    if not state.lookups:
        raise ConfigError(
            f"export: a server takes rows from tables, got {name}, of which hb.auto kept every "
            "embedding (print its report). Serve it with torch, or let an embedding become a table."
        )
    with state.traced(), in_eval_mode(state.model), packed_layers(state.model) as packed:
        findings = inspect(state.model, list(state.lookups), signature)
    if packed:
        raise packed_rejection(state.model, packed)
    if findings.graph is None:
        raise ConfigError(
            f"export: a server computes ids without the code of {name}, which cannot be traced, "
            f"got: {findings.problem} Serve it with torch, or change its code."
        )
    for path, reason in findings.graph.obstacles.items():
        raise ConfigError(
            f"export: the ids of {path!r} must depend on the batch alone, got: {reason}. Keep it "
            f"as it is with tables={{{path!r}: None}}, or change the code of {name}."
        )
    graph = findings.graph.unbounded(sorted(state.unbounded))
    return PlainModel(
        network=state.model,
        tensors=[_spec(leaf) for leaf in signature.tensors],
        call=lambda tensors: _call(state, signature, tensors),
        ids=graph.module,
        lookups=[_lookup(state.lookups[call.path], call) for call in graph.calls],
        schema=lambda names: _columns(signature, schema, names),
    )


def _spec(leaf: Leaf) -> TensorSpec:
    return TensorSpec(leaf.name, leaf.dtype, leaf.shape, leaf.axis, leaf.size, leaf.bag)


def _call(state: Converted, signature: Signature, tensors: Sequence[Tensor]) -> Any:
    args, kwargs = signature.arguments(tensors)
    with state.traced():  # rows are there already
        return state.model(*args, **kwargs)


def _lookup(module: MovedLookup, call: Call) -> ServedLookup:
    feature = module.features[0]
    pools = feature.pooling != "none"
    return ServedLookup(
        path=call.path,
        module=module,
        table=feature.table,
        pooling=feature.pooling,
        dim=module.embedding_dim,
        ids=call.ids,
        offsets=call.offsets,
        weights=call.weights,
        weighted=call.weighted,
        ends=bool(getattr(module, "include_last_offset", False)),
        padding=module.padding_idx if pools else None,
    )


def _columns(
    signature: Signature, schema: Schema | None, names: Collection[str]
) -> tuple[Schema, Mapping[str, Part]]:
    """Return the schema of requests, and by tensor the column that feeds it.

    It is the schema of the Dataset, without the columns that no tensor takes, if each tensor has
    the name of a column; else that of the signature.
    """
    if schema is not None:
        parts = _parts(signature, schema, names)
        if parts is not None:
            used = {column for column, _ in parts.values()}
            columns = []
            for column in schema.columns:
                if column.name in used or not isinstance(column, (Id, Dense)):
                    columns.append(column)
            return replace(schema, columns=columns), parts
    schema_of_leaves = signature.schema(names)
    parts = _parts(signature, schema_of_leaves, names)
    if parts is None:
        raise ConfigError(
            f"export: tensors must be columns, or offsets or weights of columns, got "
            f"{sorted(names)}. Name offsets <name>_offsets, and weights <name>_weights."
        )
    return schema_of_leaves, parts


def _parts(signature: Signature, schema: Schema, names: Collection[str]) -> dict[str, Part] | None:
    """Return the column of each tensor and what of it the tensor takes; None if one has none."""
    ids = {column.name for column in schema.ids}
    columns = ids | {column.name for column in schema.dense}
    weights = {column + WEIGHTS for column in ids}
    parts: dict[str, Part] = {}
    for name in names:
        leaf = signature[name]
        values = leaf if leaf.bag is None else signature[leaf.bag]
        column = _column(values, columns)
        if leaf.bag is not None and column in ids:
            part = {ENDS: "ends", SAMPLES: "starts"}.get(leaf.axis, "weights")
            parts[name] = (column, part)
        elif leaf.bag is None and column:
            parts[name] = (column, "values")
        elif _column(leaf, weights):
            parts[name] = (_column(leaf, weights).removesuffix(WEIGHTS), "weights")
        else:
            return None
    return parts


def _column(leaf: Leaf, columns: Collection[str]) -> str:
    """Return the column with the name of a tensor, or ""."""
    last = leaf.path[-1]
    feature = leaf.path[-2] if last == "values" and len(leaf.path) > 2 else last
    for name in (leaf.name, str(last), str(feature)):
        if name in columns:
            return name
    return ""
