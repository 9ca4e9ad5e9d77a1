# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it learns: history, progress, Prometheus, TensorBoard, the report.

baselines.py      Baselines: simple models beside the one that learns
endpoint.py       Endpoint: readings at an HTTP address, without torch
history.py        History: the course of a training in bounded memory, as a callback
new_ids.py        NewIds: how samples with new ids are ranked
progress.py       ProgressBar: what a run is doing, in a terminal or as lines
prometheus.py     Prometheus: the values of a run at an HTTP address
points.py         Point: where a training was at one moment
readings.py       readings: the numbers of a run, under one name each
shown_scores.py   ShownScores: of impressions when they were shown, until their labels are known
report.py         the training report: one HTML file that opens without a network or a library
report_charts.py  choose what the report draws of epochs and of streams
report_runs.py    choose what the report draws of several runs
report_segments.py  what the report shows of segments
report_tables.py  choose what the report draws of tables and of their disk
segments.py       BySegment: figures by the values of columns, such as the country
served.py         Served: how a server answered while it followed a training
status_file.py    StatusFile: what a run is doing, in a file that `hotbed watch` reads
tensorboard.py    TensorBoard: event files of a run
window_log.py     where a stream is cut into windows, and a log of windows in bounded memory
windows.py        Windows: metrics of a stream in windows of event time or samples
"""
