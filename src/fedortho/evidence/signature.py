"""Ed25519 signatures: they prove who signed a file, not that its contents are true."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.errors import FedOrthoError
from fedortho.storage.files import PRIVATE, read_limited, replacing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LONGEST = 100_000  # bytes of a key file; it has some hundred


class BadSignature(FedOrthoError):
    """A signature that does not match the bytes or the key, or a file that is not a key."""


def make_key(path: Path) -> tuple[Path, str]:
    """Write a new private key, readable by its owner only, and a public key beside it; its path and its hex."""
    ed25519, serialization = _cryptography()
    public = path.with_suffix(".pub")
    if public.exists() or path == public:
        taken = path if path.exists() else public
        raise FedOrthoError(f"{taken} exists already or is the public key's name; choose another, such as my.pem")
    pem = serialization.Encoding.PEM
    if path.exists():
        key = load_key(path)  # of a call that was killed: it gets its public half, and is never overwritten
    else:
        key = ed25519.Ed25519PrivateKey.generate()
        with replacing(path, PRIVATE) as temporary:
            private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            temporary.write_bytes(key.private_bytes(pem, *private))
    with replacing(public) as temporary:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        temporary.write_bytes(key.public_key().public_bytes(pem, form))
    return public, public_half(key)


def load_key(path: Path) -> "Ed25519PrivateKey":
    """The private key in a PEM file."""
    ed25519, serialization = _cryptography()
    wanted = f"Ed25519 private key; make one with fedortho bundle key -o {path.stem}.pem"
    key = _load(path, lambda text: serialization.load_pem_private_key(text, None), ed25519.Ed25519PrivateKey, wanted)
    return key  # type: ignore[no-any-return]  # loaded on demand


def load_public(path: Path) -> str:
    """The public key in a PEM file, as hex."""
    ed25519, serialization = _cryptography()
    wanted = "Ed25519 public key; fedortho bundle key writes one beside the private key"
    key = _load(path, serialization.load_pem_public_key, ed25519.Ed25519PublicKey, wanted)
    return str(key.public_bytes_raw().hex())


def public_half(key: "Ed25519PrivateKey") -> str:
    return key.public_key().public_bytes_raw().hex()


def check_signature(public: str, signature: bytes, message: bytes) -> None:
    """Refuse a signature of this message that was not made with this key (hex)."""
    ed25519, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"the signature does not match the key {public[:16]} and these bytes") from error


def require_signer(path: Path, signer: str | None, public: Path | None) -> None:
    """Refuse a file that was not signed with the key in `public`, if one is given."""
    if public is not None and (wanted := load_public(public)) != signer:
        words = f"signed by the key {signer[:16]}" if signer else "not signed"
        raise BadSignature(f"{path} is {words}; {public} is the key {wanted[:16]}")


def _load(path: Path, load: Any, kind: type, wanted: str) -> Any:
    text = read_limited(path, LONGEST, BadSignature)
    try:
        key = load(text)
    except Exception as error:  # cryptography raises several kinds; each one means the same to the user
        raise BadSignature(f"{path} is not a PEM key without a password; fedortho bundle key makes one") from error
    if not isinstance(key, kind):
        raise BadSignature(f"{path} is no {wanted}")
    return key


def _cryptography() -> tuple[Any, Any]:
    """The modules ed25519 and serialization of an optional library."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise FedOrthoError("signatures need cryptography: pip install 'fedortho[evidence]'") from error
    return ed25519, serialization
