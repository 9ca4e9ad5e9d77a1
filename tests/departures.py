# SPDX-License-Identifier: Apache-2.0
"""Calls that one rank leaves by an error before its first message, and how the others end."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hotbed.parallel import Ranks, roll_call

TIMEOUT = 20
"""Seconds that a call waits: no call of these tests does, but those that say so."""
OTHER = 3
"""How many calls further the other call is in which a rank fails."""

Call = Callable[[], Any]
End = tuple[str, float, float]
"""The error of a call; when it was raised, and when the last wait for other ranks began before."""


def ends_of(
    make: Callable[[], Mapping[str, tuple[Call, Call]]],
    numbers: Iterable[int],
    folder: str,
    rank: int,
    way: str,
) -> dict[str, End]:
    """Let one rank fail in each call, which the others make; return how it ends here.

    Each call is made over new connections, since those of a lost rank are shut. The ranks meet in a
    store that stays, as that of torchrun does.

    Args:
        make: returns each call by its name, and the same call with a mistake.
        numbers: of the calls that are made.
        folder: of all ranks.
        rank: which fails.
        way: "value": by the mistake; "interrupt": by one before its first message; "other": by the
            mistake of another call.
    """
    os.environ |= {"HOTBED_RANKS_TIMEOUT": str(TIMEOUT), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    here = int(os.environ["RANK"])
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = torch.distributed.TCPStore(*place, is_master=here == 0, wait_for_workers=False)
    ends = {}
    with patch.object(roll_call, "WATCH_SECONDS", 0.1):
        for number in numbers:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
            calls = list(make().items())
            name, (call, mistake) = calls[number]
            if way == "other":
                _, (_, mistake) = calls[(number + OTHER) % len(calls)]
            if here == rank:
                call = functools.partial(_interrupted, call) if way == "interrupt" else mistake
            ends[name] = _end(call)
            (Path(folder) / f"{number}-{here}").touch()
            while len(list(Path(folder).glob(f"{number}-*"))) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.01)
            torch.distributed.destroy_process_group()
    del store
    return ends


def _end(call: Call) -> End:
    began = time.monotonic()
    error = ""
    wait_for = Ranks._wait_for

    def noted(ranks: Ranks, message: Call) -> None:
        nonlocal began
        began = time.monotonic()
        wait_for(ranks, message)

    try:
        with patch.object(Ranks, "_wait_for", noted):
            call()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, time.monotonic(), began


def _interrupted(call: Call) -> None:
    with patch.object(Ranks, "meet", side_effect=KeyboardInterrupt("by hand")):
        call()


def check_ends(ends: Sequence[Mapping[str, End]], rank: int) -> None:
    """Check that the error of a rank has ended all others soon, by its name.

    A call may work for long on a busy machine before it fails, or before it waits.

    Args:
        ends: of each rank, on one machine.
        rank: that has failed.
    """
    wrong = {}
    for name, (own, failed, _) in ends[rank].items():
        for number, of_rank in enumerate(ends):
            error, ended, began = of_rank[name]
            seconds = ended - max(began, failed)
            reason = re.escape(own.rstrip("."))
            lost = rf"rank {rank} has left [\w. ]+ by an error, got {reason}\. All ranks"
            # a block of all ranks raises it on all; another call may have met theirs before it
            is_told = error == own or re.search(
                f"{lost}|make the same calls .* rank {rank} in", error
            )
            if not (own and is_told and seconds < TIMEOUT / 2):
                wrong[name, number] = (own, error, seconds)
    assert not wrong, wrong
