# SPDX-License-Identifier: Apache-2.0
"""The quality of what is served, from logged requests and their outcomes. Nothing here trains.

cells.py     the quality of a window by route, version and segment, and differences
measure.py   ServingQuality: reads a join, and measures windows, also over kills
page.py      the page of what was measured, as one HTML file
readings.py  the newest window as readings for Prometheus
results.py   Quality: what was measured, as tables and as files of a folder
samples.py   which columns are measured
state.py     what a measuring that never ends resumes from
"""
