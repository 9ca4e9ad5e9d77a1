# SPDX-License-Identifier: Apache-2.0
"""Between the rows on the host and a network on another device: results up, gradients down.

failures.py  errors of a device in a step, by name
link.py     DeviceLink: moves tensors between the host and a device, beside what the device computes
times.py    LinkTimes: where the time of steps goes that compute on a device
streams.py  streams, events and pinned memory: the only file that names them
"""

from .failures import named_failure
from .link import Arrival, DeviceLink, Slot, counted_as_rows, link_to
from .streams import wait_for_current

__all__ = [
    "Arrival",
    "DeviceLink",
    "Slot",
    "counted_as_rows",
    "link_to",
    "named_failure",
    "wait_for_current",
]
