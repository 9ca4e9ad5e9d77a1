# SPDX-License-Identifier: Apache-2.0
"""The settings of an experiment of FuxiCTR: `Base`, the experiment and its dataset, in one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotbed import config
from hotbed.errors import ConfigError
from hotbed.yaml_files import read_mapping

DATASETS = "dataset_config.yaml"


def recognises(spec: Mapping[str, Any]) -> bool:
    """Return whether values are a `model_config.yaml`, or the settings of one experiment."""
    experiments = [value for value in spec.values() if isinstance(value, Mapping)]
    return any("model" in values and "dataset_id" in values for values in [spec, *experiments])


def settings_of(spec: Mapping[str, Any], path: Path, name: str) -> dict[str, Any]:
    """Return the settings of an experiment, as FuxiCTR joins them.

    Args:
        spec: the file.
        path: of the file; `dataset_config.yaml` is looked for beside it.
        name: of the experiment; "": the only one.

    Raises:
        ConfigError: there is no such experiment or dataset, or none was named of several.
    """
    if "dataset_id" in spec:
        experiment: dict[str, Any] = dict(spec)
    else:
        experiment = _experiment(spec, path, name)
    if "feature_cols" in experiment:
        return experiment
    datasets = path.with_name(DATASETS)
    if not datasets.exists():
        raise ConfigError(
            f"{path}: feature_cols: missing key, got neither it nor {datasets}. Put the file of "
            "datasets beside it."
        )
    by_name = read_mapping(datasets)
    wanted = str(experiment["dataset_id"])
    if wanted not in by_name:
        raise ConfigError(
            f"{datasets}: no dataset {wanted!r}, got {', '.join(by_name)}. "
            f"{config.did_you_mean(wanted, by_name)}"
        )
    return {**by_name[wanted], **experiment}


def _experiment(spec: Mapping[str, Any], path: Path, name: str) -> dict[str, Any]:
    names = [key for key in spec if key != "Base"]
    if not name and len(names) == 1:
        name = names[0]
    if name not in names:
        raise ConfigError(
            f"{path}: no experiment {name!r}, got {', '.join(names)}. Name one: --from "
            f"{path}#{names[0]}."
        )
    return {**spec.get("Base", {}), **spec[name]}
