# SPDX-License-Identifier: Apache-2.0
"""Which versions of a stream are published, by the rules of a `PublishGate`.

hashes.py      hashes of events and ids
held_back.py   HeldBackEvents: events that are scored and never learned
counts.py      EventCounts: sums and histograms of events
rules.py       the rules, and how a number is compared with its usual values
facts.py       what a run says of its version
gatekeeper.py  Gatekeeper: watches a run and decides of its versions
command.py     what is called when versions are held
"""
