# SPDX-License-Identifier: Apache-2.0
"""Build the messages of gRPC services from descriptions; describe those of the parameter server.

The messages are registered in a pool of their own. Generated code would have to match the
installed protobuf, and could clash with other stubs in the process. Needs the extra `serve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto


Calls: TypeAlias = Mapping[str, tuple[str, str, bool]]
"""Call of a service -> its request, its answer, and whether the answer is a stream."""


def messages(
    service: str,
    specs: Mapping[str, str],
    calls: Calls,
    enums: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return the classes of messages by name, in a pool that also describes their service.

    Args:
        service: Full name of the service, package first.
        specs: Message -> its fields, separated by `; `. A field is `TYPE name` with optional
            marks: `*` before it for repeated, `%` for a map from strings, `| NAME` after it for
            a member of that oneof, `= N` for its number where that is not its position.
        calls: The calls of the service.
        enums: Enum -> the names of its values, from 0 on.
    """
    package, _, service_name = service.rpartition(".")
    file = descriptor_pb2.FileDescriptorProto(
        name=f"hotbed/{package}.proto", package=package, syntax="proto3"
    )
    for name, values in (enums or {}).items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in specs.items():
        message = file.message_type.add(name=name)
        for position, spec in enumerate(filter(None, fields.split("; ")), 1):
            field, _, own_number = spec.partition(" = ")
            _add_field(package, message, int(own_number or position), field, enums or {})
    descriptor = file.service.add(name=service_name)
    for name, (request, answer, streamed) in calls.items():
        descriptor.method.add(
            name=name,
            input_type=f".{package}.{request}",
            output_type=f".{package}.{answer}",
            server_streaming=streamed,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    types = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(types[name]) for name in specs}


def _add_field(
    package: str, message: Any, number: int, spec: str, enums: Mapping[str, Sequence[str]]
) -> None:
    spec, _, choice = spec.partition(" | ")
    *marks, kind, name = spec.split()
    label = _FIELD.LABEL_REPEATED if marks else _FIELD.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if marks == ["%"]:
        entry = message.nested_type.add(
            name="".join(part.title() for part in name.split("_")) + "Entry"
        )
        entry.options.map_entry = True
        _add_field(package, entry, 1, "string key", enums)
        _add_field(package, entry, 2, f"{kind} value", enums)
        kind = f"{message.name}.{entry.name}"
    if choice:
        if not message.oneof_decl:
            message.oneof_decl.add(name=choice)
        field.oneof_index = 0
    if kind in enums:
        field.type = _FIELD.TYPE_ENUM
        field.type_name = f".{package}.{kind}"
    elif kind[0].isupper():
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"
    else:
        field.type = getattr(_FIELD, f"TYPE_{kind.upper()}")


# --- the parameter server -------------------------------------------------------------------------

SERVICE = "hotbed.ParameterServer"
MESSAGE_BYTES = 64 << 20  # of one message, either way
PART_BYTES = 1 << 20  # of one part of a stream

CALLS: Calls = {
    "Ready": ("Empty", "Readiness", False),
    "Describe": ("DescribeRequest", "Description", False),
    "Graph": ("VersionRequest", "Part", True),
    "Weights": ("VersionRequest", "Part", True),
    "Rows": ("RowsRequest", "Rows", False),
    "Changes": ("ChangesRequest", "Part", True),  # no part: the changes are unknown
    "Hot": ("HotRequest", "Part", True),
}
# Ids and rows are raw little-endian int64 and float32. A version is named by its digest.
MESSAGES = messages(
    SERVICE,
    {
        "Empty": "",
        "Readiness": "bool ready",
        "DescribeRequest": "string model; string known",  # `known`: digest of the client's version
        # `same`: the client's version is the newest; json is empty then
        "Description": "bool same; bytes json",
        "VersionRequest": "string model; string digest",
        "Wanted": "string table; bytes ids",
        "RowsRequest": "string model; string digest; * Wanted wanted",
        "Rows": "* bytes rows",  # float32 [n, dim] for each `wanted`
        "ChangesRequest": "string model; string since; string to",
        "HotRequest": "string model; string table; int64 n",
        "Part": "string name; bytes data",  # parts of one name follow each other
    },
    CALLS,
)
