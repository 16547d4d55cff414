"""Write requirements.lock, the hashes of the pinned packages, and sbom.cdx.json, the list of all of them.

python scripts/lock.py hashes    requirements.lock, by asking the package index (needs the network)
python scripts/lock.py sbom      dist/sbom.cdx.json (CycloneDX 1.6), from constraints.txt, requirements.lock and .venv
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCK, SBOM = ROOT / "requirements.lock", ROOT / "dist" / "sbom.cdx.json"
# The CPU build that is installed here is another file than the one of the same version on the general index.
UNHASHED = ("torch",)
HEADER = f"""\
# SHA-256 of the packages of constraints.txt, as wheels for CPython 3.11 on Linux x86-64; `make lock` writes it.
# pip install --no-deps --require-hashes -r requirements.lock
# Not in it: {", ".join(UNHASHED)}, which comes from an index of its own (SECURITY.md).
"""


def pinned() -> dict[str, str]:
    """The version of every package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def locked() -> dict[str, tuple[str, str]]:
    """Version and SHA-256 of every package in requirements.lock."""
    found = re.findall(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: (version, digest) for name, version, digest in found}


def write_lock() -> None:
    """Ask the index for the file of every pinned package, and write the hashes; a local file is refused."""
    wanted = [f"{name}=={version}" for name, version in pinned().items() if name not in UNHASHED]
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], check=True)
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    if local := sorted(
        each["metadata"]["name"] for each in installs if each["download_info"]["url"].startswith("file:")
    ):
        sys.exit(f"pip takes {len(local)} packages from local files ({', '.join(local[:5])}); unset PIP_FIND_LINKS")
    hashes = {_plain(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"] for each in installs}
    lines = [f"{each} --hash=sha256:{hashes[_plain(each.partition('==')[0])]['sha256']}\n" for each in wanted]
    LOCK.write_text(HEADER + "".join(lines), encoding="utf-8")


def sbom() -> dict[str, Any]:
    """All pinned packages as CycloneDX components, with their locked hashes and declared licences."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    hashes = locked()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component("application", project["name"], project["version"], "Apache-2.0")},
        "components": [
            _component("library", name, version, _licence(name), hashes.get(name, ("", ""))[1])
            for name, version in sorted(pinned().items())
        ],
    }


def _component(kind: str, name: str, version: str, licence: str = "", digest: str = "") -> Mapping[str, Any]:
    reference = f"pkg:pypi/{_plain(name)}@{version}"
    component: dict[str, Any] = {
        "type": kind,
        "name": name,
        "version": version,
        "purl": reference,
        "bom-ref": reference,
    }
    if licence:
        component["licenses"] = [{"license": {"name": licence}}]
    if digest:
        component["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return component


def _licence(name: str) -> str:
    """What an installed package declares, in one line; empty if it is not installed or declares none."""
    try:
        about = metadata.metadata(name).json
    except metadata.PackageNotFoundError:
        return ""
    classifiers = [line.rpartition(" :: ")[2] for line in about.get("classifier", ()) if line.startswith("License")]
    declared = about.get("license_expression") or ", ".join(classifiers) or about.get("license") or ""
    return str(declared).partition("\n")[0]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    if sys.argv[1:] == ["hashes"]:
        write_lock()
        print(f"{LOCK}: {len(locked())} packages")
    elif sys.argv[1:] == ["sbom"]:
        SBOM.parent.mkdir(exist_ok=True)
        SBOM.write_text(json.dumps(found := sbom(), indent=2) + "\n", encoding="utf-8")
        print(f"{SBOM}: {len(found['components'])} packages")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
