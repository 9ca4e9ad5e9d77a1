# SPDX-License-Identifier: Apache-2.0
"""Access to a server: tokens, and certificates for TLS."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from base64 import b64decode
from pathlib import Path

from hotbed.errors import ConfigError


class Tokens:
    """Check tokens against those of a file, in constant time."""

    def __init__(self, path: str) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in read_tokens(path)]

    def admit(self, authorization: str | None) -> bool:
        """Return whether an Authorization header holds one of the tokens.

        It is `Bearer TOKEN`, or `Basic` with any user and the token as password.
        """
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() == "basic":
            try:
                token = b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif kind.lower() != "bearer":
            return False
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        # a list, so that every digest is compared
        return any([hmac.compare_digest(digest, expected) for expected in self._digests])


def read_tokens(path: str) -> list[str]:
    """Return the tokens of a file, one a line.

    Messages name the line and not the token.

    Raises:
        ConfigError: the file cannot be read or is empty, or it holds a line that is blank, begins
            with "#", or has a blank or a character outside ASCII in it.
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
                "line and nothing else."
            )
    return lines


def _problem_of(line: str) -> str:
    """Return why a line of a file of tokens is not a token; "" if it is one."""
    if not line.strip():
        return "a blank line"
    if line.startswith("#"):
        return "a comment"
    if len(line.split()) > 1 or line != line.strip():
        return "a line with a blank in it"
    if not line.isascii():
        return "a character outside ASCII, such as a byte order mark"
    return ""


def load_tls(
    cert: str | None, key: str | None
) -> tuple[tuple[bytes, bytes] | None, ssl.SSLContext | None]:
    """Return key and certificate of PEM files, in the forms of gRPC and of Python's `ssl`.

    Both are None if neither file is set.

    Raises:
        ConfigError: only one file is set, or they cannot be read or do not fit together.
    """
    if cert is None and key is None:
        return None, None
    if cert is None or key is None:
        raise ConfigError("serve: TLS needs tls_cert and tls_key, got only one of them. Give both.")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        return (Path(key).read_bytes(), Path(cert).read_bytes()), context
    except OSError as error:
        raise ConfigError(
            f"serve: TLS cannot start, got {cert}, {key}: {error}. Give a certificate and its key "
            "as PEM files."
        ) from error
