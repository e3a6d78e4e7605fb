"""An authority for tests, and the certificates that it signs."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


class Authority:
    """Writes its files into `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name, self._key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.file = self._write(f"{name}.pem", self._certificate(name, self._key.public_key(), days=9, ca=True))

    def sign(self, name: str, *, days: int = 9, address: str = "127.0.0.1") -> tuple[str, str]:
        """Returns the files of a certificate for an IP address, and of its key. `days`: until it expires."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(name, key.public_key(), days=days, address=address)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._write(f"{name}.pem", certificate), self._write(f"{name}.key", private)

    def _certificate(
        self, name: str, key: ec.EllipticCurvePublicKey, *, days: int, ca: bool = False, address: str | None = None
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 30 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, data: bytes) -> str:
        path = self._folder / name
        path.write_bytes(data)
        return str(path)
