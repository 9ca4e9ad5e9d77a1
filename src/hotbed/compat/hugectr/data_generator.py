# SPDX-License-Identifier: Apache-2.0
"""The `data_generator` of v2.3 to v3.1: `python -m hotbed.compat.hugectr.data_generator --help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hotbed.compat.hugectr.enums import Distribution_t, PowerLaw_t
from hotbed.compat.hugectr.json.inference import read_json
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.tools import DataGenerator, DataGeneratorParams
from hotbed.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate data by the command line of v2.3 to v3.0.1."""
    options = _parser().parse_args(arguments)
    spec = read_json(options.config_file)
    input = read_graph(spec).input
    reader = input.reader
    if reader is None:
        raise ConfigError(
            f"{options.config_file}: nothing to generate, got a Data layer without source. Give a "
            "training configuration."
        )
    tail = PowerLaw_t[options.longtail.capitalize()]
    if options.alpha is not None:
        tail = PowerLaw_t.Specific
    distribution = Distribution_t.PowerLaw
    if options.distribution == "unified":
        distribution = Distribution_t.Uniform
    slot_sizes = options.voc_size_array or reader.slot_size_array
    params = DataGeneratorParams(
        format=reader.data_reader_type,
        label_dim=sum(input.label_dims),
        dense_dim=input.dense_dim,
        num_slot=len(slot_sizes),
        i64_input_key=spec.get("solver", {}).get("input_key_type") == "I64",
        source=str(reader.source),
        eval_source=reader.eval_source,
        slot_size_array=slot_sizes,
        nnz_array=options.nnz_array,
        check_type=reader.check_type,
        dist_type=distribution,
        power_law_type=tail,
        alpha=abs(options.alpha or 1.2),
        num_files=options.files,
        eval_num_files=options.files,
        num_samples_per_file=options.samples,
        num_samples=reader.num_samples,
        eval_num_samples=reader.eval_num_samples,
        float_label_dense=reader.float_label_dense,
    )
    folder = Path(options.data_folder).absolute()
    DataGenerator(params, str(folder)).generate()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="data_generator", allow_abbrev=False)
    add = parser.add_argument
    add("--config-file", required=True, help="a JSON file with a solver and layers")
    add("--voc-size-array", type=_numbers, default=(), help="the keys of each slot, in csv")
    add("--nnz-array", type=_numbers, default=(), help="the keys of a sample in each slot, in csv")
    add("--distribution", default="powerlaw", choices=["powerlaw", "unified"])
    add("--alpha", type=float, help="of the power law; its sign does not matter")
    tails = ["long", "medium", "short"]
    add("--longtail", "--long-tail", default="medium", choices=tails, help="alpha by a word")
    add("--data-folder", default="./", help="where files of Norm data are written")
    add("--files", type=int, default=128, help="number of files of Norm data")
    add("--samples", type=int, default=40960, help="samples of a file of Norm data")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
