import hashlib
import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedortho.evidence.canonical_zip import BadArchive, pack_files, unpack_files

FILES = {"b.txt": b"two", "a.json": b"{}\n", "empty": b""}
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


def whole(archive: bytes) -> dict[str, bytes]:
    return unpack_files(archive, "x.zip")


def zipped(*files: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive as Python's own writer makes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return stream.getvalue()


@given(st.dictionaries(names, st.binary(max_size=60), max_size=5))
@settings(deadline=None)
def test_files_come_back_and_the_standard_reader_agrees(files: dict[str, bytes]) -> None:
    archive = pack_files(files)
    assert whole(archive) == files
    with zipfile.ZipFile(io.BytesIO(archive)) as reader:
        assert reader.testzip() is None
        assert {name: reader.read(name) for name in reader.namelist()} == files


def test_the_form_does_not_depend_on_the_order_and_never_changes() -> None:
    assert pack_files(FILES) == pack_files(dict(reversed(FILES.items())))
    known = "9618480cd2c1fedfaf5b96ee71045a961809f614841e4af24dcea2c3dfe0f29a"
    assert hashlib.sha256(pack_files(FILES)).hexdigest() == known, "bundles that are out there would no longer pass"
    assert len(pack_files({"a": b""})) == 30 + 1 + 46 + 1 + 22, "no room for anything else"


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_change_of_any_byte_is_found(data: st.DataObject) -> None:
    archive = bytearray(pack_files(FILES))
    at = data.draw(st.integers(0, len(archive) - 1))
    archive[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadArchive, match=r"x\.zip"):
        whole(bytes(archive))


def test_every_cut_and_every_addition_is_found() -> None:
    archive = pack_files(FILES)
    for length in range(len(archive)):
        with pytest.raises(BadArchive, match=r"x\.zip"):
            whole(archive[:length])
        with pytest.raises(BadArchive, match=r"x\.zip"):
            whole(archive[length:] if length else archive + b"\0")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/b", "..", ".hidden", "C:\\evil", "a\0b", "é", "", "a\nb"], ids=ascii
)
def test_names_that_lead_elsewhere_are_refused_by_name(name: str) -> None:
    archive = pack_files({"x" * len(name.encode("latin-1")): b""} if name else {"y": b""})
    evil = archive.replace(b"x" * len(name), name.encode("latin-1")) if name else zipped(("", b""))
    with pytest.raises(BadArchive, match="is no plain file name") as told:
        whole(evil)
    assert repr(name) in str(told.value) or not name.isascii()  # other letters by the code page of zip


def test_what_is_packed_or_twice_there_or_made_by_others_is_refused() -> None:
    with pytest.raises(BadArchive, match=r"bomb is packed; in a bundle files are stored as they are"):
        whole(zipped(("bomb", b"\0" * 10_000_000), method=zipfile.ZIP_DEFLATED))
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = zipped(("a", b"1"), ("a", b"2"))
    with pytest.raises(BadArchive, match="holds a twice"):
        whole(twice)
    with pytest.raises(BadArchive, match=r"damaged at byte \d+, in its directory"):
        whole(zipped(("a", b"1")))


def test_files_that_overlap_cannot_multiply() -> None:
    archive = bytearray(pack_files({"a": b"x" * 100, "b": b"y"}))
    entry = archive.index(b"PK\1\2", archive.index(b"PK\1\2") + 1)
    archive[entry + 42 : entry + 46] = bytes(4)  # the second file begins where the first does
    with pytest.raises(BadArchive, match="b was changed"):
        whole(bytes(archive))
