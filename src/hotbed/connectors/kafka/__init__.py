# SPDX-License-Identifier: Apache-2.0
"""A topic of Kafka as an endless source.

kafka.py         Kafka: the source, with the order of its rows in the journal
options.py       the options of the client: servers, TLS, SASL, and secrets
reader.py        KafkaReader: reads blocks of messages and decodes them into rows
topic.py         a topic at its broker: its partitions, retries, and the check of a position
topic_source.py  TopicSource: what the reader and the topic ask of `Kafka`; Timings
sizes.py         the size of answers, and the messages that are larger than the client takes
outages.py       whether the brokers of a topic answer, and since when they do not
identity.py      the identity of a topic, which changes if it is deleted and created again
client.py        KafkaClient: runs the client library in a process of its own
process.py       the program that this process runs
"""
