# SPDX-License-Identifier: Apache-2.0
"""Handing saved states on to servers, by a directory or a Kafka topic, and following them.

directory.py      publishing versions in a directory or under a URL
export.py         exports for servers
follow.py         following published versions: complete, in order, each once
gate.py           which versions of a stream are published, as a value
independence.py   check that the score of a candidate depends on that candidate alone
onnx_session.py   open ONNX graphs in ONNX Runtime, for the check of an export and for serving
pooled_inputs.py  the result of a lookup, made of the inputs of a graph
read_lengths.py   how many of the newest entries of histories a network reads
rejection.py      why a network cannot be exported, in plain words
topic.py          publishing versions as messages of a Kafka topic, and receiving them
version.py        a published version: what servers need of a state, and who publishes it
plain/            exports of models that take tensors
"""

from hotbed.persist.publish.directory import PublishDirectory
from hotbed.persist.publish.follow import Follower
from hotbed.persist.publish.topic import PublishTopic, TopicFeed
from hotbed.persist.publish.version import Publisher

__all__ = ["Follower", "PublishDirectory", "PublishTopic", "Publisher", "TopicFeed"]
