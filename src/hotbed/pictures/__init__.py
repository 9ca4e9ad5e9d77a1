# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG and HTML, without a network or a library.

bars.py     draw named values as bars, for one HTML page
boxes.py    draw boxes that take from each other as an SVG, in layers from top to bottom
charts.py   draw plots as SVG for one HTML page, without a plotting library
numbers.py  write numbers as people read them, in English or in Chinese
page.py     lay out one HTML file: cards with numbers on top, then sections with charts and tables

style.css is the one stylesheet of all pages; page.js shows the values of a chart at the pointer.
"""
