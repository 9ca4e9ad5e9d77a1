# SPDX-License-Identifier: Apache-2.0
"""A request goes through few functions between its arrival and the session that scores it."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import hotbed as hb
from hotbed.serving.server.scoring.batching import Batcher

from .conftest import Running, draw
from .test_http import body

SOURCE = str(Path(hb.__file__).parent)
MOST_HOPS = 5


def stack(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions of Hotbed on a stack up to the event loop, innermost first."""
    while frame is not None and frame.f_code.co_filename != asyncio.runners.__file__:
        if frame.f_code.co_filename.startswith(SOURCE):
            yield frame.f_code
        frame = frame.f_back


def awaiting() -> Iterator[CodeType]:
    """The functions of Hotbed that await something in the tasks that answer HTTP requests."""
    for task in asyncio.all_tasks():
        coroutine: Any = task.get_coro()
        if "run_asgi" not in coroutine.__qualname__:
            continue
        while inspect.iscoroutine(coroutine):
            if coroutine.cr_code.co_filename.startswith(SOURCE):
                yield coroutine.cr_code
            coroutine = coroutine.cr_await


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_a_request_takes_few_hops_to_its_session(
    exported: Path, monkeypatch: pytest.MonkeyPatch, binary: bool
) -> None:
    passed = dict[CodeType, None]()
    submit = Batcher.submit
    ask = hb.InferenceSession.ask

    done = list[bool]()

    def recorded_submit(batcher: Batcher, *arguments: Any, **options: Any) -> Any:
        # the request is handed over here: what put it into the queue is not on the stack later
        passed.update(
            dict.fromkeys([*reversed(list(stack(inspect.currentframe()))), submit.__code__])
        )
        future = submit(batcher, *arguments, **options)
        done.append(future.done())
        return future

    def recorded_ask(session: Any, *arguments: Any, **options: Any) -> Any:
        passed.update(dict.fromkeys([*awaiting(), *stack(inspect.currentframe())]))
        return ask(session, *arguments, **options)

    running = Running(exported, grpc_port=None)
    monkeypatch.setattr(Batcher, "submit", recorded_submit)
    monkeypatch.setattr(hb.InferenceSession, "ask", recorded_ask)
    if binary:
        with hb.Client(f"http://{running.http}") as client:
            client.predict("m", draw(3, 1))
    else:
        connection = http.client.HTTPConnection(running.http, timeout=20)
        connection.request("POST", "/v2/models/m/infer", json.dumps(body(3)))
        assert connection.getresponse().status == 200
        connection.close()
    running.close()
    hops = [f"{code.co_qualname} ({Path(code.co_filename).name})" for code in passed]
    assert "Connection._respond (connection.py)" in hops
    assert "Batcher.submit (batching.py)" in hops
    assert len(hops) <= MOST_HOPS, hops
    assert done == [True]  # a lone request is scored where it was read
