# SPDX-License-Identifier: Apache-2.0
"""The .proto files in the package are what the servers speak."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.serving.server.endpoints import grpc
from hotbed.serving.stores import messages

PROTOS = ["stores/parameter_server", "server/endpoints/inference"]


@pytest.mark.parametrize("name", PROTOS)
def test_descriptors_are_compiled_from_the_proto_files(name: str, tmp_path: Path) -> None:
    """Where this fails: `make protos`."""
    package = Path(str(importlib.resources.files("hotbed")))
    compiler = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(package.parent)]
    target = f"--descriptor_set_out={tmp_path / 'compiled'}"
    source = str(package / "serving" / f"{name}.proto")
    subprocess.run([*compiler, target, source], check=True)
    theirs = messages.load_service(tmp_path / "compiled")
    ours = messages.load_service(package / "serving" / f"{name}.binpb")
    assert described(ours) == described(theirs)


def described(service: messages.ServiceTypes) -> tuple[object, ...]:
    fields = [
        (name, field.name, field.number, field.type, field.is_repeated)
        for name, message in service.messages.items()
        for field in message.DESCRIPTOR.fields
    ]
    return service.name, service.calls, fields, list(service.messages)


def test_parameter_server_bytes_are_those_of_the_first_release() -> None:
    ours = messages.MESSAGES
    wanted = [ours["Wanted"](table="user", ids=b"\1\0\0\0\0\0\0\0")]
    request = ours["RowsRequest"](model="m", digest="d", wanted=wanted)
    assert request.SerializeToString() == b"\n\1m\x12\1d\x1a\x10\n\4user\x12\x08\1" + bytes(7)
    answer = ours["Rows"](rows=[b"row"])
    assert answer.SerializeToString() == b"\n\3row"
    part = ours["Part"](name="user", data=b"ids")
    assert part.SerializeToString() == b"\n\4user\x12\3ids"
    assert messages.SERVICE == "hotbed.ParameterServer"
    assert messages.CALLS["Rows"] == ("RowsRequest", "Rows", False)
    assert messages.CALLS["Changes"] == ("ChangesRequest", "Part", True)


def test_inference_service_is_that_of_the_open_protocol() -> None:
    assert grpc.SERVICE == "inference.GRPCInferenceService"
    assert grpc.MESSAGES["ModelInferRequest"](model_name="m").SerializeToString() == b"\n\1m"
