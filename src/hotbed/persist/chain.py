# SPDX-License-Identifier: Apache-2.0
"""Fulls and the deltas on them: which ones stay, what applies to what, and what people ask about them."""

from __future__ import annotations

from hotbed.errors import PersistError
from hotbed.persist.format import open_folder, open_link
from hotbed.persist.store import Store, number_of


def retain(store: Store, keep: int) -> None:
    """Remove all but the newest `keep` fulls, the deltas that rest on them, and what the newest state needs."""
    newest = store.newest()
    if newest is None:
        return
    needed = {link.folder for link in open_folder(store, newest.folder).links}
    folders = store.folders()
    bases = {folder: _base(store, folder) for folder in folders}
    kept = [folder for folder in folders if bases[folder] == folder][-keep:]
    for folder in reversed(folders):  # deltas before what they rest on
        late = number_of(folder) > number_of(newest.folder) or (bases[folder] is None and folder > kept[0])
        if bases[folder] not in kept and folder not in needed and not late:
            store.remove(folder)


def _base(store: Store, folder: str) -> str | None:
    """The full that a checkpoint rests on, itself for a full; None where its manifest cannot be read."""
    try:
        chain = open_link(store, folder).manifest.get("chain")
    except PersistError:
        return None
    return str(chain[0]["folder"]) if chain else folder
