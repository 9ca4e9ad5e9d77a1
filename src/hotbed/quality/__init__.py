# SPDX-License-Identifier: Apache-2.0
"""The quality of what is served, from logged requests and their outcomes; replays of other jobs.

cells.py        the quality of a window by route, version and segment, and differences
click_model.py  what other orders of the shown lists would have earned
measure.py      ServingQuality: reads a join, and measures windows, also over kills
page.py         the page of what was measured, as one HTML file
prediction.py   the difference that a test of two jobs on users would have shown
readings.py     the newest window as readings for Prometheus
replay.py       JobReplay: another job learns a log, and is compared with what was served
replay_page.py  the page of a replay, as one HTML file
results.py      Quality: what was measured, as tables and as files of a folder
samples.py      which columns are measured
scoring.py      scores of logged rows while a job learns them
state.py        what a measuring that never ends resumes from
"""
