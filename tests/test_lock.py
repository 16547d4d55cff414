"""requirements.lock and the SBOM list what constraints.txt pins, no more and no less."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
assert SPEC is not None
assert SPEC.loader is not None
lock = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lock)


def test_the_lock_has_a_hash_of_every_pinned_package_but_torch() -> None:
    versions = {name: version for name, (version, _) in lock.locked().items()}
    assert versions == {name: version for name, version in lock.pinned().items() if name != "torch"}
    lines = [line for line in lock.LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) == len(versions), "and nothing else, no index and no path"


def test_the_sbom_lists_exactly_the_pinned_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SBOM", tmp_path / "dist" / "sbom.cdx.json")
    monkeypatch.setattr(sys, "argv", ["lock.py", "sbom"])
    lock.main()
    written = json.loads((tmp_path / "dist" / "sbom.cdx.json").read_text())
    components = written["components"]
    assert {each["name"]: each["version"] for each in components} == lock.pinned()
    assert [each["name"] for each in components if "hashes" not in each] == ["torch"]
    assert all(each["purl"].startswith("pkg:pypi/") for each in components)
    assert len({each["bom-ref"] for each in components}) == len(components)
    assert (written["bomFormat"], written["specVersion"]) == ("CycloneDX", "1.6")


def test_the_script_tells_how_it_is_called() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/lock.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "lock.py sbom" in done.stderr
