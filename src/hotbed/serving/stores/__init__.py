# SPDX-License-Identifier: Apache-2.0
"""Stores of versions of models and their rows: mapped files, or a server elsewhere.

backoff.py       space the attempts at something that fails
base.py          define stores of rows
fake.py          serve rows from dicts, for tests of the code that reads rows
fetched_maps.py  keep fitted maps of versions that another process serves in files here
following.py     poll for new versions that trainers publish or that another process loads
held.py          the versions that the rule of a model names, and the rule in force
locking.py       lock served folders for the one process that writes them
mapped.py        read the served folder
messages.py      load the messages of gRPC services; those of the parameter server
opening.py       choose the store of rows at an address
remote.py        read a parameter server in another process over gRPC
successors.py    check that a state may follow a served version: of its model, and not earlier
table_files.py   write the files of a version's tables
verifying.py     verify served folders
writing.py       write the served folder: each version is on disk before CURRENT names it
"""
