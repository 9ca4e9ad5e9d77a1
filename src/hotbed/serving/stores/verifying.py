# SPDX-License-Identifier: Apache-2.0
"""Verify served folders: every byte of the versions that answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hotbed.errors import FormatError
from hotbed.files import Where, local_path, resolve
from hotbed.serving.stores.held import HeldVersions
from hotbed.serving.stores.mapped import MappedVersion, ModelFolder, damage_of, holds_versions


def is_served(where: Where) -> bool:
    """Return whether a place is a folder of rows of a server, or that of one of its models."""
    folder = resolve(where)
    return isinstance(folder, Path) and bool(_models_of(folder))


def verify_served(path: str | Path) -> dict[str, Any]:
    """Check all files of the newest version of each model in a served folder, and of those that its
    rule names.

    Returns:
        `folder`, the `models` by name with the number of their newest version (None where the model
        is unloaded), the number of `files`, their `bytes`, and how many are `unchecked`: rows that
        an earlier release wrote have no digest.

    Raises:
        FormatError: a file is damaged; the message names it.
    """
    folder = local_path(path, "served.path")
    models = dict[str, int | None]()
    num_files = 0
    num_bytes = 0
    num_unchecked = 0
    for model in _models_of(folder):
        version = _verified(model)
        models[model.name] = None if version is None else version.version
        versions = [] if version is None else [version]
        for each in (*versions, *_verified_held(model)):
            files = each.files()
            num_files += len(files)
            num_bytes += sum((each.folder / name).stat().st_size for name in files)
            num_unchecked += len(files) - each.num_digests
    return {
        "folder": str(folder),
        "models": models,
        "files": num_files,
        "bytes": num_bytes,
        "unchecked": num_unchecked,
    }


def _models_of(folder: Path) -> list[ModelFolder]:
    """Return the models whose versions lie in a folder, or the one whose own folder this is."""
    if not folder.is_dir():
        return []
    folders = [folder] if holds_versions(folder) else sorted(folder.iterdir())
    homes = [path for path in folders if path.is_dir() and holds_versions(path)]
    return [ModelFolder(home.parent, unquote(home.name)) for home in homes]


def _verified_held(model: ModelFolder) -> list[MappedVersion]:
    """Return the versions that the rule of a model names, all of whose files are whole."""
    store = HeldVersions(model.path.parent)
    while True:
        versions = store.all(model.name)
        damaged = [version.folder / name for version in versions for name in version.damaged()]
        if not damaged:
            return versions
        if store.all(model.name) == versions:  # no other rule came meanwhile
            raise FormatError(damage_of(min(damaged)))


def _verified(model: ModelFolder) -> MappedVersion | None:
    """Return the newest version of a model, all of whose files are whole."""
    while True:
        version = model.newest()
        damaged = set() if version is None else version.damaged()
        if not damaged:
            return version
        if version is not None and model.pointer() == version.key:  # not replaced meanwhile
            raise FormatError(damage_of(version.folder / min(damaged)))
