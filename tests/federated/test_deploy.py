"""A deployment folder: what is in it, who may read it, and what its scripts start."""

import ipaddress
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated import SWITCHES, deploy
from fedortho.federated.deploy import app_files, app_pyproject, write_deployment
from fedortho.federated.launch import submit
from fedortho.requests.federated_jobs import app_config
from fedortho.storage.records import Scalar

APP = Path(__file__).parents[2] / "app"
CONFIG: dict[str, Scalar] = {"do": "train", "out": "", "rounds": 3, "lr": 0.1, "augment": True}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "a link"
    write_deployment(out, nodes=2, address="fl.example.org", port=8443, config=CONFIG)
    return out


def started(script: Path, place: Path, **environ: str) -> dict[str, str]:
    """What a script would start: its arguments and the environment, from a program that only tells them."""
    for name in ("flower-superlink", "flower-supernode"):
        program = place / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$TOLD.arguments"\nenv >"$TOLD.env"\n')
        program.chmod(0o755)
    path = {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}", "TOLD": str(place / "told")}
    subprocess.run([script], env=path | environ, check=True, timeout=20)
    told = dict(line.split("=", 1) for line in (place / "told.env").read_text().splitlines() if "=" in line)
    return told | {"arguments": (place / "told.arguments").read_text()}


