# SPDX-License-Identifier: Apache-2.0
"""A model of a server: the versions that it serves, their queues, its counts and its problem."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from hotbed.errors import HotbedError, NotServed
from hotbed.serving.arguments import column_shapes
from hotbed.serving.cache import EmbeddingCache
from hotbed.serving.kept import kept_columns
from hotbed.serving.protocol.bodies import Bounds, Readers
from hotbed.serving.protocol.inputs import Candidates, ModelInputs
from hotbed.serving.request_log.records import AnsweredRequest
from hotbed.serving.request_log.writer import RequestLogWriter
from hotbed.serving.routes.rule import CANARY, NEWEST, SHADOW, LogRule, ModelRule, rule_of
from hotbed.serving.routes.split import UserSplit
from hotbed.serving.server.meters import RequestCounts
from hotbed.serving.server.options import ServerLimits
from hotbed.serving.server.scoring.batching import Batcher, QueuedRequest, Scored, ServedVersion
from hotbed.serving.server.scoring.caches import ModelCaches
from hotbed.serving.server.scoring.shadow import ShadowScorer
from hotbed.serving.server.traffic import ShadowCounts, VersionTraffic
from hotbed.serving.session import InferenceSession, Scores
from hotbed.serving.stores.base import ModelVersion, RoutesInForce
from hotbed.serving.stores.held import STABLE
from hotbed.serving.threads import DaemonThreads

log = logging.getLogger("hotbed.serving")
_LOADS = 8  # threads for loads and unloads of a model, most of which wait for each other
_SAMPLES = 4  # requests that a new version scores before it answers
_BATCHES_A_SAMPLE = 64
_READINGS = 512  # request times kept for the page


@dataclass(frozen=True)
class Routing:
    """What answers the requests of a model; replaced as a whole.

    Attributes:
        roles: the version of each role. NEWEST is the one that was loaded last.
        split: which requests the canary answers; None = none.
        in_force: the rule; None = the newest version answers.
    """

    roles: Mapping[str, ServedVersion] = field(default_factory=dict)
    split: UserSplit | None = None
    in_force: RoutesInForce | None = None

    def role_of(self, version: str) -> str | None:
        """Return a role of the version with this number; None where it is not loaded."""
        for role, served in self.roles.items():
            if str(served.version.version) == version:
                return role
        return None


class Model:
    """A model: the versions that it serves, their queues and its last problem. Created by `Models`.

    Attributes:
        find: returns the newest version.
        routing: what answers.
        caches: hold rows of a parameter server; None = the versions hold theirs.
        look: checks at once whether a watched model has a new version or another rule.
        looking: held while `look` runs: the later of two calls serves the newer version.
        changing: held while a load or an unload changes what is served.
        composing: held while the routing changes, which no load holds up.
        aside: threads for loads and unloads that clients request.
        reading: the running read of the source, or None.
        wanted: False after an unload.
        problem: why the newest version is not served; "" = it is.
        damage: which files of the newest version are damaged; "" = none, as far as is known.
        held_damage: and which of the versions of the rule.
        routes_problem: why the newest file of rules is not in force; "" = it is.
        routing_problem: why this process does not answer by the rule in force; "" = it does.
        log: writes the requests that were answered; None = nothing does.
        outside_problem: the problem of the process that loads the model for this one.
        seconds: times of the last answered requests, in seconds.
        traffic: counts of requests by version.
        prepared: versions that a rule to come names, by key.
        unsplit: requests that a canary could not answer, since they have no user.
        shadow_counts: what the shadow did.
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
        self.caches: ModelCaches | None = None
        self.looking = threading.Lock()
        self.changing = threading.RLock()
        self.composing = threading.RLock()
        self.aside = DaemonThreads(_LOADS, "hotbed-load")
        self.reading: Future[ModelVersion] | None = None
        self.look: Callable[[], None] = lambda: None
        self.wanted = True
        self.outside_problem = ""
        self.routing = Routing()
        self._newest: ServedVersion | None = None
        self._fixed = dict[str, ServedVersion]()  # versions that the rule names, by key
        self.prepared = dict[str, ServedVersion]()
        self._rule = ModelRule()
        self._batchers = dict[str, Batcher]()  # by role
        self._shadow: ShadowScorer | None = None
        self.problem = ""
        self.damage = ""
        self.held_damage = ""
        self.routes_problem = ""
        self.routing_problem = ""
        self.swaps: int = 0
        self.problems: int = 0
        self.rows: int = 0
        self.batches: int = 0
        self.batch_seconds: float = 0.0
        self.seconds = deque[float](maxlen=_READINGS)
        self.counts = RequestCounts()
        self.traffic = VersionTraffic()
        self.unsplit: int = 0
        self.shadow_counts = ShadowCounts()
        self._counting = threading.Lock()
        self._opening = threading.Lock()
        self._nonfinite_version: int | None = None
        self._samples = deque[Candidates](maxlen=_SAMPLES)  # newest requests, for a warm-up

    @property
    def served(self) -> ServedVersion | None:
        """The version that answers in general; None = no version is loaded."""
        return self.routing.roles.get(STABLE)

    @property
    def current(self) -> ServedVersion:
        """The version that answers in general. Raises NotServed if no version is loaded."""
        return self.serving(STABLE)

    def serving(self, role: str) -> ServedVersion:
        """Return the version of a role, the stable one if the rule has no such role now."""
        roles = self.routing.roles
        served = roles.get(role) or roles.get(STABLE)
        if served is None:
            raise self._not_loaded()
        return served

    def loaded(self, version: str = "") -> ServedVersion:
        """Return the version of this number, or for "" the one that answers in general.

        Raises NotServed, with the versions that are loaded, where it is not.
        """
        return self.serving(self._role(version))

    @property
    def versions(self) -> list[str]:
        """The numbers of the versions that are loaded, each once, the stable one first."""
        numbers = [str(served.version.version) for served in self.routing.roles.values()]
        return list(dict.fromkeys(numbers))

    @property
    def digests(self) -> set[str]:
        """The digests of the versions that the rule names by their numbers."""
        return {served.version.digest for served in self._fixed.values()}

    @property
    def bounds(self) -> Bounds:
        """The bounds of a request; if no version is loaded, those of a model without columns."""
        served = self.served
        if served is None:
            return self._limits.bounds(0)
        return served.bounds

    def queue(self, version: str = "") -> Batcher:
        """Return the queue of requests, or of those that name a version.

        Raises NotServed if no version is loaded, or not this one.
        """
        return self._queue_of(self._role(version))

    def _role(self, version: str) -> str:
        """Return a role of a version that requests name; that of general requests for ""."""
        role = self.routing.role_of(version) if version else STABLE
        if role is None and self.ready:
            raise NotServed(
                f"model {self.name!r}: version {version[:40]!r} is not loaded, got "
                f"{', '.join(self.versions)}. Name one of these, or leave the version out."
            )
        return role or STABLE

    def _queue_of(self, role: str) -> Batcher:
        """Return the queue of a role. Raises NotServed if no version is loaded."""
        queue = self._batchers.get(role)
        if queue is None:
            with self._opening:
                if STABLE not in self._batchers:
                    raise self._not_loaded()
                queue = self._open_queue(role)
        return queue

    def _open_queue(self, role: str) -> Batcher:
        queue = self._batchers[role] = Batcher(
            partial(self.serving, role),
            self._limits,
            self._readers,
            self._scored,
            self._not_scored,
            self._choose if role == STABLE else lambda request: None,
            on_loop=self.caches is None,  # with a cache, scoring may wait for rows
        )
        return queue

    def _choose(self, request: QueuedRequest) -> Batcher | None:
        """Return the queue of the canary for requests that it answers."""
        split = self.routing.split
        if split is None or request.version:
            return None
        is_canary = split.is_canary(request.candidates)
        if is_canary is None:
            self.unsplit += 1
        return self._queue_of(CANARY) if is_canary else None

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
        damage = (self.damage, self.held_damage)
        problems = (*damage, self.problem, self.routing_problem, self.routes_problem)
        return " ".join(filter(None, problems))

    @property
    def waiting_rows(self) -> int:
        """Number of candidates in the queues."""
        return sum(queue.waiting_rows for queue in list(self._batchers.values()))

    def serve(self, loaded: ModelVersion, problem: str = "") -> None:
        """Answer with this version from the next batch on, where the rule follows the newest one.

        A batch under way ends with the version that it began with. `problem`: why this is not the
        version that was requested.
        """
        newest = self._warmed(loaded, None if self.caches is None else self.caches.newest())
        with self.composing:
            self._newest = newest
            self.problem = problem
            self.damage = ""
            self._compose()
        verb = "serves" if self._rule.stable.pin is None else "holds"
        digest = loaded.digest[:12]
        log.info("model %s %s version %d (%s)", self.name, verb, loaded.version, digest)

    def warm(
        self, keys: Iterable[str], open_version: Callable[[str], ModelVersion]
    ) -> dict[str, ServedVersion]:
        """Return the versions with these keys, each of which has scored some requests."""
        warm = dict[str, ServedVersion]()
        for key in sorted(set(keys)):
            served = self._fixed.get(key) or self.prepared.get(key)
            if served is None:
                version = open_version(key)
                cache = None if self.caches is None else self.caches.of(key, version)
                served = self._warmed(version, cache)
            warm[key] = served
        return warm

    def route(self, in_force: RoutesInForce, versions: Mapping[str, ServedVersion]) -> None:
        """Answer by this rule, with its versions by key, from the next request on."""
        if in_force == self.routing.in_force:
            return
        rule = rule_of(in_force.rule)
        self._fixed = dict(versions)
        self.prepared = {}
        if self.caches is not None:
            self.caches.keep(versions)
        self.held_damage = ""
        self._follow(rule)
        self._compose(in_force)
        if self._shadow is not None and self._shadow.rule != rule.shadow:
            self._shadow.close()
            self._shadow = None
        if self._shadow is None and rule.shadow is not None:
            find = partial(self._of_role, SHADOW)
            self._shadow = ShadowScorer(rule.shadow, find, self.shadow_counts, self._log_shadow)
        log.info("model %s answers by revision %d of its rule", self.name, in_force.revision)

    def _follow(self, rule: ModelRule) -> None:
        """Keep a rule, by which the log goes from now on."""
        self._rule = rule
        if self.log is not None:
            logged = rule.log or LogRule()
            self.log.restrict(logged.sample, logged.omit, logged.hash, logged.max_bytes)

    def _of_role(self, role: str) -> ServedVersion | None:
        return self.routing.roles.get(role)

    def _compose(self, in_force: RoutesInForce | None = None) -> None:
        """Make the routing of the rule, the versions that it names, and the newest one."""
        in_force = in_force or self.routing.in_force
        rule = self._rule
        roles = dict[str, ServedVersion]()
        for role in rule.versions():
            key = in_force.keys.get(role) if in_force else None
            served = self._newest if key is None else self._fixed[key]
            if served is not None:
                roles[role] = replace(served, route=role if in_force else "")
        if self._newest is not None:
            roles[NEWEST] = replace(self._newest, route=NEWEST if in_force else "")
        before = self.served
        split = None if rule.canary is None else UserSplit(rule.canary, self.name)
        self.routing = Routing(roles, split, in_force)
        if self.served is not None and STABLE not in self._batchers:
            with self._opening:
                self._open_queue(STABLE)
        if before and self.served and before.session is not self.served.session:
            self.swaps += 1

    def _warmed(self, loaded: ModelVersion, cache: EmbeddingCache | None) -> ServedVersion:
        """Return a version that has scored some requests."""
        inputs = ModelInputs(loaded.schema, column_shapes(loaded.graph))
        bounds = self._limits.bounds(len(inputs.allowed))
        session = InferenceSession(loaded, cache, most_entries=self._limits.request_entries)
        served = ServedVersion(session, inputs, bounds)
        self._warm_up(served)
        return served

    def _warm_up(self, served: ServedVersion) -> None:
        """Score the newest small requests, or zeros, so that the first answers are not slow."""
        samples = list(self._samples)
        if not samples and self.caches is None:  # the rows of zeros would be fetched
            samples = [served.inputs.zeros()]
        for sample in samples:
            with suppress(HotbedError):  # other columns than those of this version
                served.session.ask(sample.columns, sample.context)

    def advance(self, newest: ModelVersion) -> None:
        """Serve a version, unless it is served already or the model is unloaded."""
        if not self.wanted:
            return
        if self._newest is None or not self._newest.version.is_same(newest):
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

    def note_damage(self, files: Collection[str], of_rule: Collection[str] = ()) -> None:
        """Record and log damaged files.

        Args:
            files: of the newest version, which stays until a load.
            of_rule: of the versions that the rule names, which stay until the rule is renewed.
        """
        if files:
            self.damage = f"damaged files: {', '.join(sorted(files))}. Load the model again."
            self._note(self.damage)
        self.held_damage = ""
        if of_rule:
            names = ", ".join(sorted(of_rule))
            self.held_damage = f"damaged files of versions of the rule: {names}."
            self._note(self.held_damage)

    def _note(self, problem: str) -> None:
        self.problems += 1
        log.error("model %s: %s", self.name, problem)

    def recovered(self, error: Exception) -> None:
        """Forget a problem that is over; the served version stays."""
        if self.problem == str(error):
            self.problem = ""
            log.info("model %s: what it follows can be read again", self.name)

    def close(self) -> None:
        """Answer the requests that wait, then stop serving."""
        with self._opening:
            queues = self._batchers
            self._batchers = {}
        for queue in queues.values():
            queue.close()
        with self.composing:
            self._forget()

    def _forget(self) -> None:
        """Release all versions."""
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None
        self._newest = None
        self._fixed = {}
        self.prepared = {}
        self._follow(ModelRule())
        self.routing = Routing()

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
        with self._counting:  # each role has a thread
            self._count(served, batch, started, ended)

    def _count(
        self, served: ServedVersion, batch: Sequence[Scored], started: float, ended: float
    ) -> None:
        seconds = ended - started
        self.batches += 1
        self.batch_seconds += seconds
        counts = self.counts
        counts.last_scored = time.time()
        counts.scored += len(batch)
        number = served.version.version
        shadow = self._shadow if served.route == STABLE else None
        for request, answer in batch:
            self.rows += request.num_rows
            counts.queue_seconds += started - request.queued
            counts.compute_seconds += seconds
            answers = self.traffic.of(number, answer.route or STABLE)
            answers.add(request.num_rows, ended - request.queued, answer)
            if answer.nonfinite:
                self._note_nonfinite(answer)
            if shadow is not None and answer.route == STABLE:
                shadow.offer(request, answer)
            if request.takes(answer):
                self._log(request, answer, served, counts.last_scored)
        first = batch[0][0]
        if self.batches % _BATCHES_A_SAMPLE == 1 and first.is_small:
            self._samples.append(first.candidates)

    def _not_scored(self, served: ServedVersion) -> None:
        with self._counting:
            self.traffic.of(served.version.version, served.route or STABLE).errors += 1

    def _log_shadow(self, request: QueuedRequest, served: ServedVersion, scores: Scores) -> None:
        self._log(request, replace(scores, route=SHADOW), served, time.time())

    def _log(
        self, request: QueuedRequest, answer: Scores, served: ServedVersion, scored_at: float
    ) -> None:
        """Log the scores of a request, if it is in the sample."""
        log = self.log
        if log is None or not request.request_id or not log.wants(request.request_id):
            return
        columns = dict(request.columns)
        context = dict(request.context)
        for name, values in kept_columns(answer.kept).items():
            of_all = len(values) < request.num_rows
            (context if of_all else columns)[name] = values
        log.add(
            AnsweredRequest(
                request.request_id,
                int(1e6 * scored_at),
                time.perf_counter() - request.queued,
                request.num_rows,
                columns,
                context,
                answer.outputs,
                answer.version,
                served.version.digest,
                answer.route or STABLE,
                lists=served.inputs.lists,
            )
        )
