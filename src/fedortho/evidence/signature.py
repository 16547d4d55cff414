"""Ed25519 signatures: who vouches for some bytes, not whether what they say is true."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.errors import FedOrthoError
from fedortho.storage.files import replacing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


LONGEST = 100_000  # bytes of a key file; it has some hundred


class BadSignature(FedOrthoError):
    """A signature that is not of these bytes by this key, or a key that is none."""


def make_key(path: Path) -> tuple[Path, str]:
    """Write a new private key, readable by its owner only, and beside it the public one; its path and its hex."""
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    public = path.with_suffix(".pub")
    for file in (path, public):
        if file.exists() or path == public:
            raise FedOrthoError(f"{file} is there already or names the public key; choose another name, such as my.pem")
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
        raise BadSignature(f"{path} is no Ed25519 private key; make one with fedortho bundle key -o {path.stem}.pem")
    return key


def load_public(path: Path) -> str:
    """The public key in a PEM file, as hex."""
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _parse(path, load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise BadSignature(f"{path} is no Ed25519 public key; fedortho bundle key writes one beside the private key")
    return key.public_bytes_raw().hex()


def public_half(key: "Ed25519PrivateKey") -> str:
    return key.public_key().public_bytes_raw().hex()


def check_signature(public: str, signature: bytes, message: bytes) -> None:
    """Refuse a signature that the holder of this key (hex) did not make of this message."""
    _need()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"the signature is not one by the key {public[:16]} of these bytes") from error


def _parse(path: Path, load: Any) -> Any:
    try:
        with path.open("rb") as stream:
            return load(stream.read(LONGEST))
    except OSError as error:
        raise BadSignature(f"the key {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # cryptography raises several kinds; each one means the same to the user
        raise BadSignature(f"{path} is no PEM key without a password; fedortho bundle key makes one") from error


def _need() -> None:
    try:
        import cryptography  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise FedOrthoError("signatures need cryptography: pip install 'fedortho[evidence]'") from error
