# SPDX-License-Identifier: Apache-2.0
"""What a server answers about its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from hotbed.errors import HotbedError, ServingError
from hotbed.serving.client import Client
from hotbed.watch.run_status import Count, Moment

TIMEOUT_SECONDS = 2.0
_CHECKED = ConfigDict(strict=True)
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=_CHECKED)
class ServedRole:
    """A version that a server has for a reason, or that answered.

    Attributes:
        role: stable, canary, shadow or newest; or the reason for which it answered.
        version: its number.
        published: when it was published, in Unix seconds; None = unknown.
        share: of the users that it answers, by its rule; None = no rule says it.
        requests, errors: counts since the server began.
        mean_score: of its answers; None without any.
    """

    role: str
    version: int
    published: Moment | None
    share: float | None
    requests: Count
    errors: Count
    mean_score: float | None


@dataclass(frozen=True, config=_CHECKED)
class ServedModel:
    """A model of a server. Durations are seconds, moments Unix seconds; None = unknown.

    Attributes:
        name: the model.
        state: READY, or why it does not answer.
        version: that answers, as text.
        rule: by which versions answer, as plain values; empty = the newest one.
        revision: of the rule; None = no rule.
        problems: of the model and of its rule.
        roles: its versions.
        published, learned, since: of the version: when it was published, its newest event, and
            when it was loaded.
        p50, p99: latency of the last requests.
        candidates: scored since the server began.
        cache_bytes: rows in memory; None = the server maps all rows.
        logged, dropped: requests in its log and left out of it; None = no log.
    """

    name: str
    state: str
    version: str
    rule: Mapping[str, Any]
    revision: int | None
    problems: Sequence[str]
    roles: Sequence[ServedRole]
    published: Moment | None
    learned: Moment | None
    since: Moment | None
    p50: Seconds | None
    p99: Seconds | None
    candidates: Count
    cache_bytes: Count | None
    logged: Count | None
    dropped: Count | None


class ServerMemory(TypedDict):
    """The smallest limit of memory that holds for a server, and what it is a limit of."""

    used_bytes: Count
    limit_bytes: Annotated[int, Field(gt=0)]
    of: str


@dataclass(frozen=True, config=_CHECKED)
class ServerAnswer:
    """What a server answered.

    Attributes:
        models: its models.
        memory: that it uses; None = unknown.
    """

    models: Sequence[ServedModel]
    memory: ServerMemory | None


class AskedServer:
    """Asks a server for its models, over one connection.

    Attributes:
        url: without a password.

    Args:
        url: such as http://HOST:PORT.
        token: that the server wants; None = none.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        scheme, separator, place = url.rpartition("://")
        self.url = f"{scheme}{separator}{place.rpartition('@')[2]}"
        self._client = Client(url, token, TIMEOUT_SECONDS)

    def read(self) -> ServerAnswer:
        """Return what the server answers now.

        Raises:
            ServingError: it does not answer, or not as `hotbed serve` does.
            Unauthorized: the token is missing or wrong.
        """
        try:
            status = self._client.status()
            models = [_model(model) for model in status["models"]]
            return ServerAnswer(models=models, memory=status.get("memory"))
        except HotbedError:
            raise
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            member = ".".join(map(str, first["loc"]))
            raise _not_a_server(f"{member}: {first['msg']}") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _not_a_server(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _not_a_server(fault: str) -> ServingError:
    return ServingError(
        f"/status: not the answer of a server, got {fault}. Give the address of `hotbed serve`, "
        "and watch it with its version of Hotbed."
    )


def _model(status: Mapping[str, Any]) -> ServedModel:
    routes = status["routes"]
    cache = status["cache"] or {}
    log = status["log"] or {}
    problems = (status["reason"], routes["problem"])
    return ServedModel(
        name=status["name"],
        state=status["state"],
        version=status["version"],
        rule=routes["rule"],
        revision=routes["revision"],
        problems=list(dict.fromkeys(filter(None, problems))),
        roles=_roles(routes),
        published=status["published"],
        learned=status["learned"],
        since=status["since"],
        p50=status["p50"],
        p99=status["p99"],
        candidates=status["rows"],
        cache_bytes=cache.get("bytes"),
        logged=log.get("logged"),
        dropped=log.get("dropped"),
    )


def _roles(routes: Mapping[str, Any]) -> list[ServedRole]:
    """Return the versions that a model has by its rule, then others that have answered."""
    traffic = {(counts["route"], counts["version"]): counts for counts in routes["traffic"]}
    canary = routes["rule"].get("canary")
    roles = []
    for role, entry in routes["roles"].items():
        share = None
        if canary is not None and role in ("stable", "canary"):
            share = canary["share"] if role == "canary" else 1 - canary["share"]
        counts = traffic.pop((role, entry["version"]), {})
        roles.append(_role(role, entry["version"], entry["published"], share, counts))
    for (role, version), counts in traffic.items():
        roles.append(_role(role, version, None, None, counts))
    return roles


def _role(
    role: str, version: int, published: float | None, share: float | None, counts: Mapping[str, Any]
) -> ServedRole:
    mean = counts["score_sum"] / counts["scores"] if counts.get("scores") else None
    return ServedRole(
        role=role,
        version=version,
        published=published,
        share=share,
        requests=counts.get("requests", 0),
        errors=counts.get("errors", 0),
        mean_score=mean,
    )
