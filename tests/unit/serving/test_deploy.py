# SPDX-License-Identifier: Apache-2.0
"""What deploy/ says is what the command line, the server, KServe, Kubernetes and systemd take."""

from __future__ import annotations

import configparser
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import hotbed as hb
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
    "env": [{"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}],
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
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}
VOLUME = {
    "name": str,
    "emptyDir": {"sizeLimit": str},
    "configMap": {"name": str},
    "persistentVolumeClaim": {"claimName": str},
}
POD = {
    "terminationGracePeriodSeconds": int,
    "securityContext": {"fsGroup": int},
    "containers": [CONTAINER],
    "volumes": [VOLUME],
}
FORMAT = {"name": str, "version": str, "autoSelect": bool}
KNOWN: dict[str, dict[str, Any]] = {
    "serving.kserve.io/v1alpha1 ServingRuntime": {
        "annotations": None,
        "supportedModelFormats": [FORMAT],
        "protocolVersions": [str],
        "containers": [CONTAINER],
        "volumes": [VOLUME],
    },
    "apps/v1 Deployment": {
        "replicas": int,
        "strategy": {"type": str},
        "selector": {"matchLabels": {"app": str}},
        "template": {"metadata": {"labels": {"app": str}, "annotations": None}, "spec": POD},
    },
    "v1 Service": {
        "selector": {"app": str},
        "ports": [{"name": str, "port": int, "targetPort": int, "protocol": str}],
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


def documents(name: str) -> dict[str, Any]:
    """The documents of a file of manifests, by kind and name."""
    every = yaml.safe_load_all((DEPLOY / name).read_text())
    return {f"{document['kind']} {document['metadata']['name']}": document for document in every}


@pytest.fixture(scope="module")
def kserve() -> dict[str, Any]:
    found = documents("kserve.yaml")
    assert set(found) == {"ServingRuntime hotbed", "InferenceService ranker"}
    return {name.split()[0]: document for name, document in found.items()}


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, Any]:
    found = documents("kubernetes.yaml")
    names = {"Deployment hotbed-online", "Deployment hotbed-serve", "Service hotbed-serve"}
    assert set(found) == names
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


def parsed_by(verb: str, arguments: list[str]) -> dict[str, Any]:
    """What a command makes of its arguments."""
    command = typer.main.get_command(cli.app).commands[verb]
    parsed: dict[str, Any] = command.make_context(verb, list(arguments)).params
    return parsed


def check_serve(arguments: list[str]) -> dict[str, Any]:
    """What `hotbed serve` makes of its arguments; every key that is set must be one of the
    server's.
    """
    parsed = parsed_by("serve", arguments)
    keys = {one.name for kind in (Options, ServerLimits) for one in fields(kind)}
    assert {assignment.partition("=")[0] for assignment in parsed["assignments"] or ()} <= keys
    return parsed


def test_every_field_is_one_that_kserve_or_kubernetes_has(
    kserve: Mapping[str, Any], kubernetes: Mapping[str, Any]
) -> None:
    for document in [*kserve.values(), *kubernetes.values()]:
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


def pod_of(deployment: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a Deployment and its container, whose mounts are the pod's volumes."""
    spec = deployment["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    return pod, container


def test_the_deployments_of_kubernetes_start_a_trainer_and_servers(
    kubernetes: Mapping[str, Any], kserve: Mapping[str, Any]
) -> None:
    trainer = kubernetes["Deployment hotbed-online"]
    pod, container = pod_of(trainer)
    assert trainer["spec"]["replicas"] == 1
    assert trainer["spec"]["strategy"] == {"type": "Recreate"}  # states have one writer
    verb, *arguments = container["args"]
    assert parsed_by(verb, arguments)["job_file"] == Path("/job/job.yaml")
    assert pod["securityContext"]["fsGroup"] == container["securityContext"]["runAsUser"]
    (port,) = container["ports"]
    default = inspect.signature(hb.callbacks.Prometheus).parameters["port"].default
    annotations = trainer["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"]) == str(default)
    pod, container = pod_of(kubernetes["Deployment hotbed-serve"])
    parsed = check_serve(container["args"])
    assert parsed["models"] == parsed["watch"] == ["clicks=/models/published"]
    assert [parsed["http_port"], parsed["grpc_port"]] == [
        port["containerPort"] for port in container["ports"]
    ]
    (of_kserve,) = kserve["ServingRuntime"]["spec"]["containers"]
    for same in ("startupProbe", "readinessProbe", "livenessProbe", "securityContext"):
        assert container[same] == of_kserve[same]
    assert pod["terminationGracePeriodSeconds"] > 10 + 30
    assert "drain_seconds=10" in parsed["assignments"]
    service = kubernetes["Service hotbed-serve"]["spec"]
    assert service["selector"] == {"app": "hotbed-serve"}
    assert [port["targetPort"] for port in service["ports"]] == [8080, 9000]


def units() -> dict[str, configparser.ConfigParser]:
    """The units of systemd, by the verb that they start."""
    found = {}
    for path in sorted(DEPLOY.glob("*.service")):
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(path)
        found[path.stem.removeprefix("hotbed-")] = unit
    return found


def test_the_units_of_systemd_start_commands_that_there_are(tmp_path: Path) -> None:
    started = units()
    assert set(started) == {"online", "serve"}
    for name, unit in started.items():
        program, verb, *arguments = shlex.split(unit["Service"]["ExecStart"])
        assert (Path(program).name, verb) == ("hotbed", name)
        if name == "serve":
            parsed = check_serve(arguments)
            assert "rows=/var/lib/hotbed/rows" in parsed["assignments"]
            assert int(unit["Service"]["TimeoutStopSec"]) > 10 + 30
        else:
            assert parsed_by(verb, arguments)["job_file"] == Path("job.yaml")
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    paths = []
    for path in DEPLOY.glob("*.service"):
        paths.append(tmp_path / path.name)
        text = path.read_text().replace("/opt/hotbed/bin/hotbed", sys.executable)
        paths[-1].write_text(text)
    done = subprocess.run(
        [analyze, "verify", "--man=no", *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of the Dockerfile, by stage."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    found: dict[str, list[tuple[str, str]]] = {}
    stage = ""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            if name == "FROM":
                stage = rest.rpartition(" AS ")[2]
            found.setdefault(stage, []).append((name, rest.strip()))
    return found


def test_the_images_are_built_of_existing_files_and_leave_compilers_behind() -> None:
    every = stages()
    assert list(every)[-1] == "serve"  # the one that is built without --target
    bases = [steps[0][1].split()[0] for steps in every.values() if steps[0][0] == "FROM"]
    assert {base for base in bases if base not in every} == {"python:${PYTHON}-slim-bookworm"}
    for steps in every.values():
        for name, text in steps:
            assert name != "ADD"
            if name == "COPY" and "--from" not in text:
                *sources, _ = shlex.split(text)
                assert all((ROOT / source).exists() for source in sources), text
    for stage in ("train", "serve"):
        names = [name for name, _ in every[stage]]
        assert names.index("USER") < names.index("ENTRYPOINT")
        assert "apt-get" not in str(every[stage])


def test_the_images_start_the_server_and_the_trainer(
    kserve: Mapping[str, Any], kubernetes: Mapping[str, Any]
) -> None:
    server = dict(stages()["serve"])
    assert json.loads(server["ENTRYPOINT"]) == ["hotbed", "serve"]
    parsed = check_serve(json.loads(server["CMD"]))
    assert [str(parsed["http_port"]), str(parsed["grpc_port"])] == server["EXPOSE"].split()
    assert server["HEALTHCHECK"].count(f":{parsed['http_port']}/v2/health/live")
    (container,) = kserve["ServingRuntime"]["spec"]["containers"]
    assert int(server["USER"]) == container["securityContext"]["runAsUser"] > 0
    trainer = dict(stages()["train"])
    _, container = pod_of(kubernetes["Deployment hotbed-online"])
    assert json.loads(trainer["ENTRYPOINT"]) == ["hotbed"]
    assert json.loads(trainer["CMD"]) == container["args"]
    assert int(trainer["USER"]) == container["securityContext"]["runAsUser"]
    assert trainer["EXPOSE"] == str(container["ports"][0]["containerPort"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = re.findall(r"hotbed\[([\w,]+)\]", str(stages()))
    assert {extra for names in installed for extra in names.split(",")} <= set(extras)


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}")
    if hadolint is None:  # there is none for this machine; the checks above are what is left
        return
    done = subprocess.run(
        [hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
