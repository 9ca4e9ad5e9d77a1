# SPDX-License-Identifier: Apache-2.0
"""Handing saved states on to servers, by a directory or a Kafka topic, and following them."""

from hotbed.persist.publish.directory import PublishDirectory
from hotbed.persist.publish.follow import Follower
from hotbed.persist.publish.topic import PublishTopic, TopicFeed
from hotbed.persist.publish.version import Publisher

__all__ = ["Follower", "PublishDirectory", "PublishTopic", "Publisher", "TopicFeed"]
