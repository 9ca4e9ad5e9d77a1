# SPDX-License-Identifier: Apache-2.0
"""The command line of HugeCTR up to v3.2: `python -m hotbed.compat.hugectr --train config.json`."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version

from hotbed.compat.hugectr.job import read_training, train_file
from hotbed.compat.hugectr.model import Model
from hotbed.errors import HotbedError
from hotbed.yaml_files import read_mapping


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments and train; return the exit code, 2 for a deliberate error."""
    parser = argparse.ArgumentParser(
        prog="python -m hotbed.compat.hugectr",
        description="Train what a HugeCTR training file describes.",
        allow_abbrev=False,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--train", metavar="CONFIG.json", help="train what the file describes")
    action.add_argument("--version", action="store_true", help="print the version")
    options = parser.parse_args(arguments)
    print(f"Hotbed Version: {version('hotbed')}")
    if options.version:
        return 0
    print(f"Config file: {options.train}")
    try:
        train_file(read_training(read_mapping(options.train)), Model)
    except HotbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
