# SPDX-License-Identifier: Apache-2.0
"""The report of a preparation: what its rows look like, and one HTML page that shows it."""

from hotbed.prepare.report.alone import Finding
from hotbed.prepare.report.page import write_report
from hotbed.prepare.report.profile import Profile

__all__ = ["Finding", "Profile", "write_report"]
