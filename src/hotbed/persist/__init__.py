# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by hand: verify, describe, compare, compact, capture, restore, follow.

    import hotbed as hb

    hb.checkpoints.verify("model")

`RecModel.save` and `hb.callbacks.Checkpoint` write checkpoints; this module is for what lies on
disk. Names load on first use: those that need torch raise MissingExtra without it.

    container/  the container of docs/format.md: files with digests, and a manifest
    state/      what a state holds, how it is captured and saved, and how it is loaded
    publish/    handing saved states on to servers, by a directory or a Kafka topic
    upkeep/     what is done with saved states: look into them, go back to one, take rows
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotbed.persist.container.format import Reader, Saved, open_checkpoint, read_newest
    from hotbed.persist.container.manifest import Manifest
    from hotbed.persist.publish.gate import PublishGate
    from hotbed.persist.publish.topic import TopicFeed
    from hotbed.persist.publish.version import Publisher
    from hotbed.persist.state.chain import Replica, compact
    from hotbed.persist.state.checkpoint import Capture, State, capture, save
    from hotbed.persist.state.digest import content_digest
    from hotbed.persist.state.network import random_state, set_random_state, warm_start_network
    from hotbed.persist.state.restoring import continues, restore
    from hotbed.persist.state.saver import Saver
    from hotbed.persist.upkeep.inspect import describe_checkpoint as describe
    from hotbed.persist.upkeep.inspect import diff, verify
    from hotbed.persist.upkeep.warm_starts import warm_start

__all__ = [
    "Capture",
    "Manifest",
    "PublishGate",
    "Publisher",
    "Reader",
    "Replica",
    "Saved",
    "Saver",
    "State",
    "TopicFeed",
    "capture",
    "compact",
    "content_digest",
    "continues",
    "describe",
    "diff",
    "open_checkpoint",
    "random_state",
    "read_newest",
    "restore",
    "save",
    "set_random_state",
    "verify",
    "warm_start",
    "warm_start_network",
]

# Public name -> the module and the name in it.
_HOMES = {
    "Capture": "state.checkpoint:Capture",
    "Manifest": "container.manifest:Manifest",
    "PublishGate": "publish.gate:PublishGate",
    "Publisher": "publish.version:Publisher",
    "Reader": "container.format:Reader",
    "Replica": "state.chain:Replica",
    "Saved": "container.format:Saved",
    "Saver": "state.saver:Saver",
    "State": "state.checkpoint:State",
    "TopicFeed": "publish.topic:TopicFeed",
    "capture": "state.checkpoint:capture",
    "compact": "state.chain:compact",
    "content_digest": "state.digest:content_digest",
    "continues": "state.restoring:continues",
    "describe": "upkeep.inspect:describe_checkpoint",
    "diff": "upkeep.inspect:diff",
    "open_checkpoint": "container.format:open_checkpoint",
    "random_state": "state.network:random_state",
    "read_newest": "container.format:read_newest",
    "restore": "state.restoring:restore",
    "save": "state.checkpoint:save",
    "set_random_state": "state.network:set_random_state",
    "verify": "upkeep.inspect:verify",
    "warm_start": "upkeep.warm_starts:warm_start",
    "warm_start_network": "state.network:warm_start_network",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hotbed.persist' has no attribute {name!r}")
    home, _, attribute = _HOMES[name].partition(":")
    try:
        module = importlib.import_module(f"hotbed.persist.{home}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from hotbed.errors import MissingExtra

        raise MissingExtra(
            f"hotbed.checkpoints.{name}: torch is not installed. Run pip install hotbed[train]."
        ) from error
    return getattr(module, attribute)


def __dir__() -> list[str]:
    return list(__all__)
