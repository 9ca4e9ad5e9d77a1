# SPDX-License-Identifier: Apache-2.0
"""TLS and SASL before a broker that speaks neither: a relay, and the certificates for it."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import struct
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HANDSHAKE, API_VERSIONS, AUTHENTICATE = 17, 18, 36
UNSUPPORTED_MECHANISM, AUTHENTICATION_FAILED = 33, 58


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    key, today = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject, day = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.timedelta(1)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(
        subject, subject, key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(today - day).not_valid_after(today + day)
    builder = builder.add_extension(addresses, critical=False).add_extension(
        x509.BasicConstraints(True, None), True
    )
    made = folder / f"{name}.pem", folder / f"{name}.key"
    made[0].write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    made[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made


class Relay:
    """A TLS address that passes what comes on to a plain one. `users`: their passwords; who is none
    of them is refused by SASL/PLAIN. `client_authority`: clients must show a certificate of it.

    `address`: where it listens; `target`: set it before the first client. `encrypted`: connections
    that came in by TLS; `seen`: mechanism of each SASL handshake.
    """

    def __init__(
        self,
        pair: tuple[Path, Path],
        users: dict[str, str] | None = None,
        client_authority: Path | None = None,
    ) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(*pair)
        if client_authority is not None:
            self._tls.load_verify_locations(client_authority)
            self._tls.verify_mode = ssl.CERT_REQUIRED
        self._users = users
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.target, self.encrypted, self.seen = "", 0, list[str]()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            with raw, self._tls.wrap_socket(raw, server_side=True) as client:
                self.encrypted += 1
                host, port = self.target.split(":")
                with socket.create_connection((host, int(port))) as broker:
                    self._relay(client, broker)
        except OSError:  # of TLS too: the client went, or was refused
            pass

    def _relay(self, client: ssl.SSLSocket, broker: socket.socket) -> None:
        """One request after another, each with its answer: Kafka's order on a connection. All are
        to be answered.
        """
        known = self._users is None
        while request := _message(client):
            kind, version, number = struct.unpack(">hhi", request[:8])
            if kind in (HANDSHAKE, AUTHENTICATE) and self._users is not None:
                (length,) = struct.unpack(">h", request[8:10])
                body = request[10 + max(0, length) :]
                answer, known = self._sasl(kind, version, body)
                _send(client, struct.pack(">i", number) + answer)
                continue
            if not known and kind != API_VERSIONS:
                return
            _send(broker, request)
            _send(client, _message(broker))

    def _sasl(self, kind: int, version: int, body: bytes) -> tuple[bytes, bool]:
        assert self._users is not None
        if kind == HANDSHAKE:
            self.seen.append(body[2:].decode())
            return struct.pack(
                ">hih", 0 if self.seen[-1] == "PLAIN" else UNSUPPORTED_MECHANISM, 1, 5
            ) + b"PLAIN", False
        _, user, password = body[4:].decode().split("\0")
        known = self._users.get(user) == password
        session = struct.pack(">q", 0) if version else b""
        if known:
            return struct.pack(">hhi", 0, -1, 0) + session, True
        reason = b"invalid credentials"
        return struct.pack(">hh", AUTHENTICATION_FAILED, len(reason)) + reason + struct.pack(
            ">i", 0
        ) + session, False


def _message(connection: socket.socket) -> bytes:
    """The next message without its length; empty at the end."""
    head = _exactly(connection, 4)
    return _exactly(connection, struct.unpack(">i", head)[0]) if head else b""


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        if not (more := connection.recv(num_bytes - len(found))):
            return b""
        found += more
    return found


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack(">i", len(message)) + message)
