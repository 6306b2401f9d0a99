"""Certificates for tests, made as docs/how-to/secure.md makes them with openssl."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ridgeline.contracts.rpc.tls import SERVER_NAME, TlsFiles

DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority; the files that it signs are in one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _sign(name, self._key, name, self._key, [], ca=True)
        self.ca_file = self._write("authority.pem", _pem(self._certificate))

    def issue(self, name: str = "node", server_name: str = SERVER_NAME, valid_days: float = 1.0) -> TlsFiles:
        """Write a certificate and its key; return the paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _sign(name, key, self._name, self._key, [server_name], valid_days=valid_days)
        return TlsFiles(self.ca_file, self._write(f"{name}.pem", _pem(signed)), self._write(f"{name}.key", _key(key)))

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / f"{self._name}-{name}"
        path.write_bytes(content)
        return str(path)


def _sign(subject, key, issuer, issuer_key, server_names, ca=False, valid_days=1.0):
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now + valid_days * DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if server_names:
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in server_names])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key(key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
