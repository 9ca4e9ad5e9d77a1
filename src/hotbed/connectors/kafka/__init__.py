# SPDX-License-Identifier: Apache-2.0
"""A topic of Kafka as an endless source.

kafka.py     Kafka: the source, with the order of its rows in the journal
reader.py    one reading of a topic: blocks of messages, and their rows
topic.py     a topic at its broker: partitions, waiting for brokers, the check of a position
settings.py  what reading a topic asks of the settings of Kafka
identity.py  what tells a topic from one that was made anew under its name
client.py    the client library in a process of its own
process.py   the program of that process
"""
