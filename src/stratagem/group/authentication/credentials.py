"""Secret and certificates of a process."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Iterable
from pathlib import Path

from stratagem import environment
from stratagem.group.authentication.handshake import PLAIN, TLS
from stratagem.group.authentication.secret import Secret, key_of, required_secret
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True)
class Certificates:
    """TLS in both directions: a process accepts all certificates of the authority."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    @staticmethod
    def find() -> Certificates | None:
        """Returns those in `STRATAGEM_TLS_DIR`, or None without; ValueError if they are invalid."""
        name = environment.read("tls_dir")
        if not name:
            return None
        folder = Path(name).expanduser()
        try:
            sides = (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
            client, server = (_context(side, folder) for side in sides)
        except OSError as error:  # errors of TLS among them
            raise ValueError(
                explain(
                    f"TLS cannot be set up with STRATAGEM_TLS_DIR={name!r}: {error}.",
                    expected="a folder with tls.crt, its private key tls.key, and ca.crt, the "
                    "authority that signed the certificates of all processes.",
                    fix="correct the folder, or unset the variable.",
                    code="SG516",
                )
            ) from error
        return Certificates(client, server)


def _context(side: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The authority signs for the processes of this cluster alone, at whatever address they are.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Proof that a process belongs to its run; without a secret, any process can give it."""

    secret: Secret | None = None
    certificates: Certificates | None = None

    @staticmethod
    def find(who: str, hosts: Iterable[str], *, allow_unauthenticated: bool = False) -> Credentials:
        """Returns those of this process; the arguments and errors are of `required_secret`."""
        secret = required_secret(who, hosts, allow_unauthenticated=allow_unauthenticated)
        return Credentials(secret, Certificates.find())

    def key(self, purpose: str) -> bytes:
        """Returns the key for one kind of connection."""
        return key_of(self.secret, purpose)

    @property
    def mode(self) -> bytes:
        """Mode of the handshake."""
        return PLAIN if self.certificates is None else TLS
