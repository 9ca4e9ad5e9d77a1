# SPDX-License-Identifier: Apache-2.0
"""The report of a preparation: what its rows look like, and one HTML page that shows it.

alone.py     columns that tell the label by themselves: nearly always a leak, such as an outcome
distinct.py  count different values without holding them
page.py      the page of a preparation: its rows in charts, bars and tables, as one HTML file
profile.py   Profile: what is seen of the rows of a preparation while they are written
timeline.py  rows and sums of labels over the time of events
"""

from hotbed.prepare.report.alone import Finding
from hotbed.prepare.report.page import write_report
from hotbed.prepare.report.profile import Profile

__all__ = ["Finding", "Profile", "write_report"]
