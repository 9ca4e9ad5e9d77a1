# SPDX-License-Identifier: Apache-2.0
"""The types of raw columns that a model learned from, which all later data must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotbed.data.arrow_types import Shape, Type
from hotbed.data.columns import require_columns
from hotbed.data.dataset import Dataset
from hotbed.data.encode import Encoder, check_types
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SchemaError
from hotbed.training.trained import TypedModel


def typed(schema: Any, before: Any, encoder: Any) -> Any:
    """Return `schema` with the types of the raw columns that were learned from.

    These are the types that the schema `before` recorded, and those that `encoder` read. The rules
    are those of `before`.
    """
    if not isinstance(schema, Schema):
        return schema
    if isinstance(before, Schema):
        schema = schema.with_rules(before.rules)
    for learned in (before, encoder):
        schema = schema.with_types(getattr(learned, "types", {}), getattr(learned, "shapes", {}))
    return schema


def check_encoder(model: TypedModel, encoder: Encoder) -> None:
    """Raise SchemaError if data have other types than the data that the model learned from.

    Args:
        model: the model. It forgets a refused encoder, from which it learned nothing.
        encoder: of the data. The loop calls this before it uses what the encoder read.
    """
    trained = model.schema
    if encoder is not model.encoder:
        trained = typed(trained, trained, model.encoder)
    if not isinstance(trained, Schema):
        return
    try:
        check_types(trained, encoder.schema, encoder.types, encoder.shapes)
    except SchemaError:
        if encoder is model.encoder:
            model.encoder = None
        raise


def check_validation(data: Any, valid: Any) -> None:
    """Raise SchemaError before the first step if data could not be validated after it.

    Args:
        data: what is learned.
        valid: what is evaluated; its columns and their types are looked at if it is a Dataset.
    """
    if not isinstance(valid, Dataset) or valid.endless:
        return
    try:
        present = valid.source.schema().names
    except DataError:  # reading raises it, too
        return
    try:
        require_columns(valid.encoder.raw_columns(), present)
        if isinstance(data, Dataset) and not data.endless:
            learned = data.schema.with_types(*data.raw_types())
            check_types(learned, valid.schema, *valid.raw_types())
    except SchemaError as error:
        raise SchemaError(f"valid: {error}") from error


def learn_types(
    model: TypedModel, dataset: Dataset, types: Mapping[str, Type], shapes: Mapping[str, Shape]
) -> None:
    """Take over the types of a source before it is read: servers reject others from then on.

    Args:
        model: the model.
        dataset: of the source.
        types: of its raw columns, as `dataset.raw_types` returns them.
        shapes: of these columns.

    Raises:
        SchemaError: the model learned from other types.
    """
    check_types(model.schema, dataset.schema, types, shapes)
    model.schema = model.schema.with_types(types, shapes)
