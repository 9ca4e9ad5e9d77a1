# SPDX-License-Identifier: Apache-2.0
"""The main functions of `hotbed serve` and `hotbed parameter-server`; `hotbed verify` of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hotbed import config
from hotbed.connectors.request_log import RequestLog
from hotbed.errors import ConfigError, HotbedError
from hotbed.files import Where
from hotbed.logs import log_lines, write_logs_aside
from hotbed.persist.publish import Follower
from hotbed.serving.routes.changing import WATCH_SECONDS, RoutedProcesses, RouteWatcher
from hotbed.serving.routes.editing import ReplicaRoute, change_routes, differ, replica_routes
from hotbed.serving.routes.leases import Leases
from hotbed.serving.routes.rule import LogRule
from hotbed.serving.server.options import (
    NO_LOGS,
    LogOptions,
    Options,
    RemoteOptions,
    RowsOptions,
    ServerLimits,
)
from hotbed.serving.server.scoring.models import Models, check_model_name
from hotbed.serving.server.tokens import read_tokens
from hotbed.serving.stores.following import Following, KeepsOn, collecting, is_topic, open_follower
from hotbed.serving.stores.opening import is_remote
from hotbed.serving.stores.verifying import is_served, verify_served

__all__ = [
    "change_routes",
    "compare_replicas",
    "is_served",
    "rescore_log",
    "serve_models",
    "serve_rows",
    "verify_served",
]
if TYPE_CHECKING:
    from hotbed.serving.request_log.rescoring import Rescored

log = logging.getLogger("hotbed.serving")
_SETTINGS = (Options, ServerLimits, RemoteOptions, LogOptions)
Settings = TypeVar("Settings", Options, ServerLimits, RemoteOptions, LogOptions)


def serve_models(
    sources: Sequence[str],
    watch: Sequence[str],
    settings: Mapping[str, Any],
    routes: str | None = None,
) -> None:
    """Serve exported models until SIGTERM; the command `hotbed serve`.

    Args:
        sources: the models, each `[NAME=]PATH`.
        watch: what models follow, each `[NAME=]SOURCE`.
        settings: keys of `Options`, `ServerLimits`, `RemoteOptions` and `LogOptions`.
        routes: the file of rules; None = each model follows its newest version.

    Raises:
        ConfigError: a source or a setting is wrong.
    """
    from hotbed.serving.server.server import Server
    from hotbed.serving.workers.pool import PoolRules, WorkerPool

    options, limits, remote, logs = _build_settings(settings)
    log_lines("json")
    by_name = models_of(sources)
    for name in by_name:
        check_model_name(name)
    followed = followed_of(watch, by_name)
    store = options.parameter_server()
    own_logs = logs if options.workers == 1 else NO_LOGS  # each worker writes its own
    models = Models(store, limits, remote.connect, remote.cache(), logs=own_logs)
    names = [name for name in by_name if options.workers == 1 or not is_remote(by_name[name])]
    _load_each(
        names,
        lambda name: models.add(name, by_name[name], is_followed=(name, by_name[name]) in followed),
    )
    server: Server | WorkerPool
    rules: RoutedProcesses
    if options.workers == 1:
        server = Server(models, options)  # listens from here on
        rules = models.rules
    else:
        options = replace(options, rows=str(store.folder))
        server = WorkerPool(models, by_name, options, limits, remote, logs)
        rules = PoolRules(models.rules, server)
    models.check_kept(options.check_seconds)
    write_logs_aside()
    leases = _leases(store.folder, followed)
    with _following(followed, models.follow) as cache:
        places = _places(by_name, followed, cache)
        with _watching(routes, places, rules, leases, logs.check_rule):
            server.run()


def serve_rows(
    sources: Sequence[str],
    watch: Sequence[str],
    settings: Mapping[str, Any],
    routes: str | None = None,
) -> None:
    """Serve the rows of exported models until SIGTERM; the command `hotbed parameter-server`.

    Args:
        sources: the models, each `[NAME=]PATH`.
        watch: what models follow, each `[NAME=]SOURCE`.
        settings: keys of `RowsOptions`.
        routes: the file of rules; None = each model has its newest version.

    Raises:
        ConfigError: a source or a setting is wrong.
    """
    from hotbed.serving.server.endpoints.rows_rules import RowsRules
    from hotbed.serving.server.endpoints.rows_service import RowsServer

    options = config.build(dict(settings), RowsOptions, "parameter-server")
    log_lines("json")
    by_name = models_of(sources)
    followed = followed_of(watch, by_name)
    store = options.parameter_server()
    server = RowsServer(store, list(by_name), options)
    _load_each(
        by_name,
        lambda name: server.load_or_keep(
            name, by_name[name], is_followed=(name, by_name[name]) in followed
        ),
    )
    following = Following(
        lambda name, error: log.warning(
            "model %s: %s; it keeps the version that it has", name, error
        )
    )

    def follow(name: str, follower: Callable[[], Follower]) -> None:
        following.follow(name, follower, partial(server.load, name))

    def check(name: str, keeps_on: KeepsOn) -> None:
        if server.check(name, keeps_on) and not following.again(name):
            source = by_name[name]
            server.load_from(name, source, is_followed=(name, source) in followed)

    for name in by_name:
        following.check_kept(name, partial(check, name), options.check_seconds)
    write_logs_aside()
    with _following(followed, follow) as cache:
        places = _places(by_name, followed, cache)
        leases = _leases(store.folder, followed)
        rules = RowsRules(store)
        with _watching(routes, places, rules, leases, rules.check_log):
            server.run()
        following.close()


def rescore_log(log: str, model: str) -> tuple[list[Rescored], bool]:
    """Score a request log again; the command `hotbed rescore`.

    Returns:
        The comparison by version, and whether all scores of the model's own version are equal.
    """
    from hotbed.serving.request_log.rescoring import rescore
    from hotbed.serving.session import InferenceSession

    session = InferenceSession(model)
    versions = rescore(RequestLog(log, follow=False), session)
    digest = session.model.digest
    return versions, not any(each.different for each in versions if each.digest == digest)


def compare_replicas(
    urls: Sequence[str], token_file: str | None
) -> tuple[list[ReplicaRoute], bool]:
    """Ask replicas by which rules they answer; `hotbed route --show`.

    Returns:
        A row for each model of each replica, and whether all answer alike.
    """
    token = None if token_file is None else read_tokens(token_file)[0]
    rows = replica_routes(urls, token)
    return rows, not differ(rows)


def _load_each(names: Iterable[str], load: Callable[[str], None]) -> None:
    """Load each model. One that cannot be loaded stops the others only if all of them fail."""
    names = list(names)
    failures = list[Exception]()
    for name in names:
        try:
            load(name)
        except (HotbedError, OSError) as error:
            log.error("model %s: it is not served: %s", name, error)
            failures.append(error)
    if failures and len(failures) == len(names):
        raise failures[0]


def _build_settings(
    settings: Mapping[str, Any],
) -> tuple[Options, ServerLimits, RemoteOptions, LogOptions]:
    """Build the four kinds of settings of `hotbed serve` from keys of any of them."""
    keys = {field.name for kind in _SETTINGS for field in fields(kind)}
    for key, value in settings.items():
        if key not in keys:
            advice = config.did_you_mean(key, keys)
            if key == "http_port":  # as the flag is named
                advice = "Give the flag --http-port, or the key port."
            raise ConfigError(
                f"serve.{key}: unknown key, got {key!r} with the value {value!r}. {advice}"
            )
    return (
        _build(Options, settings),
        _build(ServerLimits, settings),
        _build(RemoteOptions, settings),
        _build(LogOptions, settings),
    )


def _build(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Build one kind of settings from those keys that it has."""
    names = {field.name for field in fields(kind)}
    spec = {key: value for key, value in settings.items() if key in names}
    built: Settings = config.build(spec, kind, "serve")
    return built


