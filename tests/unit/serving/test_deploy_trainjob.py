# SPDX-License-Identifier: Apache-2.0
"""What deploy/trainjob.yaml says is what Kubeflow Trainer and torchrun take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

FILE = Path(__file__).resolve().parents[3] / "deploy/trainjob.yaml"
# Fields that are used, as the reference of Kubeflow Trainer 2.3 has them.
KNOWN = {
    "TrainingRuntime": """
mlPolicy.numNodes mlPolicy.torch template.spec.failurePolicy.maxRestarts
template.spec.replicatedJobs.name
template.spec.replicatedJobs.template.metadata.labels
template.spec.replicatedJobs.template.spec.backoffLimit
""",
    "TrainJob": """
runtimeRef.apiGroup runtimeRef.kind runtimeRef.name trainer.numNodes trainer.command
trainer.resourcesPerNode.requests.cpu trainer.resourcesPerNode.requests.memory
trainer.resourcesPerNode.limits.cpu trainer.resourcesPerNode.limits.memory
""",
}
POD = "template.spec.replicatedJobs.template.spec.template.spec."
POD_FIELDS = """
restartPolicy containers.name containers.image containers.env.name containers.env.value
containers.volumeMounts.name containers.volumeMounts.mountPath
volumes.name volumes.configMap.name volumes.persistentVolumeClaim.claimName
"""


def leaves(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict) and value and not path.endswith(".labels"):
        return {one for key in value for one in leaves(value[key], f"{path}.{key}".strip("."))}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {one for item in value for one in leaves(item, path)}
    return {path}


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text())}


def test_every_field_is_one_that_the_trainer_has(documents: dict[str, Any]) -> None:
    assert set(documents) == set(KNOWN)
    for kind, document in documents.items():
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        known = set(KNOWN[kind].split()) | {POD + one for one in POD_FIELDS.split()}
        assert leaves(document["spec"]) <= known


def test_torchrun_starts_the_job_that_is_mounted(documents: dict[str, Any]) -> None:
    trainer = documents["TrainJob"]["spec"]["trainer"]
    program, *arguments = trainer["command"]
    parsed = get_args_parser().parse_args(arguments)
    assert program == "torchrun"
    assert parsed.module
    assert parsed.training_script == "hotbed.cli"
    assert parsed.training_script_args == ["online", "/job/job.yaml"]
    assert parsed.nproc_per_node == trainer["resourcesPerNode"]["limits"]["cpu"]
    runtime = documents["TrainingRuntime"]
    assert documents["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["name"] == container["name"] == "node"
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert set(mounts) == {one["name"] for one in pod["volumes"]}
    assert mounts["job"] == "/job"
