# SPDX-License-Identifier: Apache-2.0
"""Who may ask a server: tokens with roles, and certificates for TLS."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import ssl
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

from hotbed.errors import ConfigError

log = logging.getLogger("hotbed.serving")
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers that proxies add."""
INFER = "infer"
OPERATE = "operate"
SCRAPE = "scrape"
ANY_ROLE = ""
"""The role of calls that every token may make."""
_ROLES = frozenset({INFER, OPERATE, SCRAPE})

Roles: TypeAlias = Sequence[tuple[str, Sequence[str]]]
"""The digest of each token, and its roles."""
Value = TypeVar("Value")


class Caller(NamedTuple):
    """Where a call comes from, and its token.

    Attributes:
        authorization: the Authorization header.
        peer: address of the other end of the connection.
        origin: the Origin header, which browsers send; "" = none.
        host: the Host header; "" = not known, as over gRPC.
        is_forwarded: whether a proxy forwarded the call, so that `peer` is the proxy.
    """

    authorization: str | None
    peer: str
    origin: str = ""
    host: str = ""
    is_forwarded: bool = False


class Denied(NamedTuple):
    """Why a call is rejected. `is_known`: the token is valid, or none is needed."""

    is_known: bool
    reason: str


class RereadFile(Generic[Value]):
    """The content of a file of tokens, read again within a second of a change.

    If the new content is wrong or cannot be read, the content from before stays valid, the problem
    is logged once, and the file is read until it can be.

    Args:
        path: the file.
        read: reads it; raises ConfigError for wrong content.
        check_seconds: least time between two looks at the file.
    """

    def __init__(self, path: str, read: Callable[[str], Value], check_seconds: float = 0.5) -> None:
        self._check_seconds = check_seconds
        self._path = path
        self._read = read
        self._stamp = _stamp_of(path)
        self._content = read(path)
        self._problem = ""  # of the newest content
        self._checked = time.monotonic()

    def content(self) -> Value:
        """Return the newest content that is not wrong."""
        now = time.monotonic()
        if now - self._checked < self._check_seconds:
            return self._content
        self._checked = now
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return self._content
        try:
            self._content = self._read(self._path)
        except ConfigError as error:
            if str(error) != self._problem:
                log.error("%s The tokens from before stay.", error)
            self._problem = str(error)
            return self._content
        self._stamp = stamp
        self._problem = ""
        log.info("the tokens of %s were read again", self._path)
        return self._content


class Tokens:
    """Finds the roles of a token in constant time.

    Args:
        content: returns the digests and roles of the tokens that are valid now.
    """

    def __init__(self, content: Callable[[], Roles]) -> None:
        self._content = content

    def roles(self, authorization: str | None) -> frozenset[str]:
        """Return the roles of the token in an Authorization header; none for an unknown token.

        The header is `Bearer TOKEN`, or `Basic` with any user and the token as password.
        """
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() == "basic":
            try:
                token = b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return frozenset()
        elif kind.lower() != "bearer":
            return frozenset()
        digest = _digest_of(token.strip())
        roles = set[str]()
        for expected, roles_of_token in self._content():  # every digest is compared
            if hmac.compare_digest(digest, expected):
                roles.update(roles_of_token)
        return frozenset(roles)


def is_open(tokens: Tokens | None, role: str) -> bool:
    """Return whether calls that need `role` are never rejected, whoever makes them."""
    return tokens is None and role != OPERATE


def denied(tokens: Tokens | None, role: str, caller: Caller) -> Denied | None:
    """Return why a call that needs `role` is rejected; None if it is not.

    Without tokens, calls that operate the server come from its own machine only. Pages of other
    sites in a browser never operate it.
    """
    if tokens is not None:
        roles = tokens.roles(caller.authorization)
        if not roles:
            return Denied(False, "no token, or a wrong one. Send Authorization: Bearer TOKEN.")
        if role != ANY_ROLE and role not in roles:
            reason = f"the token: expected one with the role {role}, got {', '.join(sorted(roles))}"
            return Denied(True, f"{reason}. Send a token that has it.")
    if role != OPERATE:
        return None
    if caller.origin and (
        not caller.host
        or urlsplit(caller.origin).netloc != caller.host
        or (tokens is None and not _is_local_name(caller.host))
    ):
        return Denied(
            True,
            f"origin: expected none, or this server's own, got {caller.origin[:100]!r}. Call it "
            "from a program.",
        )
    if tokens is None and (caller.is_forwarded or not _is_loopback(caller.peer)):
        return Denied(
            True,
            "a call that operates the server: without token_file, expected one from the machine "
            f"of the server, got {caller.peer}. Start the server with token_file.",
        )
    return None


def _is_local_name(host: str) -> bool:
    """Return whether a Host header names this machine, whatever a name server says."""
    name = urlsplit(f"//{host}").hostname or ""
    return name == "localhost" or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _stamp_of(path: str) -> tuple[int, ...]:
    """Return what changes with the content of a file; () for a file that cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_roles(path: str) -> Roles:
    """Return the digest and the roles of each token of a file.

    Raises:
        ConfigError: the file is not a file of tokens.
    """
    digests = []
    for line in _read_lines(path):
        token, _, roles = line.partition(" ")
        digests.append((_digest_of(token), roles.split(",") if roles else sorted(_ROLES)))
    return digests


def _digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def read_tokens(path: str) -> list[str]:
    """Return the tokens of a file, without their roles.

    Raises:
        ConfigError: the file is not a file of tokens.
    """
    return [line.partition(" ")[0] for line in _read_lines(path)]


def _read_lines(path: str) -> list[str]:
    """Return the lines of a file of tokens: each a token, maybe with a blank and its roles.

    Messages name the line and not the token.

    Raises:
        ConfigError: the file cannot be read or is empty, or it holds a line that is blank, begins
            with "#", or has a character outside ASCII or a blank with anything but roles after it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"token_file: cannot be read, got {path}: {error}. Give a file of tokens."
        ) from error
    if not text.strip():
        raise ConfigError(
            f"token_file: the file holds no token, got {path}, an empty file. Write one token a "
            "line."
        )
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        problem = _problem_of(line)
        if problem:
            raise ConfigError(
                f"token_file: not a token, got {problem}, {path} line {number}. Write one token a "
                "line, or a token, a blank and its roles: infer,operate,scrape."
            )
    return lines


def _problem_of(line: str) -> str:
    """Return why a line of a file of tokens is not a token; "" if it is one."""
    if not line.strip():
        return "a blank line"
    if line.startswith("#"):
        return "a comment"
    token, blank, roles = line.partition(" ")
    if len(token.split()) != 1 or (blank and not set(roles.split(",")) <= _ROLES):
        return "a line with a blank in it, and no roles after it"
    if not line.isascii():
        return "a character outside ASCII, such as a byte order mark"
    return ""


def load_tls(
    cert: str | None, key: str | None, clients: str | None = None
) -> ssl.SSLContext | None:
    """Return key and certificate of PEM files; None if neither file is set.

    With `clients`, a PEM file of certificate authorities,
    connections need a certificate of one of them.

    Raises:
        ConfigError: only one file is set, or they cannot be read or do not fit together.
    """
    if cert is None and key is None and clients is None:
        return None
    if cert is None or key is None:
        raise ConfigError("serve: TLS needs tls_cert and tls_key, got only one of them. Give both.")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        if clients is not None:
            context.load_verify_locations(clients)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
    except OSError as error:
        raise ConfigError(
            f"serve: TLS cannot start, got {cert}, {key}, {clients or 'no tls_clients'}: {error}. "
            "Give a certificate, its key and certificates of authorities as PEM files."
        ) from error
