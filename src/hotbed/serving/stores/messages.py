# SPDX-License-Identifier: Apache-2.0
"""Load the messages of gRPC services; those of the parameter server. Needs the extra `serve`.

A service is a .proto file and the descriptor set that `make protos` compiled from it. Its messages
are registered in a pool of their own: generated code would have to match the installed protobuf,
and could clash with other stubs in the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


class CallTypes(NamedTuple):
    """The messages of a call.

    Attributes:
        request: name of the request.
        answer: name of the answer, or of each of its parts.
        is_streamed: whether the answer is a stream of parts.
    """

    request: str
    answer: str
    is_streamed: bool


@dataclass(frozen=True)
class ServiceTypes:
    """The messages and calls of a gRPC service.

    Attributes:
        name: full name of the service, package first.
        messages: the class of each message by name.
        calls: the calls by name, in the order of the .proto file.
    """

    name: str
    messages: Mapping[str, Any]
    calls: Mapping[str, CallTypes]


def load_service(path: Path) -> ServiceTypes:
    """Load the service of a descriptor set, which holds one .proto file with one service."""
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file
    (service,) = file.service
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    types = pool.FindFileByName(file.name).message_types_by_name
    messages = {name: message_factory.GetMessageClass(types[name]) for name in types}
    calls = {}
    for method in service.method:
        request = method.input_type.rpartition(".")[2]
        answer = method.output_type.rpartition(".")[2]
        calls[method.name] = CallTypes(request, answer, method.server_streaming)
    return ServiceTypes(f"{file.package}.{service.name}", messages, calls)


# --- the parameter server -------------------------------------------------------------------------

_PARAMETER_SERVER = load_service(Path(__file__).with_name("parameter_server.binpb"))
SERVICE = _PARAMETER_SERVER.name
MESSAGES = _PARAMETER_SERVER.messages
CALLS = _PARAMETER_SERVER.calls
MESSAGE_BYTES = 64 << 20  # of one message, either way
PART_BYTES = 1 << 20  # of one part of a stream
