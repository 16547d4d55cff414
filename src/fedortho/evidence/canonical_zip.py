"""A zip file with one possible form: the same files give the same bytes, and no other bytes are accepted for them.

Any unzip program reads it. Files are stored as they are, in order of their names, without dates, rights, comments or
gaps; so nothing can grow when it is unpacked, and every byte of the archive follows from the files.
"""

import io
import re
import struct
import zipfile
from collections.abc import Mapping
from itertools import accumulate, zip_longest

from fedortho.errors import FedOrthoError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HEADER = 30  # bytes in front of a file, besides its name
LARGEST = 1 << 30  # bytes; more is not evidence
# What zipfile raises for hostile archives: bad sizes (struct, EOF, OS errors), unknown or encrypted packing
# (NotImplementedError, RuntimeError), negative offsets and names that are no text (ValueError).
DAMAGE = (zipfile.BadZipFile, struct.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError)


class BadArchive(FedOrthoError):
    """An archive that is damaged, or not of the one form."""


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """The archive that holds these files."""
    if sum(map(len, files.values())) > LARGEST:
        raise BadArchive(f"the files make the bundle larger than {LARGEST >> 20} MB; leave something out")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in sorted(files.items()):
            assert NAME.fullmatch(name), f"{name} is no plain file name"
            info = zipfile.ZipInfo(name)  # of 1 January 1980, the first day there is
            info.create_system, info.external_attr = 3, 0o100644 << 16  # Unix
            archive.writestr(info, data)
    return stream.getvalue()


def unpack_files(archive: bytes, source: str) -> dict[str, bytes]:
    """The files of an archive; damage and any other form are refused."""
    files: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as reader:
            for info in reader.infolist():
                name = info.orig_filename
                if not NAME.fullmatch(name):
                    raise BadArchive(f"{source} holds {name[:80]!r}: that is no plain file name")
                if name in files:
                    raise BadArchive(f"{source} holds {name} twice")
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise BadArchive(f"{source}: {name} is packed; in a bundle files are stored as they are")
                try:
                    files[name] = reader.read(info)
                except DAMAGE as error:
                    raise BadArchive(f"{source}: {name} was changed: {error}") from error
                if sum(map(len, files.values())) > len(archive):
                    raise BadArchive(f"{source}: its directory misplaces {name}: files overlap")
    except DAMAGE as error:
        raise BadArchive(f"{source} is damaged, cut off or no bundle: {error}") from error
    form = pack_files(files)
    if form != archive:
        at = next(place for place, (one, other) in enumerate(zip_longest(form, archive)) if one != other)
        ends = accumulate(HEADER + len(name) + len(data) for name, data in sorted(files.items()))
        part = next((name for name, end in zip(sorted(files), ends, strict=True) if at < end), None)
        where = f"the header of {part}" if part else "its directory"
        raise BadArchive(f"{source} is damaged at byte {at}, in {where}")
    return files
