"""Ed25519 signatures: they prove who signed a file, not that its contents are true."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.errors import FedOrthoError
from fedortho.storage.files import replacing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


LONGEST = 100_000  # bytes of a key file; it has some hundred


class BadSignature(FedOrthoError):
    """A signature that does not match the bytes or the key, or a file that is not a key."""


def make_key(path: Path) -> tuple[Path, str]:
    """Write a new private key, readable by its owner only, and a public key beside it; its path and its hex."""
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    public = path.with_suffix(".pub")
    for file in (path, public):
        if file.exists() or path == public:
            raise FedOrthoError(
                f"{file} exists already or is the public key's name; choose another name, such as my.pem"
            )
    key = Ed25519PrivateKey.generate()
    for file, mode, text in (
        (path, 0o600, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())),
        (public, 0o644, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)),
    ):
        with replacing(file, mode) as temporary:
            temporary.write_bytes(text)
    return public, public_half(key)


def load_key(path: Path) -> "Ed25519PrivateKey":
    """The private key in a PEM file."""
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _parse(path, lambda text: load_pem_private_key(text, None))
    if not isinstance(key, Ed25519PrivateKey):
        raise BadSignature(
            f"{path} is not an Ed25519 private key; make one with fedortho bundle key -o {path.stem}.pem"
        )
    return key


def load_public(path: Path) -> str:
    """The public key in a PEM file, as hex."""
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _parse(path, load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise BadSignature(
            f"{path} is not an Ed25519 public key; fedortho bundle key writes one beside the private key"
        )
    return key.public_bytes_raw().hex()


def public_half(key: "Ed25519PrivateKey") -> str:
    return key.public_key().public_bytes_raw().hex()


def check_signature(public: str, signature: bytes, message: bytes) -> None:
    """Refuse a signature of this message that was not made with this key (hex)."""
    _need()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"the signature does not match the key {public[:16]} and these bytes") from error


def _parse(path: Path, load: Any) -> Any:
    try:
        with path.open("rb") as stream:
            return load(stream.read(LONGEST))
    except OSError as error:
        raise BadSignature(f"the key {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # cryptography raises several kinds; each one means the same to the user
        raise BadSignature(f"{path} is not a PEM key without a password; fedortho bundle key makes one") from error


def _need() -> None:
    try:
        import cryptography  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise FedOrthoError("signatures need cryptography: pip install 'fedortho[evidence]'") from error
