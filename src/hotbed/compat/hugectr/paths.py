# SPDX-License-Identifier: Apache-2.0
"""Paths of files, which the door reads and writes on this machine only."""

from __future__ import annotations

import os
import re

from hotbed.errors import ConfigError


def check_local(where: str, path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for an address of a remote file system, such as s3://….

    Args:
        where: the argument, in messages.
        path: of a file or a folder.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):  # a Path has one slash only
        raise ConfigError(
            f"{where}: expected a path of this machine, got {str(path)!r:.200}. Only the files of "
            "a reader may be remote: mount the file system, or copy from it by hugectr.data."
            "DataSource(hugectr.data.DataSourceParams()).move_to_local(local_path, remote_path)."
        )
