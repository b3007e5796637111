"""Certificates that a client may trust, and those that it must refuse."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)
HOST = "localhost"
#: Certificates that a client accepts if it trusts the authority.
SOUND = ("good", "by an intermediate")


@dataclass
class Holder:
    """A certificate with its key, and those that lead to the authority."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
    chain: tuple[x509.Certificate, ...] = ()

    def write(self, folder: Path, name: str) -> None:
        pem = [one.public_bytes(serialization.Encoding.PEM)
               for one in (self.certificate, *self.chain)]  # fmt: skip
        (folder / f"{name}.pem").write_bytes(b"".join(pem))
        (folder / f"{name}.key").write_bytes(self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ))  # fmt: skip


def issue(
    subject: str,
    by: Holder | None = None,
    *,
    authority: bool = False,
    days: tuple[int, int] = (-1, 2),
    names: tuple[str, ...] = (HOST,),
    more: tuple[x509.ExtensionType, ...] = (),
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None,
) -> Holder:
    """Make a certificate.

    Args:
        subject: Its subject.
        by: The holder that signs it; None for a certificate that signs itself.
        authority: True if it may sign others.
        days: First and last day of its validity, from now on.
        names: Hosts that it is for.
        more: Further extensions.
        key: Its key, or a new one.

    """
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(by.certificate.subject if by else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + days[0] * DAY)
        .not_valid_after(NOW + days[1] * DAY)
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
    )
    if names and not authority:
        addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if HOST in names else []
        alternatives = [*map(x509.DNSName, names), *addresses]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    for extension in more:
        builder = builder.add_extension(extension, critical=True)
    certificate = builder.sign(by.key if by else key, hashes.SHA256())
    return Holder(certificate, key)


def make(folder: Path) -> list[str]:
    """Write certificates of all kinds, and the authority's as `ca.pem`; return their names."""
    root = issue("Test authority", authority=True)
    root.write(folder, "ca")
    middle = issue("Middle", root, authority=True)
    elsewhere = x509.NameConstraints([x509.DNSName("example.org")], None)
    client = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    chained = issue(HOST, middle)
    chained.chain = (middle.certificate,)

    def below(**options: object) -> Holder:
        """Return one that an intermediate of some kind has signed."""
        between = issue("Between", root, **options)
        leaf = issue(HOST, between)
        leaf.chain = (between.certificate,)
        return leaf

    broken = Holder(chained.certificate, chained.key)
    holders = {
        "good": issue(HOST, root),
        "by an intermediate": chained,
        "expired": issue(HOST, root, days=(-3, -1)),
        "not yet valid": issue(HOST, root, days=(1, 3)),
        "of another host": issue("example.org", root, names=("example.org",)),
        "of all hosts": issue("*", root, names=("*",)),
        "of no host": issue(HOST, root, names=()),
        "signed by itself": issue(HOST),
        "of an unknown authority": issue(HOST, issue("Nobody", authority=True)),
        "of one that has the authority's name": issue(HOST, issue("Test authority",
                                                                  authority=True)),
        "without its intermediate": broken,
        "by one that is no authority": below(),
        "by an expired intermediate": below(authority=True, days=(-3, -1)),
        "by an intermediate for other hosts": below(authority=True, more=(elsewhere,)),
        "for clients alone": issue(HOST, root, more=(client,)),
        "of a short key": issue(HOST, root, key=rsa.generate_private_key(65537, 1024)),
    }  # fmt: skip
    for name, holder in holders.items():
        holder.write(folder, name)
    return list(holders)
