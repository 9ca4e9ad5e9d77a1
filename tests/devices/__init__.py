# SPDX-License-Identifier: Apache-2.0
"""A device that is not real, for tests of code that computes on an accelerator.

Every operation on it is queued and runs late, in any order that streams and events allow. Its bits
are those of a CPU, if the code under test waits wherever it has to.

    def trains(mode):                       # at the top of the file
        queues = devices.install()          # once a process
        queues.reset(Schedule(mode))
        return train(network.to("fake"))

    assert SERVER.call(trains, "lazy") == train(network)      # a process of its own, see forked.py

A process that has the device keeps it, so each test installs it in a process of its own.

fake.py        install: torch's device "fake"
memory.py      memory that the host cannot read, and pinned memory
operations.py  torch's operations on the host's kernels, late
queues.py      Queues, Schedule: which queued work runs when; waits that are removed
streams.py     what torch.Stream and torch.Event are there
"""

from .fake import install
from .queues import Queues, Schedule, Site, finds_removed, schedules, wait_sites
from .streams import Event, counts

__all__ = [
    "Event",
    "Queues",
    "Schedule",
    "Site",
    "counts",
    "finds_removed",
    "install",
    "schedules",
    "wait_sites",
]
