# SPDX-License-Identifier: Apache-2.0
"""What deploy/ says is what the command line, the server and KServe take."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hotbed.cli import commands as cli
from hotbed.serving.server.options import Options, ServerLimits

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
# Fields that are used here, as KServe's and Kubernetes' references have them (KServe 0.16:
# ServingRuntime v1alpha1, InferenceService v1beta1): a slip of the pen would be dropped by a server
# in silence. None: any value.
PROBE = {
    "httpGet": {"path": str, "port": int},
    "periodSeconds": int,
    "failureThreshold": int,
    "timeoutSeconds": int,
}
CONTAINER: dict[str, Any] = {
    "name": str,
    "image": str,
    "args": [str],
    "ports": [{"name": str, "containerPort": int, "protocol": str}],
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "resources": {"requests": {"cpu": str, "memory": str}, "limits": {"cpu": str, "memory": str}},
    "securityContext": {
        "runAsNonRoot": bool,
        "runAsUser": int,
        "readOnlyRootFilesystem": bool,
        "allowPrivilegeEscalation": bool,
        "capabilities": {"drop": [str]},
    },
    "volumeMounts": [{"name": str, "mountPath": str}],
}
FORMAT = {"name": str, "version": str, "autoSelect": bool}
KNOWN: dict[str, dict[str, Any]] = {
    "serving.kserve.io/v1alpha1 ServingRuntime": {
        "annotations": None,
        "supportedModelFormats": [FORMAT],
        "protocolVersions": [str],
        "containers": [CONTAINER],
        "volumes": [{"name": str, "emptyDir": {"sizeLimit": str}}],
    },
    "serving.kserve.io/v1beta1 InferenceService": {
        "predictor": {
            "minReplicas": int,
            "maxReplicas": int,
            "terminationGracePeriodSeconds": int,
            "model": {
                "runtime": str,
                "modelFormat": FORMAT,
                "protocolVersion": str,
                "storageUri": str,
            },
        }
    },
}


@pytest.fixture(scope="module")
def kserve() -> dict[str, Any]:
    found = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kserve.yaml").read_text())}
    assert set(found) == {"ServingRuntime", "InferenceService"}
    return found


def unknown(value: Any, known: Any, path: str) -> list[str]:
    """Places in `value` that `known` does not have."""
    if known is None:
        return []
    if isinstance(known, Mapping):
        if not isinstance(value, Mapping):
            return [path]
        missing = [f"{path}.{key}" for key in value if key not in known]
        return missing + [
            one
            for key in value
            if key in known
            for one in unknown(value[key], known[key], f"{path}.{key}")
        ]
    if isinstance(known, list):
        if not isinstance(value, list):
            return [path]
        return [one for item in value for one in unknown(item, known[0], path)]
    return [] if type(value) is known else [path]


def check_serve(arguments: list[str]) -> dict[str, Any]:
    """What `hotbed serve` makes of its arguments; every key that is set must be one of the
    server's.
    """
    command = typer.main.get_command(cli.app).commands["serve"]
    parsed: dict[str, Any] = command.make_context("serve", list(arguments)).params
    keys = {one.name for kind in (Options, ServerLimits) for one in fields(kind)}
    assert {assignment.partition("=")[0] for assignment in parsed["assignments"] or ()} <= keys
    return parsed


def test_every_field_is_one_that_kserve_has(kserve: Mapping[str, Any]) -> None:
    for document in kserve.values():
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        assert (
            unknown(document["spec"], KNOWN[f"{document['apiVersion']} {document['kind']}"], "spec")
            == []
        )
    assert unknown(
        {"model": {"storageURI": "x", "runtime": 1}},
        KNOWN["serving.kserve.io/v1beta1 InferenceService"]["predictor"],
        "",
    ) == [".model.storageURI", ".model.runtime"]


def test_the_service_and_its_runtime_fit_together(kserve: Mapping[str, Any]) -> None:
    runtime, service = (
        kserve["ServingRuntime"],
        kserve["InferenceService"]["spec"]["predictor"]["model"],
    )
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"  # KServe mounts storageUri there
    assert service["runtime"] == runtime["metadata"]["name"]
    assert service["protocolVersion"] in runtime["spec"]["protocolVersions"]
    offered = [(one["name"], one["version"]) for one in runtime["spec"]["supportedModelFormats"]]
    assert (service["modelFormat"]["name"], service["modelFormat"]["version"]) in offered
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in runtime["spec"]["volumes"]
    }
    drain = next(one for one in container["args"] if "drain_seconds" in one).rpartition("=")[2]
    grace = kserve["InferenceService"]["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert float(drain) + 30 < grace  # so long what is under way may take


def test_the_server_has_the_arguments_and_routes_that_kserve_uses(
    kserve: Mapping[str, Any],
) -> None:
    (container,) = kserve["ServingRuntime"]["spec"]["containers"]
    parsed = check_serve([one.replace("{{.Name}}", "ranker") for one in container["args"]])
    assert parsed["models"] == ["ranker=/mnt/models"]
    assert parsed["watch"] == parsed["models"]
    ports = [one["containerPort"] for one in container["ports"]]
    assert [parsed["http_port"], parsed["grpc_port"]] == ports
    routes = json.loads((ROOT / "docs/openapi.json").read_text())["paths"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in routes
        assert asked["port"] == parsed["http_port"]
    annotations = kserve["ServingRuntime"]["spec"]["annotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    assert annotations["prometheus.io/port"] == str(parsed["http_port"])


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines]


def test_the_image_is_built_of_existing_files_and_starts_the_server(
    kserve: Mapping[str, Any],
) -> None:
    steps = instructions()
    names = [name for name, _ in steps]
    assert names.count("FROM") == 2  # compilers stay behind
    assert not [name for name in names if name == "ADD"]
    assert not [
        text for name, text in steps if name == "FROM" and (":" not in text or "latest" in text)
    ]
    for name, text in steps:
        if name == "COPY" and "--from" not in text:
            *sources, _ = shlex.split(text)
            assert all((ROOT / source).exists() for source in sources), text
    found = dict(steps)
    assert json.loads(found["ENTRYPOINT"]) == ["hotbed", "serve"]
    parsed = check_serve(json.loads(found["CMD"]))
    assert [str(parsed["http_port"]), str(parsed["grpc_port"])] == found["EXPOSE"].split()
    assert found["HEALTHCHECK"].count(f":{parsed['http_port']}/v2/health/live")
    (container,) = kserve["ServingRuntime"]["spec"]["containers"]
    assert int(found["USER"]) == container["securityContext"]["runAsUser"] > 0
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}")
    if hadolint is None:  # there is none for this machine; the checks above are what is left
        return
    done = subprocess.run(
        [hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
