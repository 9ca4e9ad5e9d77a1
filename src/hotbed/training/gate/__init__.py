# SPDX-License-Identifier: Apache-2.0
"""Which versions of a stream are published.

counts.py      EventCounts: sums and histograms of events
sample.py      EventSample: events that each version scores before it is published
rules.py       the rules of a gate, and how a number is compared with its usual values
gate.py        Gate: rules and settings, as a value
gatekeeper.py  Gatekeeper: watches a run and decides of its versions
command.py     what is called when versions are held
"""
