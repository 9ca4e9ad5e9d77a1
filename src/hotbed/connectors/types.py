# SPDX-License-Identifier: Apache-2.0
"""How two Arrow types of one column meet: the rules that every source uses.

A type widens to another one if each of its values is a value of the other one: narrow whole numbers
and floats to wider ones, times to a finer unit, decimals to more digits, null to anything, and the
encodings of text and lists (dictionaries, large ones, views, fixed sizes) to the plain ones; the
same inside lists and structs. Any other two types do not meet. `docs/connectors.md` has the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.errors import ConfigError, SchemaError

Numbers = Mapping[str, pa.DataType]
"""Columns that are read only as numbers, each with the type to read it as."""

_PLAIN = {
    pa.large_string().id: pa.string(),
    pa.string_view().id: pa.string(),
    pa.large_binary().id: pa.binary(),
    pa.binary_view().id: pa.binary(),
    pa.binary(1).id: pa.binary(),
}
_LISTS = {
    pa.list_(pa.null()).id,
    pa.large_list(pa.null()).id,
    pa.list_(pa.null(), 1).id,
    pa.list_view(pa.null()).id,
    pa.large_list_view(pa.null()).id,
}
_COMMON = {
    pa.null().id,
    pa.bool_().id,
    pa.int8().id,
    pa.int16().id,
    pa.int32().id,
    pa.int64().id,
    pa.uint8().id,
    pa.uint16().id,
    pa.uint32().id,
    pa.uint64().id,
    pa.float32().id,
    pa.float64().id,
    pa.string().id,
    pa.large_string().id,
    pa.binary().id,
}
_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNITS = ("s", "ms", "us", "ns")
_MOST_DIGITS = 38

_DECLARED: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float64": pa.float64(),
    "float32": pa.float32(),
    "string": pa.string(),
    "bool": pa.bool_(),
}


def declared(where: str, text: str, *, lists: bool = False) -> pa.DataType:
    """Return the Arrow type that a user wrote as `text`, such as "uint64" or "list<int64>".

    Raises:
        ConfigError: there is no such type.
    """
    inner = text
    if lists and text.startswith("list<") and text.endswith(">"):
        inner = text[len("list<") : -1]
    if inner not in _DECLARED:
        names = ", ".join(_DECLARED)
        more = ", or list<one of them>" if lists else ""
        raise ConfigError(f"{where}: unknown type, got {text!r}. Use one of {names}{more}.")
    if inner == text:
        return _DECLARED[inner]
    return pa.list_(_DECLARED[inner])


# --- types ----------------------------------------------------------------------------------------


def plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without encodings: of a dictionary its values, text and lists not large."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if is_list(kind):
        return pa.list_(plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, plain(field.type)) for field in kind])
    return _PLAIN.get(kind.id, kind)


def plain_types(schema: pa.Schema) -> pa.Schema:
    """Return the columns of `schema` with types without encodings."""
    return pa.schema([(column.name, plain(column.type)) for column in schema])


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list of any encoding."""
    return kind.id in _LISTS


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return True
    return bool(pa.types.is_string_view(kind))


def is_text_or_bytes(kind: pa.DataType) -> bool:
    """Return whether a type is text or bytes, in a plain encoding."""
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is of whole numbers or floats."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_open(kind: pa.DataType) -> bool:
    """Return whether only nulls or empty lists were seen, so that the type is not known yet."""
    if is_list(kind):
        return is_open(kind.value_type)
    return bool(pa.types.is_null(kind))


def joined(
    kind: pa.DataType, other: pa.DataType, *, mixed_numbers: bool = False
) -> pa.DataType | None:
    """Return the narrowest type that both types widen to; None if they have no such type.

    `mixed_numbers`: whole numbers and floats meet in float64. `conform` then checks each value.
    """
    if kind.equals(other) or pa.types.is_null(other):
        return kind
    if pa.types.is_null(kind):
        return other
    first = plain(kind)
    second = plain(other)
    if first.equals(second):
        return first
    if is_list(first) and is_list(second):
        item = joined(first.value_type, second.value_type, mixed_numbers=mixed_numbers)
        return None if item is None else pa.list_(item)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return _joined_structs(first, second, mixed_numbers)
    if pa.types.is_integer(first) and pa.types.is_integer(second):
        return _joined_integers(first, second)
    if pa.types.is_floating(first) and pa.types.is_floating(second):
        return max(first, second, key=lambda candidate: candidate.bit_width)
    if mixed_numbers and is_number(first) and is_number(second):
        return pa.float64()
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second):
        return _joined_times(first, second)
    if pa.types.is_decimal(first) and pa.types.is_decimal(second):
        return _joined_decimals(first, second)
    return None


