# SPDX-License-Identifier: Apache-2.0
"""The device of the dense part: which one, and where the time of its steps goes.

places.py      the devices of this machine by name, and a network's way to one of them
step_times.py  the line at the end of a fit: where the time of a step went, and what would help
"""

from .places import devices_here, find_device, move

__all__ = ["devices_here", "find_device", "move"]
