# SPDX-License-Identifier: Apache-2.0
"""Which saved states are kept, and which are removed.

A server leases the states that its rules name. A lease is a file beside the states: the digests of
some of them, and when it was written. It counts for a week, so that a server that is gone holds
nothing for ever.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping

from hotbed.errors import ConfigError, PersistError
from hotbed.persist.container.format import Link, open_folder, open_link
from hotbed.persist.container.store import CheckpointStore, number_of

log = logging.getLogger("hotbed.persist")
LEASE_SECONDS = 7 * 86_400
"""How long a lease counts after it was written."""
_PREFIX = "LEASE-"


def retain(store: CheckpointStore, keep: int) -> None:
    """Remove all but the newest `keep` fulls, the deltas on them, and what the newest state needs.

    States that are leased stay, and the newest state that no gate held, with those that they rest
    on. A folder whose manifest cannot be read is removed only if it is older than these.
    """
    newest = store.newest_state()
    if newest is None:
        return
    needed = {link.folder for link in open_folder(store, newest.folder).links}
    folders = store.folders()
    links = {folder: _link(store, folder) for folder in folders}
    leased = _leased_digests(store)
    for link in links.values():
        if link is not None and link.manifest.digest in leased:
            needed |= {entry.folder for entry in link.chain}
    good = _newest_good(links)
    if good is not None:
        needed |= {entry.folder for entry in good.chain}
    bases = {folder: _base(link) for folder, link in links.items()}
    fulls = [folder for folder in folders if bases[folder] == folder][-keep:]
    for folder in reversed(folders):  # deltas before what they rest on
        is_later = number_of(folder) > number_of(newest.folder)
        is_unknown = bases[folder] is None and number_of(folder) > number_of(fulls[0])
        is_kept = folder in needed or bases[folder] in fulls
        if not (is_later or is_unknown or is_kept):
            store.remove(folder)


def lease(store: CheckpointStore, holder: str, digests: Iterable[str]) -> None:
    """Keep the states of these digests, instead of those that `holder` leased before.

    Raises OSError where the store refuses.
    """
    content = {"written": time.time(), "digests": sorted(set(digests))}
    with store.new_file(f"{_PREFIX}{holder}") as file:
        file.write(json.dumps(content).encode())


def _leased_digests(store: CheckpointStore) -> set[str]:
    """Return the digests of the states that are leased now; remove the leases that are over."""
    digests = set[str]()
    for name in store.files(_PREFIX):
        try:
            content = json.loads(store.read(name))
            if content["written"] > time.time() - LEASE_SECONDS:
                digests.update(map(str, content["digests"]))
            else:
                store.remove(name)
        except (PersistError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: a lease cannot be read, got %r", store.place(name), error)
    return digests


def newest_good(store: CheckpointStore) -> int:
    """Return the number of the newest state that no gate held.

    Raises:
        ConfigError: there is none.
    """
    folders = store.folders()
    good = _newest_good({folder: _link(store, folder) for folder in folders})
    if good is None:
        numbers = ", ".join(str(number_of(folder)) for folder in folders) or "none"
        raise ConfigError(
            f"{store.place('')}: each state is held by a gate or damaged, got states {numbers}. "
            "Give the folder of a run, and --state with the number of one of its states."
        )
    return number_of(good.folder)


def _newest_good(links: Mapping[str, Link | None]) -> Link | None:
    good = [link for link in links.values() if link is not None and not link.manifest.held]
    return good[-1] if good else None


def _link(store: CheckpointStore, folder: str) -> Link | None:
    """Return a checkpoint without its chain; None if it is damaged."""
    try:
        return open_link(store, folder)
    except PersistError:
        return None


def _base(link: Link | None) -> str | None:
    """Return the full that a checkpoint rests on, itself for a full; None if it is damaged."""
    if link is None:
        return None
    chain = link.manifest.chain
    return chain[0].folder if chain else link.folder
