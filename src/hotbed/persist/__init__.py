# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by hand: verify, describe, compare, compact, capture, restore, follow.

    import hotbed as hb

    hb.checkpoints.verify("model")

`RecModel.save` and `hb.callbacks.Checkpoint` write checkpoints; this module is for what lies on
disk. Names load on first use: those that need torch raise MissingExtra without it.

    chain.py        fulls and the deltas on them
    checkpoint.py   what is in a checkpoint, and how it is captured and written
    digest.py       the content digest: what a state holds, whatever files it lies in
    format.py       the container of docs/format.md
    inspect.py      questions about checkpoints
    manifest.py     MANIFEST.json as a typed value
    network.py      the dense part of a state
    open_rows.py    what a join of streams holds open, in a checkpoint
    restoring.py    a checkpoint into network, tables and optimizers
    resume.py       whether a state fits, completing the first one, and going back
    retention.py    which saved states are kept
    row_files.py    files of rows: how they are written and read
    row_order.py    rows by partition and id: the rows of a full and its deltas as one
    saver.py        Saver: captures are written on another thread
    sink.py         files that are hashed while they are written, at the speed of the disk
    spread.py       tables that hold rows before several processes share them
    store.py        where checkpoints lie: a local folder, or any object store that fsspec knows
    tables.py       tables into and out of a checkpoint
    warm_starts.py  rows of another job into tables of this one
    words.py        what the ids of a table stand for
    check/          the one validator of docs/format.md: what a digest does not show
    publish/        handing saved states on to servers, by a directory or a Kafka topic
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotbed.persist.chain import Replica, compact
    from hotbed.persist.checkpoint import Capture, State, capture, save
    from hotbed.persist.digest import content_digest
    from hotbed.persist.format import Reader, Saved, open_checkpoint, read_newest
    from hotbed.persist.inspect import describe_checkpoint as describe
    from hotbed.persist.inspect import diff, verify
    from hotbed.persist.manifest import Manifest
    from hotbed.persist.network import random_state, set_random_state, warm_start_network
    from hotbed.persist.publish.topic import TopicFeed
    from hotbed.persist.publish.version import Publisher
    from hotbed.persist.restoring import restore
    from hotbed.persist.saver import Saver
    from hotbed.persist.warm_starts import warm_start

__all__ = [
    "Capture",
    "Manifest",
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
    "Capture": "checkpoint:Capture",
    "Manifest": "manifest:Manifest",
    "Publisher": "publish.version:Publisher",
    "Reader": "format:Reader",
    "Replica": "chain:Replica",
    "Saved": "format:Saved",
    "Saver": "saver:Saver",
    "State": "checkpoint:State",
    "TopicFeed": "publish.topic:TopicFeed",
    "capture": "checkpoint:capture",
    "compact": "chain:compact",
    "content_digest": "digest:content_digest",
    "describe": "inspect:describe_checkpoint",
    "diff": "inspect:diff",
    "open_checkpoint": "format:open_checkpoint",
    "random_state": "network:random_state",
    "read_newest": "format:read_newest",
    "restore": "restoring:restore",
    "save": "checkpoint:save",
    "set_random_state": "network:set_random_state",
    "verify": "inspect:verify",
    "warm_start": "warm_starts:warm_start",
    "warm_start_network": "network:warm_start_network",
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