def _joined_structs(
    first: pa.StructType, second: pa.StructType, mixed_numbers: bool
) -> pa.DataType | None:
    if [field.name for field in first] != [field.name for field in second]:
        return None
    fields: list[tuple[str, pa.DataType]] = []
    for column, other in zip(first, second, strict=True):
        kind = joined(column.type, other.type, mixed_numbers=mixed_numbers)
        if kind is None:
            return None
        fields.append((column.name, kind))
    return pa.struct(fields)


def _joined_integers(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    is_signed = [pa.types.is_signed_integer(kind) for kind in (first, second)]
    if is_signed[0] == is_signed[1]:
        return max(first, second, key=lambda kind: kind.bit_width)
    signed, unsigned = (first, second) if is_signed[0] else (second, first)
    for kind in _SIGNED:
        if kind.bit_width >= signed.bit_width and kind.bit_width > unsigned.bit_width:
            return kind
    return None  # nothing holds both int64 and uint64


def _joined_times(first: pa.TimestampType, second: pa.TimestampType) -> pa.DataType | None:
    if (first.tz is None) != (second.tz is None):
        return None
    unit = max(first.unit, second.unit, key=_UNITS.index)
    return pa.timestamp(unit, first.tz)  # with any zone the values are times in UTC


def _joined_decimals(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    scale = max(first.scale, second.scale)
    whole = max(first.precision - first.scale, second.precision - second.scale)
    if whole + scale > _MOST_DIGITS:
        return None
    return pa.decimal128(whole + scale, scale)


def widens(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether each value of `kind` is a value of `wanted`, in whatever encoding."""
    both = joined(kind, wanted)
    return both is not None and plain(both).equals(plain(wanted))


def with_numbers(kind: pa.DataType, number: pa.DataType) -> pa.DataType:
    """Return `kind` with the type `number` in place of its numbers, also inside lists."""
    if is_list(kind):
        return pa.list_(with_numbers(kind.value_type, number))
    if is_number(kind):
        return number
    return kind


def completed(schema: pa.Schema, later: pa.Schema) -> pa.Schema:
    """Return `schema` with the types that it left open taken from a `later` part of the source."""
    columns: list[pa.Field] = []
    for column in schema:
        index = later.get_field_index(column.name)
        if is_open(column.type) and index >= 0:
            both = joined(column.type, later.field(index).type)
            column = column.with_type(both or column.type)
        columns.append(column)
    return pa.schema(columns)


def opened(schema: pa.Schema, inferred: pa.Schema) -> pa.Schema:
    """Return `schema` with the types of those columns that `inferred` leaves open."""
    columns: list[pa.Field] = []
    for column in schema:
        index = inferred.get_field_index(column.name)
        if index >= 0 and is_open(inferred.field(index).type):
            column = column.with_type(inferred.field(index).type)
        columns.append(column)
    return pa.schema(columns)


def with_open(schema: pa.Schema, kind: pa.DataType) -> pa.Schema:
    """Return `schema` with `kind` in the place of types that are not known."""
    columns = [column.with_type(_with_open(column.type, kind)) for column in schema]
    return pa.schema(columns)


def _with_open(kind: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    if not is_open(kind):
        return kind
    if is_list(kind):
        return pa.list_(_with_open(kind.value_type, wanted))
    return wanted


def with_columns_of(schema: pa.Schema, later: pa.Schema) -> pa.Schema:
    """Return `schema` with the columns of a `later` part that it lacks."""
    new = [column for column in later if column.name not in schema.names]
    return pa.schema([*schema, *new])


def has_open(schema: pa.Schema) -> bool:
    """Return whether the type of a column is not known yet."""
    return any(is_open(kind) for kind in schema.types)


def types_of(rows: pa.RecordBatch | pa.Table) -> pa.Schema:
    """Return the columns of some rows; the type is null where all values are."""
    columns: list[pa.Field] = []
    for place, column in enumerate(usual_types(rows.schema)):
        if rows.column(place).null_count == rows.num_rows:
            column = column.with_type(pa.null())
        columns.append(column)
    return pa.schema(columns)


def widened(schema: pa.Schema, later: pa.Schema) -> pa.Schema:
    """Return `schema` with types that hold the values of a `later` part of the source, too.

    Whole numbers and floats meet in float64. A column whose types do not meet keeps its first type:
    it is an error only where it is read.
    """
    columns: list[pa.Field] = []
    for column in schema:
        index = later.get_field_index(column.name)
        if index >= 0:
            kind = later.field(index).type
            both = joined(column.type, kind, mixed_numbers=True)
            column = column.with_type(both or column.type)
        columns.append(column)
    return pa.schema(columns)


# --- values ---------------------------------------------------------------------------------------


def conform(values: pa.Array, wanted: pa.DataType, where: str, column: str) -> pa.Array:
    """Return the values of a column as the type that the column has everywhere.

    Args:
        values: the values; a column of nulls may be of any type.
        wanted: the type that the column has in the parts before, or in all of them.
        where: the file or source, for messages.
        column: the name, for messages.

    Raises:
        SchemaError: the type of `values` does not widen to `wanted`.
    """
    kind = values.type
    if kind.equals(wanted):
        return values
    if values.null_count == len(values):
        return pa.nulls(len(values), wanted)
    is_exact = joined(kind, wanted, mixed_numbers=True)
    if widens(kind, wanted) or (is_exact is not None and plain(is_exact).equals(wanted)):
        try:
            return recast(values, wanted)
        except (pa.ArrowException, ValueError) as error:
            cause = str(error).splitlines()[0].rstrip(".")
            raise type_error(where, column, kind, wanted, f" ({cause})") from error
    raise type_error(where, column, kind, wanted)


def type_error(
    where: str, column: str, kind: pa.DataType, wanted: pa.DataType, cause: str = ""
) -> SchemaError:
    """Return the error that a column is of type `kind`, which does not widen to `wanted`."""
    return SchemaError(
        f"{where}: column {column!r} must be {wanted}, as in the rest of the data, got {kind}"
        f"{cause}. Write the column with one type, or declare its type where the source takes one."
    )


def with_open_as_null(rows: pa.RecordBatch, types: pa.Schema) -> pa.RecordBatch:
    """Return `rows` with the type null for columns of nulls whose type is not known yet."""
    columns: dict[str, pa.Array] = {}
    for name, values in zip(rows.schema.names, rows.columns, strict=True):
        index = types.get_field_index(name)
        is_null = index >= 0 and pa.types.is_null(types.field(index).type)
        columns[name] = pa.nulls(len(values)) if is_null else values
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def recast(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return `values` as a type that they widen to, in its encoding.

    Raises:
        ArrowException: a value is not one of `wanted`, such as a time that a finer unit cannot
            hold.
    """
    kind = values.type
    if kind.equals(wanted):
        return values
    if isinstance(values, pa.ExtensionArray):
        return recast(values.storage, wanted)
    if pa.types.is_run_end_encoded(kind):
        return recast(pc.run_end_decode(values), wanted)
    if pa.types.is_dictionary(wanted):
        return _as_dictionary(values, wanted)
    if pa.types.is_dictionary(kind):
        words = recast(values.dictionary, wanted)
        return words.take(values.indices)
    if is_list(kind) and is_list(wanted):
        return _as_lists(values, wanted)
    if pa.types.is_struct(kind) and pa.types.is_struct(wanted):
        parts = [
            recast(part, field.type) for part, field in zip(values.flatten(), wanted, strict=True)
        ]
        return pa.StructArray.from_arrays(parts, fields=list(wanted), mask=values.is_null())
    return values.cast(wanted)


def _as_dictionary(values: pa.Array, wanted: pa.DictionaryType) -> pa.DictionaryArray:
    if not pa.types.is_dictionary(values.type):
        values = recast(values, wanted.value_type).dictionary_encode()
    words = recast(values.dictionary, wanted.value_type)
    indices = values.indices.cast(wanted.index_type)
    return pa.DictionaryArray.from_arrays(indices, words, ordered=wanted.ordered)


def _as_lists(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    items = recast(values.flatten(), wanted.value_type)
    missing = values.is_null() if values.null_count else None
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), items, mask=missing)
    return lists.cast(wanted)


def present_keys(values: pa.Array) -> pa.Array:
    """Return the values of a key column without encodings, null for empty text and NaN.

    These are missing, and a missing key is equal to no other. -0.0 becomes 0.0, which it equals.
    """
    kind = plain(values.type)
    values = recast(values, kind)
    if is_text_or_bytes(kind):
        is_missing = pc.equal(pc.binary_length(values), 0)
    elif pa.types.is_floating(kind):
        values = pc.add(values.cast(pa.float64()), 0.0).cast(kind)
        is_missing = pc.is_nan(values.cast(pa.float64()))
    else:
        return values
    if not pc.any(is_missing).as_py():
        return values
    return pc.if_else(is_missing, pa.scalar(None, kind), values)


def usual(kind: pa.DataType) -> pa.DataType:
    """Return the type in an encoding that all functions of Arrow take, `kind` itself where it is.

    Views and half floats are not taken everywhere, nor are dictionaries inside lists.
    """
    if kind.id in _COMMON:
        return kind
    if isinstance(kind, pa.BaseExtensionType):
        return usual(kind.storage_type)
    if pa.types.is_run_end_encoded(kind):
        return usual(kind.value_type)
    if pa.types.is_dictionary(kind):
        words = usual(kind.value_type)
        if words.equals(kind.value_type):
            return kind
        return pa.dictionary(kind.index_type, words, kind.ordered)
    if is_list(kind):
        return _usual_list(kind)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _usual_item(field.type)) for field in kind])
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return kind


