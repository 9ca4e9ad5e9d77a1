# SPDX-License-Identifier: Apache-2.0
"""A model of a server: the version that it serves, its queue, its counts and its last problem."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from hotbed.errors import HotbedError, NotServed
from hotbed.serving.arguments import column_shapes
from hotbed.serving.cache import EmbeddingCache
from hotbed.serving.protocol.bodies import Bounds, Readers
from hotbed.serving.protocol.inputs import Candidates, ModelInputs
from hotbed.serving.request_log.records import AnsweredRequest
from hotbed.serving.request_log.writer import RequestLogWriter
from hotbed.serving.server.meters import RequestCounts
from hotbed.serving.server.options import ServerLimits
from hotbed.serving.server.scoring.batching import Batcher, QueuedRequest, Scored, ServedVersion
from hotbed.serving.session import InferenceSession, Scores
from hotbed.serving.stores.base import ModelVersion
from hotbed.serving.threads import DaemonThreads

log = logging.getLogger("hotbed.serving")
_LOADS = 8  # threads for loads and unloads of a model, most of which wait for each other
_SAMPLES = 4  # requests that a new version scores before it answers
_BATCHES_A_SAMPLE = 64
_READINGS = 512  # request times kept for the page
_ROUTE = "stable"  # why a version answers: there is one


class Model:
    """A model: the version that it serves, its queue and its last problem. Created by `Models`.

    Attributes:
        find: returns the newest version.
        served: the version that is served; None = no version is loaded.
        cache: caches rows that the versions do not hold.
        look: checks at once whether a watched model has a new version.
        looking: held while `look` runs: the later of two calls serves the newer version.
        changing: held while a load or an unload changes what is served.
        aside: threads for loads and unloads that clients request.
        reading: the running read of the source, or None.
        wanted: False after an unload.
        problem: why the newest version is not served; "" = it is.
        damage: which files of the served version are damaged; "" = none, as far as is known.
        log: writes the requests that were answered; None = nothing does.
        outside_problem: the problem of the process that loads the model for this one.
        seconds: times of the last answered requests, in seconds.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], ModelVersion],
        limits: ServerLimits,
        readers: Readers,
        log: RequestLogWriter | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.find = find
        self._limits = limits
        self._readers = readers
        self.cache: EmbeddingCache | None = None
        self.looking = threading.Lock()
        self.changing = threading.RLock()
        self.aside = DaemonThreads(_LOADS, "hotbed-load")
        self.reading: Future[ModelVersion] | None = None
        self.look: Callable[[], None] = lambda: None
        self.wanted = True
        self.outside_problem = ""
        self.served: ServedVersion | None = None
        self._batcher: Batcher | None = None
        self.problem = ""
        self.damage = ""
        self.swaps: int = 0
        self.problems: int = 0
        self.rows: int = 0
        self.batches: int = 0
        self.batch_seconds: float = 0.0
        self.seconds = deque[float](maxlen=_READINGS)
        self.counts = RequestCounts()
        self._nonfinite_version: int | None = None
        self._samples = deque[Candidates](maxlen=_SAMPLES)  # newest requests, for a warm-up

    @property
    def current(self) -> ServedVersion:
        """The version that is served. Raises NotServed if no version is loaded."""
        served = self.served
        if served is None:
            raise self._not_loaded()
        return served

    @property
    def bounds(self) -> Bounds:
        """The bounds of a request; if no version is loaded, those of a model without columns."""
        served = self.served
        if served is None:
            return self._limits.bounds(0)
        return served.bounds

    @property
    def batcher(self) -> Batcher:
        """The queue. Raises NotServed if no version is loaded."""
        batcher = self._batcher
        if batcher is None:
            raise self._not_loaded()
        return batcher

    @property
    def ready(self) -> bool:
        """Whether a version is loaded."""
        return self.served is not None

    @property
    def reason(self) -> str:
        """Why the newest version is not served, as the process knows that loads it.

        If it is served: that it gave scores that are NaN or infinite; "" = it did not.
        """
        problem = self.outside_problem or self.own_problem
        served = self.served
        if problem or served is None or served.version.version != self._nonfinite_version:
            return problem
        return self._nonfinite_problem(self._nonfinite_version)

    @property
    def own_problem(self) -> str:
        """Damaged files, and why the newest version is not served, as far as this process knows."""
        return " ".join(filter(None, (self.damage, self.problem)))

    @property
    def waiting_rows(self) -> int:
        """Number of candidates in the queue."""
        if self._batcher is None:
            return 0
        return self._batcher.waiting_rows

    def serve(self, loaded: ModelVersion, problem: str = "") -> None:
        """Answer with this version from the next batch on.

        A batch under way ends with the version that it began with. `problem`: why this is not the
        version that was requested.
        """
        inputs = ModelInputs(loaded.schema, column_shapes(loaded.graph))
        bounds = self._limits.bounds(len(inputs.allowed))
        session = InferenceSession(loaded, self.cache, most_entries=self._limits.request_entries)
        served = ServedVersion(session, inputs, bounds)
        self._warm_up(served)
        if self._batcher is None:
            self._batcher = Batcher(
                lambda: self.current,
                self._limits,
                self._readers,
                self._scored,
                on_loop=self.cache is None,  # with a cache, scoring may wait for rows
            )
        if self.served is not None:
            self.swaps += 1
        self.served = served
        self.problem = problem
        self.damage = ""
        log.info("model %s serves version %d (%s)", self.name, loaded.version, loaded.digest[:12])

    def _warm_up(self, served: ServedVersion) -> None:
        """Score the newest small requests, or zeros, so that the first answers are not slow."""
        samples = list(self._samples)
        if not samples and self.cache is None:  # the rows of zeros would be fetched
            samples = [served.inputs.zeros()]
        for sample in samples:
            with suppress(HotbedError):  # other columns than those of this version
                served.session.ask(sample.columns, sample.context)

    def advance(self, newest: ModelVersion) -> None:
        """Serve a version, unless it is served already or the model is unloaded."""
        if not self.wanted:
            return
        if self.served is None or not self.served.version.is_same(newest):
            self.serve(newest)
        self.problem = self.outside_problem

    def set_wanted(self, wanted: bool) -> None:
        """Serve the newest version of a watched model, or none."""
        self.wanted = wanted
        self.look()

    def failed(self, error: Exception) -> None:
        """Record and log a problem; the served version stays."""
        self.problem = str(error)
        self.problems += 1
        consequence = "it is not served"
        if self.served is not None:
            consequence = f"version {self.served.version.version} stays"
        log.warning("model %s: %s; %s", self.name, error, consequence)

    def note_damage(self, files: Iterable[str]) -> None:
        """Record and log damaged files of the served version, which stays until a load."""
        self.damage = f"damaged files: {', '.join(sorted(files))}. Load the model again."
        self.problems += 1
        log.error("model %s: %s", self.name, self.damage)

    def recovered(self, error: Exception) -> None:
        """Forget a problem that is over; the served version stays."""
        if self.problem == str(error):
            self.problem = ""
            log.info("model %s: what it follows can be read again", self.name)

    def close(self) -> None:
        """Answer the requests that wait, then stop serving."""
        batcher = self._batcher
        self._batcher = None
        if batcher is not None:
            batcher.close()
        self.served = None

    def _note_nonfinite(self, scores: Scores) -> None:
        """Count scores that are NaN or infinite, and log the first ones of a version."""
        self.counts.nonfinite += scores.nonfinite
        if self._nonfinite_version != scores.version:
            self._nonfinite_version = scores.version
            log.warning("model %s: %s", self.name, self._nonfinite_problem(scores.version))

    def _nonfinite_problem(self, version: int) -> str:
        return (
            f"version {version} gave scores that are NaN or infinite, got {self.counts.nonfinite} "
            "of all versions. Look at its weights, and at the numbers of requests."
        )

    def _not_loaded(self) -> NotServed:
        return NotServed(
            f"model {self.name!r}: not loaded, got {self.reason or 'an unload'}. Load it."
        )

    def _scored(
        self, served: ServedVersion, batch: Sequence[Scored], started: float, ended: float
    ) -> None:
        seconds = ended - started
        self.batches += 1
        self.batch_seconds += seconds
        counts = self.counts
        counts.last_scored = time.time()
        counts.scored += len(batch)
        for request, answer in batch:
            self.rows += request.num_rows
            counts.queue_seconds += started - request.queued
            counts.compute_seconds += seconds
            if answer.nonfinite:
                self._note_nonfinite(answer)
            if self.log is not None and request.request_id and request.takes(answer):
                self._log(self.log, request, answer, served, ended)
        first = batch[0][0]
        if self.batches % _BATCHES_A_SAMPLE == 1 and first.is_small:
            self._samples.append(first.candidates)

    def _log(
        self,
        log: RequestLogWriter,
        request: QueuedRequest,
        answer: Scores,
        served: ServedVersion,
        ended: float,
    ) -> None:
        if log.wants(request.request_id):
            log.add(
                AnsweredRequest(
                    request.request_id,
                    int(1e6 * self.counts.last_scored),
                    ended - request.queued,
                    request.num_rows,
                    request.columns,
                    request.context,
                    answer.outputs,
                    answer.version,
                    served.version.digest,
                    _ROUTE,
                )
            )
