"""A zip file with one possible form: the same files give the same bytes, and no other bytes are accepted for them.

Any unzip program reads it. Files are stored as they are, in order of their names, without dates, rights, comments or
gaps; so nothing can grow when it is unpacked, and every byte of the archive follows from the files.
"""

import re
import struct
import zlib
from collections.abc import Mapping

from fedortho.errors import FedOrthoError

LOCAL = struct.Struct("<4s5H3L2H")  # as APPNOTE.TXT, sections 4.3.7, 4.3.12 and 4.3.16, lays them out
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
VERSION, BY_UNIX, FIRST_DAY, RIGHTS = 20, 3 << 8 | 20, 0x21, 0o100644 << 16  # 1 January 1980, the first there is
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LARGEST = 1 << 30  # bytes; more is not evidence


class BadArchive(FedOrthoError):
    """An archive that is damaged, or not of the one form."""


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """The archive that holds these files."""
    body, directory, place = [], [], 0
    for name, data in sorted(files.items()):
        assert NAME.fullmatch(name), f"{name} is no plain file name"
        common = (VERSION, 0, 0, 0, FIRST_DAY, zlib.crc32(data), len(data), len(data), len(name), 0)
        directory += [CENTRAL.pack(b"PK\1\2", BY_UNIX, *common, 0, 0, 0, RIGHTS, place), name.encode()]
        body += [LOCAL.pack(b"PK\3\4", *common), name.encode(), data]
        place += LOCAL.size + len(name) + len(data)
        if place > LARGEST:
            raise BadArchive(f"{name} makes the bundle larger than {LARGEST >> 20} MB; leave something out")
    end = END.pack(b"PK\5\6", 0, 0, len(files), len(files), sum(map(len, directory)), place, 0)
    return b"".join([*body, *directory, end])


def unpack_files(archive: bytes, source: str) -> dict[str, bytes]:
    """The files of an archive, by its directory; damage and any other form are refused.

    The headers in front of the files are not looked at here: `check_form` finds what is wrong with them, once the
    files are known to be right.
    """
    if len(archive) < END.size:
        raise BadArchive(f"{source} is no bundle: it is no zip file, or only the beginning of one")
    mark, _, _, _, number, size, start, _ = END.unpack(archive[-END.size :])
    if mark != b"PK\5\6" or start + size + END.size != len(archive):
        raise BadArchive(f"{source} is damaged, cut off or no bundle: its last {END.size} bytes do not end a zip file")
    files: dict[str, bytes] = {}
    at, place = start, 0
    for _ in range(number):
        name, begin, size = _entry(archive, at, source)
        if name in files:
            raise BadArchive(f"{source} holds {name} twice")
        if begin != place:
            raise BadArchive(f"{source}: its directory misplaces {name}, or the file before it")
        at += CENTRAL.size + len(name)
        data = begin + LOCAL.size + len(name)
        place = data + size
        if place > start:
            raise BadArchive(f"{source}: its directory lets {name} end outside of the archive")
        files[name] = archive[data:place]
    if place != start or at + END.size != len(archive):
        last = next(reversed(files), "nothing")
        raise BadArchive(f"{source}: its directory does not list all that it holds; it ends with {last}")
    return files


def _entry(archive: bytes, at: int, source: str) -> tuple[str, int, int]:
    """Name, place and size of a file, from the entry of the directory at this byte."""
    if at + CENTRAL.size > len(archive):
        raise BadArchive(f"{source}: its directory is cut off")
    fields = CENTRAL.unpack_from(archive, at)
    mark, flags, method, packed, size, length, place = (fields[number] for number in (0, 3, 4, 8, 9, 10, 16))
    name = archive[at + CENTRAL.size : at + CENTRAL.size + length].decode("latin-1")
    if mark != b"PK\1\2":
        raise BadArchive(f"{source}: its directory is damaged at byte {at}")
    if not NAME.fullmatch(name):
        raise BadArchive(f"{source} holds {name[:80]!r}: that is no plain file name")
    if flags or method or packed != size:
        raise BadArchive(f"{source}: {name} is packed; in a bundle files are stored as they are")
    return name, place, size


def check_form(archive: bytes, files: Mapping[str, bytes], source: str) -> None:
    """Refuse an archive that is not, byte for byte, what its files give; names the file whose header differs."""
    form = pack_files(files)
    if form == archive:
        return
    at = next((i for i, pair in enumerate(zip(form, archive, strict=False)) if pair[0] != pair[1]), len(form))
    raise BadArchive(f"{source} is damaged at byte {at}, in {_part(files, at)}")


def _part(files: Mapping[str, bytes], at: int) -> str:
    end = 0
    for name in sorted(files):
        end += LOCAL.size + len(name) + len(files[name])
        if at < end:
            return f"the header of {name}"
    for name in sorted(files):
        end += CENTRAL.size + len(name)
        if at < end:
            return f"the directory's entry of {name}"
    return "its end"