@contextmanager
def _following(
    followed: Sequence[tuple[str, str]], follow: Callable[[str, Callable[[], Follower]], None]
) -> Iterator[Path]:
    """Call `follow` with each followed model and what opens its source.

    Yield the folder in which the messages of topics are collected, by the number of the source.
    """
    with collecting(source for _, source in followed) as cache:
        for number, (name, source) in enumerate(followed):
            folder = cache / str(number)
            follow(name, partial(open_follower, source, folder))
        yield cache


@contextmanager
def _watching(
    routes: str | None,
    places: Mapping[str, Sequence[Where]],
    rules: RoutedProcesses,
    leases: Leases,
    check_log: Callable[[LogRule, str], None],
) -> Iterator[None]:
    """Put the rules of a file in force, and watch it until the block ends.

    Args:
        routes: the file; None = there is none.
        places: where the versions of each model lie.
        rules: of the processes that answer.
        leases: of the versions that rules name.
        check_log: raises ConfigError for what the request log of the processes cannot do.
    """
    watching = Following(lambda _, error: log.error("%s", error))
    if routes is not None:
        watcher = RouteWatcher(routes, places, rules, leases, check_log)
        watcher.start()
        watching.repeat(routes, watcher.step, WATCH_SECONDS, at_once=False)
    yield
    watching.close()


def _leases(rows: Path, followed: Sequence[tuple[str, str]]) -> Leases:
    """Return the leases of the server with this served folder, in the folders that it follows."""
    published = {name: [source] for name, source in followed if not is_topic(source)}
    return Leases(str(rows.resolve()), published)


def _places(
    by_name: Mapping[str, str], followed: Sequence[tuple[str, str]], cache: Path
) -> dict[str, list[Where]]:
    """Return where the versions of each model lie that this process loads."""
    places: dict[str, list[Where]] = {name: [] for name in by_name if not is_remote(by_name[name])}
    for number, (name, source) in enumerate(followed):
        places[name].append(cache / str(number) if is_topic(source) else source)
    for name, sources in places.items():
        if by_name[name] not in sources:
            sources.append(by_name[name])
    return places


def models_of(sources: Sequence[str]) -> dict[str, str]:
    """Return the sources of `[NAME=]SOURCE` arguments by name.

    A source without a name takes that of its folder. Raises ConfigError for two of one name.
    """
    models = dict[str, str]()
    for argument in sources:
        name, source = _split_name(argument, "")
        if name in models:
            raise ConfigError(
                f"models: two models have one name, got {name!r} for {models[name]} and {source}. "
                "Give each its own name: NAME=SOURCE."
            )
        models[name] = source
    return models


def followed_of(watch: Sequence[str], models: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (model, source) of each `--watch [NAME=]SOURCE`; without a name, of the first model.

    Raises ConfigError for an unknown model, and for one that a parameter server serves.
    """
    first = next(iter(models))
    followed = [_split_name(argument, first) for argument in watch]
    for name, _ in followed:
        if name not in models:
            raise ConfigError(
                f"--watch: unknown model, got {name!r}. {config.did_you_mean(name, models)}"
            )
        if is_remote(models[name]):
            raise ConfigError(
                f"--watch: model {name!r} follows its parameter server, got {models[name]}. Give "
                "--watch to hotbed parameter-server."
            )
    return followed


def _split_name(text: str, default: str) -> tuple[str, str]:
    """Return the name and the source in `[NAME=]SOURCE`."""
    name, equals, source = text.partition("=")
    if equals and name and "/" not in name and ":" not in name:
        return name, source
    folder = Path(text.rstrip("/")).name
    return default or folder or "model", text
