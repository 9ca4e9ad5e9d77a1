# SPDX-License-Identifier: Apache-2.0
"""Adapt a training file to prepared data: slot sizes, number of dense columns, number of slots."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotbed.errors import ConfigError
from hotbed.files import writing
from hotbed.yaml_files import read_mapping

__all__ = ["adapt_json"]

METADATA = "_metadata.json"


def adapt_json(
    template: str | Path | Mapping[str, Any], prepared: str | Path, output: str | Path | None = None
) -> dict[str, Any]:
    """Return a training file or a graph for data that `hotbed prepare` or NVTabular wrote.

    Three things are edited, as a person edits them for a new data set: `slot_size_array`, of the
    data and of each embedding that has it, `dense_dim`, and `slot_num`. All else is as it was:
    sizes that follow from these, such as `leading_dim` of a `Reshape`, are errors of the network
    where they do not fit.

    Args:
        template: the file, or its values.
        prepared: the folder that has `_metadata.json`, or the output of `hotbed prepare`.
        output: the file to write; None = write nothing.

    Raises:
        ConfigError: the file has several sparse inputs, or the sizes of slots are not known.

    Example: `adapt_json("dlrm.json", "prepared", "dlrm_rees46.json")`
    """
    source = template if isinstance(template, Mapping) else read_mapping(template)
    spec: dict[str, Any] = copy.deepcopy(dict(source))
    metadata = _metadata(Path(prepared))
    slots = [column["col_name"] for column in metadata["cats"]]
    sizes = [_size(metadata, slot, prepared) for slot in slots]
    data, *layers = _layers(spec)
    sparse = data.get("sparse", [])
    if len(sparse) != 1:
        names = [entry.get("top") for entry in sparse]
        raise ConfigError(
            f"layers.0.sparse: cannot be adapted, got {names}. Give a template with one sparse "
            "input: its slots are the categories of the data."
        )
    data["slot_size_array"] = sizes
    data["dense"]["dense_dim"] = len(metadata["conts"])
    sparse[0]["slot_num"] = len(slots)
    for layer in layers:
        hyper = layer.get("sparse_embedding_hparam", {})
        if "slot_size_array" in hyper:
            hyper["slot_size_array"] = sizes
    if output is not None:
        with writing(output):
            Path(output).parent.mkdir(parents=True, exist_ok=True)
            Path(output).write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
    return spec


def _metadata(folder: Path) -> Mapping[str, Any]:
    """Return what the preparation wrote of its columns: in the folder, or in its part `train`."""
    for path in (folder / METADATA, folder / "train" / METADATA):
        if path.exists():
            return read_mapping(path)
    raise ConfigError(
        f"{folder}: there is no {METADATA}, got neither {METADATA} nor train/{METADATA}. Give the "
        "output of a preparation."
    )


def _size(metadata: Mapping[str, Any], slot: str, prepared: str | Path) -> int:
    sizes = metadata.get("sizes", {})
    if slot not in sizes:
        raise ConfigError(
            f"{prepared}: the size of slot {slot!r} is not known, got sizes of "
            f"{', '.join(sizes) or 'no slot'}. Give this column the transform `map`."
        )
    return int(sizes[slot])


def _layers(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    layers = spec.get("layers")
    if not isinstance(layers, list) or not layers or layers[0].get("type") != "Data":
        raise ConfigError(
            "layers: the first layer is not the data, got no layer of type Data. Give a training "
            "file or a graph of HugeCTR."
        )
    return layers
