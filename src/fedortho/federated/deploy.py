"""A folder from which a federation is started on several machines: scripts, certificates, keys and the Flower app."""

import datetime
import ipaddress
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated import SWITCHES
from fedortho.federated.launch import CONNECTION, connection_toml, need_flower
from fedortho.storage.files import private_place
from fedortho.storage.records import Scalar

if TYPE_CHECKING:
    from jinja2 import Environment

FIRST_NODE_PORT = 9094  # where a node talks to its own client app, on its own machine only
MOST_NODES = 10_000
HOST_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
VALID_FOR = datetime.timedelta(days=730)


def write_deployment(
    out: Path,
    *,
    nodes: int,
    address: str,
    port: int = 8000,
    node_port: int = FIRST_NODE_PORT,
    insecure: bool = False,
    config: Mapping[str, Scalar],
) -> None:
    """Write the files for a SuperLink and `nodes` nodes, all or none; a second call changes nothing.

    Node N uses the port `node_port` + N on its own machine, unless FEDORTHO_PORT names another when it is started.
    Certificates and keys are new in each folder. The key that signs the certificates is never written.
    """
    need_flower()
    limits = {"nodes": (nodes, MOST_NODES), "port": (port, 65535), "node-port": (node_port, 65536 - nodes)}
    for name, (value, most) in limits.items():
        if not 1 <= value <= most:
            raise BadSetting(f"--{name} is {value}; it must be 1 to {most}")
    link = _link(address, port)
    if not str(out.absolute()).isprintable():
        raise BadSetting(f"--out is {str(out)!a}; choose a path without control characters")
    texts = _texts(out.absolute(), nodes, address, link, node_port, insecure)
    texts |= {f"app/{name}": text for name, text in app_files(config).items()}
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            return _refuse_unless_same(out, texts)
        secrets = {} if insecure else _certificates(address) | _node_keys(nodes)
        out.parent.mkdir(parents=True, exist_ok=True)
        with private_place(out) as fresh:
            (fresh / "new").mkdir(mode=0o700)  # keys are inside: for its owner only
            for name, content in ({name: text.encode() for name, text in texts.items()} | secrets).items():
                path = fresh / "new" / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                is_secret = path.parent.name == "keys" or path.suffix == ".key"  # never readable by others
                mode = 0o755 if path.suffix == ".sh" else 0o600 if is_secret else 0o644
                with open(path, "xb", opener=partial(os.open, mode=mode)) as stream:
                    stream.write(content)
            (fresh / "new").replace(out)
    except OSError as error:
        raise FedOrthoError(f"{out} cannot be written: {error.strerror or error}") from error


def app_pyproject(config: Mapping[str, Scalar]) -> str:
    """The app's pyproject.toml; its config lists every key that a run may set, with its default."""
    import tomli_w  # comes with flwr

    about = {
        "name": "fedortho-app",
        "version": version("fedortho"),
        "description": "Federated training and forgetting with fedortho, which every machine has installed",
        "license": "Apache-2.0",
        "dependencies": [],  # so that Flower has nothing to install
    }
    parts = {"serverapp": "fedortho_app.server_app:app", "clientapp": "fedortho_app.client_app:app"}
    flower = {"publisher": "fedortho", "components": parts, "config": dict(config)}
    return tomli_w.dumps({"project": about, "tool": {"flwr": {"app": flower}}})


def app_files(config: Mapping[str, Scalar]) -> dict[str, str]:
    """The files of the Flower app by name; app/ in the repository and in every deployment is written from them."""
    shim = _templates().get_template("app.py.j2")
    return {
        "pyproject.toml": app_pyproject(config),
        "fedortho_app/__init__.py": '"""The Flower app: two shims, no logic."""\n',
        "fedortho_app/client_app.py": shim.render(module="client", package="federated.client", where="on a client"),
        "fedortho_app/server_app.py": shim.render(
            module="server", package="requests.federated_jobs", where="beside the SuperLink"
        ),
    }


def _link(address: str, port: int) -> str:
    """The SuperLink's host and port as nodes dial it; what is no address is refused."""
    is_plain = re.fullmatch(r"[0-9A-Fa-f.:]+(%[A-Za-z0-9._-]+)?", address)  # the name of an interface may be any text
    if not (is_plain and _is_ip(address)) and not re.fullmatch(HOST_NAME, address):
        raise BadSetting(f"--address is {address!r}; it must be a host name or an IP address without a port")
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_ip(address: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(address))
    return False


