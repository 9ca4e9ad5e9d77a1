# SPDX-License-Identifier: Apache-2.0
"""Keep the versions that rules name where their publisher would remove them."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence

from hotbed.errors import HotbedError
from hotbed.files import Where
from hotbed.persist.container.retention import lease
from hotbed.persist.container.store import open_store

log = logging.getLogger("hotbed.serving")
_RENEW_SECONDS = 3600.0


class Leases:
    """The leases of one server at the places where versions are published.

    Args:
        server: what tells servers of one machine apart, such as the folder of rows.
        places: by model, the folders and URLs.
    """

    def __init__(self, server: str, places: Mapping[str, Sequence[Where]]) -> None:
        self._server = server
        self._places = places
        self._leased = dict[str, tuple[set[str], float]]()  # digests, and when they were leased
        self._problem = ""

    def hold(self, name: str, digests: set[str]) -> None:
        """Lease the versions of a model with these digests, and no others, now and every hour."""
        leased, since = self._leased.get(name, (set[str](), 0.0))
        is_due = bool(digests) and time.monotonic() - since > _RENEW_SECONDS
        if digests == leased and not is_due:
            return
        for place in self._places.get(name, ()):
            self._lease(name, place, digests)
        self._leased[name] = digests, time.monotonic()

    def _lease(self, name: str, place: Where, digests: set[str]) -> None:
        who = f"{socket.gethostname()}\0{self._server}\0{name}".encode()
        try:
            lease(open_store(place), hashlib.sha256(who).hexdigest()[:16], digests)
        except (HotbedError, OSError) as error:
            problem = f"{place}: the versions of model {name} cannot be leased: {error}"
            if problem != self._problem:
                log.warning("%s. Their publisher may remove them; the rows here stay.", problem)
            self._problem = problem
