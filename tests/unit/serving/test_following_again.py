# SPDX-License-Identifier: Apache-2.0
"""What a trainer published last is handed on until it is served: after a load, after errors that pass; and ends in time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import hotbed as hb
from hotbed.errors import PersistError
from hotbed.persist.publish import Follower
from hotbed.serving.server.models import Models
from hotbed.serving.stores.following import Following

from .conftest import Trainer, wait_for


class Taking:
    """Follows a folder; `take` fails as often as it is told to."""

    def __init__(self, folder: Path, failures: int = 0) -> None:
        self.taken, self.tries, self.told, self.left = list[int](), list[int](), list[str](), failures
        self.polls = 0
        self.following = Following(lambda name, error: self.told.append(str(error)))
        self.following.follow("m", lambda: self._counted(Follower(folder)), self._take, 0.01)

    def _counted(self, follower: Follower) -> Follower:
        poll = follower.poll

        def counted() -> Any:
            self.polls += 1
            return poll()

        follower.poll = counted  # type: ignore[method-assign]
        return follower

    def _take(self, reader: Any) -> None:
        self.tries.append(reader.manifest["version"])
        if self.left:
            self.left -= 1
            raise PersistError("rows: cannot be written — No space left on device")
        self.taken.append(reader.manifest["version"])


def followed(trainer: Trainer) -> Models:
    found = Models(hb.ParameterServer())
    found.add("m", trainer.folder / "export")
    found.follow("m", lambda: Follower(trainer.folder / "published"), 0.02)
    return found


def served(models: Models) -> int:
    model = models.named("m")
    return model.current.version.version if model.ready else -1


def test_a_load_of_a_followed_model_comes_back_to_what_was_published_last(trainer: Trainer) -> None:
    models = followed(trainer)
    trainer.publish(0)
    last = trainer.publish(1)
    wait_for(lambda: served(models) == last, "the last version")
    models.load("m")
    wait_for(lambda: served(models) == last, "the last version after a load")
    models.unload("m")
    last = trainer.publish(2)
    models.load("m")
    wait_for(lambda: served(models) == last, "what came while it was unloaded")
    models.unload("m")
    (trainer.folder / "export").rename(trainer.folder / "away")
    with pytest.raises(PersistError):
        models.load("m")
    (trainer.folder / "away").rename(trainer.folder / "export")
    models.load("m")
    wait_for(lambda: served(models) == last and not models.named("m").problem, "the last version, and no problem")
    models.close()


def test_a_version_that_could_not_be_taken_is_tried_again_and_told_once(trainer: Trainer) -> None:
    version = trainer.publish(0)
    one = Taking(trainer.folder / "published", failures=4)
    wait_for(lambda: one.taken, "it is taken once that is possible")
    wait_for(lambda: one.polls > 40, "more polls")
    one.following.close()
    assert one.taken == [version]
    assert one.tries == 5 * [version]
    assert one.told == ["rows: cannot be written — No space left on device"]


def test_what_is_newer_is_tried_at_once_and_what_failed_before_it_no_more(trainer: Trainer) -> None:
    first = trainer.publish(0)
    one = Taking(trainer.folder / "published", failures=1000)
    wait_for(lambda: one.polls > 40, "it fails on")
    assert 5 <= one.tries.count(first) <= 8  # of 40 polls: the pauses grow
    last = trainer.publish(1)
    one.left = 0
    wait_for(lambda: last in one.taken, "the newer one")
    tried = len(one.tries)
    wait_for(lambda polls=one.polls: one.polls > polls + 10, "more polls")
    one.following.close()
    assert one.taken == [last]
    assert len(one.tries) == tried


def test_a_place_that_cannot_be_read_is_told_once_until_it_can(trainer: Trainer) -> None:
    trainer.publish(0)
    current = trainer.folder / "published" / "CURRENT"
    one = Taking(trainer.folder / "published")
    wait_for(lambda: one.taken, "the first version")
    right = current.read_bytes()
    for times in (1, 2):
        current.write_bytes(b"torn")
        wait_for(lambda polls=one.polls: one.polls > polls + 10, "polls that fail")
        assert len(one.told) == times, one.told
        current.write_bytes(right)
        wait_for(lambda polls=one.polls: one.polls > polls + 10, "polls that do not")
    one.following.close()


def test_what_hangs_is_not_waited_for_longer_than_told() -> None:
    going, hanging = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        going.wait()

    following = Following(lambda name, error: None)
    for name in "ab":
        following.repeat(name, hang, 0.01)
    hanging.wait()
    closing = threading.Thread(target=following.close, args=(0.1,))
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    going.set()
    wait_for(lambda: not any(one.is_alive() for one in following._threads), "they end")