def _texts(out: Path, nodes: int, address: str, link: str, node_port: int, insecure: bool) -> dict[str, str]:
    """The scripts, the SuperLink's address as `flwr` reads it, and a README, by name."""
    local = address == "localhost" or (_is_ip(address) and ipaddress.ip_address(address).is_loopback)
    bind = ("127.0.0.1" if address == "localhost" else address) if local else "::" if ":" in address else "0.0.0.0"
    switches = " ".join(f"{name}={shlex.quote(value)}" for name, value in SWITCHES.items())
    slots = {"nodes": nodes, "link": link, "bind": bind, "port": link.rpartition(":")[2], "insecure": insecure}
    slots |= {"switches": switches, "connection": CONNECTION}
    templates = _templates()
    names = ("superlink.sh", "README.txt") if insecure else ("superlink.sh", "README.txt", "register.sh")
    texts = {name: templates.get_template(f"{name}.j2").render(slots) for name in names}
    script, numbers = templates.get_template("node.sh.j2"), range(nodes)
    texts |= {f"node-{node}.sh": script.render(slots, node=node, own_port=node_port + node) for node in numbers}
    return texts | {"config.toml": connection_toml(link, None if insecure else out / "ca.crt")}


def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedortho", "federated/deployment")
    made = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    made.filters["quoted"] = lambda value: shlex.quote(str(value))  # for everything that a shell reads
    return made


def _refuse_unless_same(out: Path, texts: Mapping[str, str]) -> None:
    """Refuse a folder with other files; keys are not compared, because they may have been moved to their machines."""
    for name, text in texts.items():
        if not (out / name).is_file() or (out / name).read_text(encoding="utf-8", errors="replace") != text:
            raise FedOrthoError(
                f"{out} is not this deployment ({name} differs or is missing) and was not changed; "
                "choose another --out, or remove the folder with its keys"
            )


def _certificates(address: str) -> dict[str, bytes]:
    """A new authority, and in its name a certificate for `address` and for the SuperLink's own machine."""
    from cryptography import x509  # comes with flwr
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    names = dict.fromkeys([address, "localhost", "127.0.0.1", "::1"])  # the server app calls its own machine
    hosts = [x509.IPAddress(ipaddress.ip_address(name)) if _is_ip(name) else x509.DNSName(name) for name in names]
    served = x509.SubjectAlternativeName(hosts)
    pem = serialization.Encoding.PEM
    return {
        "ca.crt": _certificate(authority.public_key(), authority, None).public_bytes(pem),
        "server.crt": _certificate(server.public_key(), authority, served).public_bytes(pem),
        "server.key": server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    }


def _certificate(key: Any, authority: Any, served: Any) -> Any:
    """A certificate of `key`, signed by `authority`: for the names in `served`, or for the authority itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    root = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedortho deployment")])
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedortho SuperLink")]) if served else root
    now = datetime.datetime.now(datetime.UTC)
    usage: Any = x509.KeyUsage  # nine booleans in the standard's order; the first: signs data, the sixth: certificates
    builder = (
        x509.CertificateBuilder(root, own, key, x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.BasicConstraints(ca=served is None, path_length=None), critical=True)
        .add_extension(usage(served is not None, *[False] * 4, served is None, *[False] * 3), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    if served is not None:
        builder = builder.add_extension(served, critical=False)
    return builder.sign(authority, hashes.SHA256())


def _node_keys(nodes: int) -> dict[str, bytes]:
    """A key pair for each node, as `ssh-keygen -t ecdsa -b 384` makes them."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    encoding, private, public = serialization.Encoding, serialization.PrivateFormat, serialization.PublicFormat
    pairs = {}
    for node in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        pairs[f"keys/node-{node}"] = key.private_bytes(encoding.PEM, private.OpenSSH, serialization.NoEncryption())
        pairs[f"keys/node-{node}.pub"] = key.public_key().public_bytes(encoding.OpenSSH, public.OpenSSH) + b"\n"
    return pairs
