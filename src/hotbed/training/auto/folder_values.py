# SPDX-License-Identifier: Apache-2.0
"""FolderValues: what `torch.distributed.checkpoint` has written, read without its processes."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hotbed.errors import ConfigError, FormatError

from .plain_values import PlainValues, SavedTensor


class FolderValues(PlainValues):
    """The values of a folder that `torch.distributed.checkpoint` wrote on any number of ranks.

    Raises:
        ConfigError: the folder is not one of these.
        FormatError: its index cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder
        if not os.path.isfile(os.path.join(folder, ".metadata")):
            raise ConfigError(
                f"load_plain_state.source: expected a folder that torch.distributed.checkpoint "
                f"has written, got {os.fspath(folder)!r} without a file '.metadata'. Give the "
                "folder that was its checkpoint_id."
            )
        saved = self._metadata().state_dict_metadata
        self.tensors = {
            key: _saved_tensor(entry)
            for key, entry in saved.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.others = tuple(key for key in saved if key not in self.tensors)

    def read(self, key: str) -> Any:
        saved = self.tensors.get(key)
        values: dict[str, Any] = {key: None}
        if saved is not None:
            values[key] = torch.empty(saved.shape, dtype=saved.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this process reads alone
                load(values, storage_reader=FileSystemReader(self._folder), no_dist=True)
        except (CheckpointException, Exception) as error:
            raise FormatError(
                f"{os.fspath(self._folder)}: the value {key!r} cannot be read, got {error}. Copy "
                "the folder again."
            ) from error
        return values[key]

    def _metadata(self) -> Metadata:
        try:
            return FileSystemReader(self._folder).read_metadata()
        except Exception as error:
            raise FormatError(
                f"{os.fspath(self._folder)}: its '.metadata' cannot be read, got {error}. Copy the "
                "folder again."
            ) from error


def _saved_tensor(entry: TensorStorageMetadata) -> SavedTensor:
    shape = tuple(entry.size)
    if len(shape) != 2:
        return SavedTensor(shape, entry.properties.dtype)
    at_top = [chunk for chunk in entry.chunks if chunk.offsets[0] == 0]
    at_top.sort(key=lambda chunk: chunk.offsets[1])
    widths = tuple(chunk.sizes[1] for chunk in at_top)
    is_grid = len(widths) > 1 and len(entry.chunks) > len(widths)
    return SavedTensor(shape, entry.properties.dtype, widths, is_grid)