def test_only_the_owner_may_read_what_is_secret(folder: Path) -> None:
    modes = {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [modes[name] for name in ("server.key", "keys", "keys/node-0", "keys/node-1")] == [
        0o600,
        0o700,
        0o600,
        0o600,
    ]
    private = [name for name, text in contents(folder).items() if b"PRIVATE KEY" in text]
    assert sorted(private) == ["keys/node-0", "keys/node-1", "server.key"], "the authority's key is nowhere"


def test_the_certificate_names_the_address_and_is_signed_by_the_authority(folder: Path) -> None:
    authority, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert ipaddress.ip_address("127.0.0.1") in names.get_values_for_type(x509.IPAddress)
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    assert key.public_key() == server.public_key()


def test_every_node_has_a_key_pair_of_its_own_that_flower_can_read(folder: Path) -> None:
    pairs = []
    for node in range(2):
        private = serialization.load_ssh_private_key((folder / f"keys/node-{node}").read_bytes(), None)
        public = serialization.load_ssh_public_key((folder / f"keys/node-{node}.pub").read_bytes())
        assert private.public_key() == public
        pairs.append((folder / f"keys/node-{node}.pub").read_text())
    assert pairs[0] != pairs[1]
    assert all(pair.startswith("ecdsa-sha2-nistp384 ") for pair in pairs)


def test_a_node_starts_with_switches_store_and_key(folder: Path, tmp_path: Path) -> None:
    told = started(folder / "node-1.sh", tmp_path)
    store = folder / "node-1" / "store"
    arguments = told["arguments"].splitlines()
    assert told.items() >= SWITCHES.items()
    assert told["FLWR_HOME"] == str(folder / "node-1")
    assert arguments[arguments.index("--node-config") + 1] == f"partition-id=1 num-partitions=2 store='{store}'"
    assert arguments[arguments.index("--superlink") + 1] == "fl.example.org:8443"
    assert arguments[arguments.index("--auth-supernode-private-key") + 1] == str(folder / "keys" / "node-1")
    assert "--insecure" not in arguments
    assert store.stat().st_mode & 0o777 == 0o700


def test_a_node_is_told_where_its_own_images_and_its_store_are(folder: Path, tmp_path: Path) -> None:
    told = started(folder / "node-0.sh", tmp_path, FEDORTHO_DATA="/srv/my images", FEDORTHO_STORE=str(tmp_path / "s"))
    assert f"partition-id=0 num-partitions=2 store='{tmp_path / 's'}' data='/srv/my images'" in told["arguments"]


def test_the_superlink_asks_nodes_for_keys_and_listens_where_they_can_reach_it(folder: Path, tmp_path: Path) -> None:
    told = started(folder / "superlink.sh", tmp_path)
    arguments = told["arguments"].splitlines()
    assert told.items() >= SWITCHES.items()
    assert "--enable-supernode-auth" in arguments
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    assert arguments[arguments.index("--database") + 1] == str(folder / "superlink" / "state.db")


@pytest.mark.parametrize(("address", "host"), [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_a_superlink_for_this_machine_listens_on_no_other_address(tmp_path: Path, address: str, host: str) -> None:
    write_deployment(tmp_path / "link", nodes=1, address=address, config=CONFIG)
    assert f"--host {host} --port 8000 " in (tmp_path / "link" / "superlink.sh").read_text()


def test_scripts_say_what_is_missing_on_the_path(folder: Path) -> None:
    bare = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([folder / "superlink.sh"], env=bare, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (2, "no flower-superlink on the PATH: activate fedortho's environment\n")


def test_all_scripts_are_valid_shell(folder: Path) -> None:
    scripts = sorted(folder.glob("*.sh"))
    assert [script.name for script in scripts] == ["node-0.sh", "node-1.sh", "register.sh", "superlink.sh"]
    for script in scripts:
        subprocess.run(["sh", "-n", script], check=True, timeout=20)


def test_writing_the_same_again_changes_nothing_even_after_keys_were_moved(folder: Path) -> None:
    (folder / "keys" / "node-0").unlink()
    before = contents(folder)
    write_deployment(folder, nodes=2, address="fl.example.org", port=8443, config=CONFIG)
    assert contents(folder) == before


@pytest.mark.parametrize("change", [{"nodes": 3}, {"port": 8444}, {"insecure": True}, {"config": {"do": "train"}}])
def test_another_deployment_is_never_written_over(folder: Path, change: dict[str, object]) -> None:
    before = contents(folder)
    given = {"nodes": 2, "address": "fl.example.org", "port": 8443, "config": CONFIG} | change
    with pytest.raises(FedOrthoError, match="--out"):
        write_deployment(folder, **given)
    assert contents(folder) == before


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FedOrthoError, match="--out"):
        write_deployment(tmp_path, nodes=1, address="localhost", config=CONFIG)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    "given", [{"nodes": 0}, {"port": 0}, {"address": "host:8000"}, {"address": "a b"}, {"address": ""}]
)
def test_what_cannot_be_deployed_is_refused_by_name(tmp_path: Path, given: dict[str, object]) -> None:
    with pytest.raises(BadSetting, match=f"--{next(iter(given))} is"):
        write_deployment(tmp_path / "link", **{"nodes": 1, "address": "localhost", "config": CONFIG} | given)
    assert not (tmp_path / "link").exists()


def test_without_encryption_there_are_no_keys_and_the_readme_says_so(tmp_path: Path) -> None:
    write_deployment(tmp_path / "link", nodes=1, address="localhost", insecure=True, config=CONFIG)
    assert not [name for name in contents(tmp_path / "link") if name.endswith((".crt", ".key", ".pub"))]
    assert (tmp_path / "link" / "README.txt").read_text().startswith("NO ENCRYPTION")


def test_the_app_lists_every_key_with_type_and_value() -> None:
    odd = CONFIG | {"request": 'it\'s "class:3" \\ ü\n', "target": 1.0, "least": 1e-30, "flag": False}
    told = tomllib.loads(app_pyproject(odd))["tool"]["flwr"]["app"]["config"]
    assert told == odd
    assert [type(value) for value in told.values()] == [type(value) for value in odd.values()]


def test_the_app_in_the_repository_is_the_one_that_deployments_get() -> None:
    assert {name: text.decode() for name, text in contents(APP).items() if "__pycache__" not in name} == app_files(
        app_config()
    )


def test_a_setting_that_the_deployed_app_does_not_know_is_named(folder: Path) -> None:
    with pytest.raises(FedOrthoError, match="'ratio'"):
        submit(folder, {"ratio": 0.1})


def test_what_is_no_deployment_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match="fedortho deploy"):
        submit(tmp_path, {})


@pytest.mark.parametrize(
    "address",
    [
        "::1%$(touch pwned)",
        "fe80::1%eth0;touch pwned",
        "a b",
        "h;touch pwned",
        "$(touch pwned)",
        "::1%'",
        "h\ntouch pwned",
    ],
)
def test_an_address_cannot_run_a_command(tmp_path: Path, address: str) -> None:
    with pytest.raises(BadSetting, match="must be a host name or an IP address"):
        write_deployment(tmp_path / "out", nodes=1, address=address, insecure=True, config=CONFIG)
    assert not (tmp_path / "out").exists()


def test_everything_that_a_shell_reads_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "x'$(touch pwned)`touch pwned`;touch pwned"
    monkeypatch.setattr(deploy, "_link", lambda *_: evil)
    monkeypatch.chdir(tmp_path)
    write_deployment(tmp_path / "out", nodes=1, address="::1", insecure=True, config=CONFIG)
    assert evil in started(tmp_path / "out" / "node-0.sh", tmp_path)["arguments"].splitlines()
    started(tmp_path / "out" / "superlink.sh", tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_a_folder_whose_path_would_be_read_as_a_command_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a|e touch pwned;'"
    write_deployment(folder, nodes=1, address="localhost", config=CONFIG)
    program = tmp_path / "bin" / "flwr"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environ = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    how: dict[str, Any] = {"env": environ, "capture_output": True, "cwd": tmp_path, "timeout": 20}
    done = subprocess.run([folder / "register.sh"], check=False, **how)
    assert done.returncode == 2
    assert b"move this folder" in done.stderr
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(BadSetting, match="without control characters"):
        write_deployment(tmp_path / "a\nb", nodes=1, address="localhost", config=CONFIG)
