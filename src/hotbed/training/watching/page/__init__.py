# SPDX-License-Identifier: Apache-2.0
"""Pages of reports: one HTML file with charts and tables, without a network or a library.

bars.py    draw named values as bars, for one HTML page
chart.py   draw plots as SVG for one HTML page, without a plotting library
layout.py  lay out a page: cards with numbers on top, then sections with charts and tables
"""
