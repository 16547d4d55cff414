import json
from pathlib import Path

import pytest
from bundles import manifest

from fedortho.errors import FedOrthoError
from fedortho.evidence.bundle import BadBundle, open_bundle, read_bundle
from fedortho.evidence.canonical_zip import pack_files
from fedortho.evidence.signature import BadSignature, load_key, load_public, make_key


def test_a_signature_is_of_one_key_and_cannot_be_taken_off(signed: Path, made: Path, tmp_path: Path) -> None:
    mine = signed.with_name("me.pub")
    assert open_bundle(signed, public=mine).manifest.signer == load_public(mine)
    other, _ = make_key(tmp_path / "other.pem")
    with pytest.raises(BadSignature, match="is signed by the key"):
        open_bundle(signed, public=other)
    with pytest.raises(BadSignature, match="is not signed"):
        open_bundle(made, public=mine)
    files = dict(open_bundle(signed).files)
    bare = {name: data for name, data in files.items() if name != "manifest.sig"}
    with pytest.raises(BadBundle, match=r"lacks manifest\.sig, though"):
        read_bundle(pack_files(bare), "x.zip")
    listed = {n: d for n, d in bare.items() if n != "manifest.json"} | {"verdict.json": b"{}"}
    anew = manifest(json.loads(files["manifest.json"]), listed)
    with pytest.raises(BadBundle, match=r"manifest\.sig does not fit"):
        read_bundle(pack_files(files | {"manifest.json": anew, "verdict.json": b"{}"}), "x.zip")


def test_a_private_key_is_its_owners_and_is_not_overwritten(tmp_path: Path) -> None:
    public, text = make_key(tmp_path / "me.pem")
    assert (tmp_path / "me.pem").stat().st_mode & 0o777 == 0o600
    assert load_public(public) == text
    with pytest.raises(FedOrthoError, match=r"me\.pem exists already"):
        make_key(tmp_path / "me.pem")
    with pytest.raises(BadSignature, match="PEM key without a password"):
        load_key(public)
    (tmp_path / "note.txt").write_text("no key")
    with pytest.raises(BadSignature, match=r"note\.txt is not a PEM key"):
        load_public(tmp_path / "note.txt")
    with pytest.raises(BadSignature, match="does not exist"):
        load_key(tmp_path / "none.pem")
