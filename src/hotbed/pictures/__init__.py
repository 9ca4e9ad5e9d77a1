# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG and HTML, without a network or a library.

bars.py    draw named values as bars, for one HTML page
boxes.py   draw boxes that take from each other as an SVG, in layers from top to bottom
charts.py  draw plots as SVG for one HTML page, without a plotting library
page.py    lay out one HTML file: cards with numbers on top, then sections with charts and tables
"""
