# SPDX-License-Identifier: Apache-2.0
"""One live page over a run, its publisher and its servers, from what they write and answer.

Nothing here is called by a training: the page reads files, so that it costs the training nothing,
shows a run that has died, and may run on another machine.

asked.py       what a server answers about its models
disks.py       the disks on which the run and its versions lie
measured.py    what `hotbed measure` found, and which columns drift
page.py        lay out what was seen as one HTML page
refreshed.py   what is read again and again, on a thread of its own
run_folder.py  what a run writes into its folder
run_status.py  what a run wrote about itself, checked
saved.py       which states were saved, held and published
seen.py        everything that the page shows, at one moment
server.py      answer with the page, and with its values as JSON
"""
