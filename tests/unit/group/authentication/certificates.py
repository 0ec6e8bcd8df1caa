"""Certificates of an authority, made with `cryptography`."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["make_certificates"]


def make_certificates(folder: Path) -> dict[str, str]:
    """Writes an authority, a certificate and its key; returns the variable with the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("ca", "worker")
    ]
    now = datetime.datetime.now(datetime.UTC)
    for index, file in enumerate(("ca.crt", "tls.crt")):
        is_authority = index == 0
        made = (
            x509.CertificateBuilder()
            .subject_name(names[index])
            .issuer_name(names[0])
            .public_key(keys[index].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(keys[0], hashes.SHA256())
        )
        (folder / file).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    text = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "tls.key").write_bytes(text)
    return {"STRATAGEM_TLS_DIR": str(folder)}
