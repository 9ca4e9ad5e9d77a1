# SPDX-License-Identifier: Apache-2.0
"""The log of requests and their scores, from which training reads what was served.

folder.py     parts of a log in a folder: open ones, which are whole up to a flush, and closed ones
records.py    answered requests as rows of a log
rescoring.py  logged requests, scored again and compared
topic.py      a log in a topic of Kafka
writer.py     the queue of answered requests and the thread that writes them
"""