def _usual_item(kind: pa.DataType) -> pa.DataType:
    item = usual(kind)
    if pa.types.is_dictionary(item):
        return item.value_type
    return item


def _usual_list(kind: pa.DataType) -> pa.DataType:
    item = _usual_item(kind.value_type)
    is_view = kind.id in (pa.list_view(pa.null()).id, pa.large_list_view(pa.null()).id)
    if item.equals(kind.value_type) and not is_view:
        return kind
    return pa.large_list(item)


def usual_types(schema: pa.Schema) -> pa.Schema:
    """Return the columns of `schema` in encodings that all functions of Arrow take."""
    columns = [column.with_type(usual(column.type)) for column in schema.remove_metadata()]
    return pa.schema(columns)


def usual_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return `rows` with each column in an encoding that all functions of Arrow take."""
    if all(kind.id in _COMMON for kind in rows.schema.types):  # the common case is short
        return rows
    wanted = usual_types(rows.schema)
    columns = [
        recast(values, kind) for values, kind in zip(rows.columns, wanted.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=wanted.names)


def conform_all(
    batch: pa.RecordBatch, wanted: pa.Schema, where: str, numbers: Numbers
) -> pa.RecordBatch:
    """Return `batch` with exactly the columns of `wanted`, each of its type there.

    A column of `numbers` is only read as numbers: where its numbers do not widen to the type in
    `wanted`, they become the type in `numbers`.

    Raises:
        SchemaError: a column is absent, or its type does not widen.
    """
    if batch.schema.equals(wanted):
        return batch
    missing = [name for name in wanted.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"{where}: columns {missing} are absent, got {batch.schema.names}. Give all files the "
            f"columns of the first: {wanted.names}."
        )
    columns: dict[str, pa.Array] = {}
    for column in wanted:
        values = batch.column(column.name)
        kind = column.type
        number = numbers.get(column.name)
        if number is not None and not widens(values.type, kind):
            kind = _number_type(values.type, kind, number)
        columns[column.name] = conform(values, kind, where, column.name)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _number_type(kind: pa.DataType, wanted: pa.DataType, number: pa.DataType) -> pa.DataType:
    """Return the type for numbers that do not widen to `wanted`, or `wanted` for other values."""
    if joined(kind, wanted, mixed_numbers=True) is None:
        return wanted
    return with_numbers(plain(wanted), number)
