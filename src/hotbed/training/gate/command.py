# SPDX-License-Identifier: Apache-2.0
"""What is called when versions are held: a program or a URL."""

from __future__ import annotations

import http.client
import json
import logging
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger("hotbed")
SECONDS = 60.0
"""How long a command may take."""


def call(command: str | Sequence[str], message: Mapping[str, Any]) -> None:
    """Send a message to a URL by POST, or to a program on its standard input, as JSON.

    What goes wrong is logged: training does not depend on it.
    """
    text = json.dumps(message).encode()
    try:
        if isinstance(command, str):
            kind = {"Content-Type": "application/json"}
            request = urllib.request.Request(command, text, kind)
            with urllib.request.urlopen(request, timeout=SECONDS):
                pass
        else:
            subprocess.run(list(command), input=text, timeout=SECONDS, check=True)
    except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as error:
        log.error("the command of the gate failed, got %s: %s", type(error).__name__, error)
