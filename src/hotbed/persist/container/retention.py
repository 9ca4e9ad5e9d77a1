# SPDX-License-Identifier: Apache-2.0
"""Which saved states are kept, and which are removed."""

from __future__ import annotations

from hotbed.errors import PersistError
from hotbed.persist.container.format import open_folder, open_link
from hotbed.persist.container.store import CheckpointStore, number_of


def retain(store: CheckpointStore, keep: int) -> None:
    """Remove all but the newest `keep` fulls, the deltas on them, and what the newest state needs.

    A folder whose manifest cannot be read is removed only if it is older than these.
    """
    newest = store.newest_state()
    if newest is None:
        return
    needed = {link.folder for link in open_folder(store, newest.folder).links}
    folders = store.folders()
    bases = {folder: _base(store, folder) for folder in folders}
    fulls = [folder for folder in folders if bases[folder] == folder][-keep:]
    for folder in reversed(folders):  # deltas before what they rest on
        is_later = number_of(folder) > number_of(newest.folder)
        is_unknown = bases[folder] is None and number_of(folder) > number_of(fulls[0])
        is_kept = folder in needed or bases[folder] in fulls
        if not (is_later or is_unknown or is_kept):
            store.remove(folder)


def _base(store: CheckpointStore, folder: str) -> str | None:
    """Return the full that a checkpoint rests on, itself for a full; None if it is damaged."""
    try:
        chain = open_link(store, folder).manifest.chain
    except PersistError:
        return None
    return chain[0].folder if chain else folder
