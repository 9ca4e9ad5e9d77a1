# SPDX-License-Identifier: Apache-2.0
"""`hugectr.data`: file systems."""

from __future__ import annotations

import shutil
from pathlib import Path

from hotbed.compat.hugectr.clauses import DataSourceParams
from hotbed.errors import ConfigError, DataError
from hotbed.objects import copy

__all__ = ["DataSource", "DataSourceParams"]


class DataSource:
    """Copies files of another file system: `hugectr.data.DataSource` of v3.4 to v3.8.

    A remote path is an address that fsspec reads, such as s3://bucket/file or hdfs://host/file, or
    a path of this machine, where the file system is mounted. Server and port of a name node are
    not asked.

    Args:
        data_source_params: names the paths in v3.4.

    Example:
        >>> source = hugectr.data.DataSource(hugectr.data.DataSourceParams())
        >>> source.move_to_local("data/train.parquet", "/mnt/hdfs/train.parquet")
    """

    def __init__(self, data_source_params: DataSourceParams) -> None:
        self._params = data_source_params

    def move_to_local(self, local_path: str = "", hdfs_path: str = "") -> None:
        """Copy a file or a folder; what it was copied from stays, as in HugeCTR.

        Args:
            local_path: where to; without paths, all those of the params (v3.4).
            hdfs_path: where from.

        Raises:
            ConfigError: a path is missing.
            DataError: there is nothing at `hdfs_path`.
            StoreAway: it cannot be read.
            MissingExtra: a package for this file system is not installed.
        """
        copies = [(hdfs_path, local_path)]
        if not (local_path or hdfs_path):
            copies = list(self._params.copies)
        if not copies or not all(path for pair in copies for path in pair):
            raise ConfigError(
                f"move_to_local: two paths are needed, got {local_path!r} and {hdfs_path!r}. Give "
                "local_path and hdfs_path."
            )
        for remote, local in copies:
            _copy(remote, Path(local))


def _copy(remote: str, local: Path) -> None:
    if "://" in remote:
        copy(remote, local)
        return
    if not Path(remote).exists():
        raise DataError(f"{remote}: expected a file or a folder, got nothing. Correct hdfs_path.")
    local.parent.mkdir(parents=True, exist_ok=True)
    if Path(remote).is_dir():
        shutil.copytree(remote, local, dirs_exist_ok=True)
    else:
        shutil.copyfile(remote, local)
