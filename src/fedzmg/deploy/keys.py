"""Certificates of a server and keys of devices: ``fedzmg deploy keys``."""

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError

CA, CERTIFICATE, SERVER_KEY = "ca.crt", "server.pem", "server.key"
DAYS = 825  # validity of certificates; clients refuse longer ones


def make_keys(folder: Path, hosts: Sequence[str], devices: int) -> list[Path]:
    """Write a CA, a server certificate for some hosts, and a key pair per device.

    Existing files stay: devices can be added, and nothing that is in use changes. The key of the
    CA is not kept, so nobody can sign another server.
    """
    from cryptography.hazmat.primitives import serialization as out
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    plain = out.NoEncryption()
    written: list[Path] = []

    def write(name: str, content: bytes, mode: int) -> None:
        path = folder / name
        # Private from the first byte on.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        written.append(path)

    if not (folder / CA).exists():
        authority, server, key = _certificates(hosts)
        private = key.private_bytes(out.Encoding.PEM, out.PrivateFormat.PKCS8, plain)
        write(SERVER_KEY, private, 0o600)
        write(CERTIFICATE, server.public_bytes(out.Encoding.PEM), 0o644)
        write(CA, authority.public_bytes(out.Encoding.PEM), 0o644)
    for number in range(devices):
        name = f"device-{number}"
        if not (folder / f"{name}.pub").exists():
            key = ec.generate_private_key(ec.SECP384R1())
            (folder / name).unlink(missing_ok=True)
            private = key.private_bytes(out.Encoding.PEM, out.PrivateFormat.OpenSSH, plain)
            public = key.public_key().public_bytes(out.Encoding.OpenSSH, out.PublicFormat.OpenSSH)
            write(name, private, 0o600)
            write(f"{name}.pub", public + b"\n", 0o644)
    return written


def _certificates(hosts: Sequence[str]) -> tuple[Any, Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    public = [key.public_key() for key in keys]
    texts = ("fedzmg federation", "fedzmg server")
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in texts]
    known = [_host(host) for host in dict.fromkeys(["localhost", "127.0.0.1", *hosts])]
    found = []
    for name, key, is_ca in zip(names, public, (True, False), strict=True):
        usage = [not is_ca, *[False] * 4, is_ca, is_ca, False, False]  # sign data or certificates
        builder = (
            x509.CertificateBuilder(names[0], name, key, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
            .add_extension(x509.KeyUsage(*usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public[0]), False)
        )
        if not is_ca:
            server_only = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
            builder = builder.add_extension(x509.SubjectAlternativeName(known), False)
            builder = builder.add_extension(server_only, False)
        found.append(builder.sign(keys[0], hashes.SHA384()))
    return found[0], found[1], keys[1]


def _host(host: str) -> Any:
    from cryptography import x509

    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not host.isascii() or not host.replace("-", "").replace(".", "").isalnum():
        raise InputError(f"host {host!r}: expected a name or an IP address")
    return x509.DNSName(host)
