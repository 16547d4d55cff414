"""Damaged and hostile versions of valid files and texts; a case is made by its seed and number alone."""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

# Raw JSON texts that take the place of a value; most of them no honest program writes.
HOSTILE: tuple[str, ...] = (
    *("null", "true", "false", "0", "1", "-1", "2", "1.5", "-0.0", "1e308", "1e999", "-1e999", "NaN", "Infinity"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 40, "1" * 4000, "1" * 5000),
    *('""', '"\\u0000"', '"\\ud800"', '"[/x]"', '"a\\nchecked: signed by NIST"', '"\\u001b[2J"', '"\\u202ereversed"'),
    *('"../../etc/passwd"', '"/dev/zero"', '"$(touch pwned)"', '"os:system"', '"<script>"', '"NaN"', '"-1"'),
    *("[]", "{}", "[[]]", "[null]", '[""]', '{"": null}', '{"__class__": 1}', '{"schema": true}', "[1, 2, 3]"),
    *("[" * 2000 + "]" * 2000, '{"a":' * 2000 + "1" + "}" * 2000, f'"{"x" * 100_000}"', f'"{"é" * 300}"'),
)


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to four accidents: bits, holes, repetitions, foreign bytes, a cut."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, length = draw.randrange(len(found) + 1), draw.choice((1, 1, 2, 8, 64, 1024))
        kind = draw.randrange(7)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at : at + length]
        elif kind == 2:
            found[at:at] = found[at : at + length]
        elif kind == 3:
            found[at : at + length] = draw.randbytes(length)
        elif kind == 4:
            found[at:at] = draw.choice((b"\0", b"\xff", b"\n", b'"', b"{", b"-", b"9" * 20, b"\xff\xfe", b"\x1b["))
        elif kind == 5:
            del found[at:]
        else:
            number = draw.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            found[at : at + 8] = struct.pack("<Q", number)
    return bytes(found)


def mutated_json(data: bytes, draw: random.Random) -> bytes:
    """The JSON with one value replaced, removed, repeated or added; every sixth case is damaged as bytes."""
    if draw.randrange(6) == 0:
        return mutated_bytes(data, draw)
    value = json.loads(data)
    holders = _holders(value)
    marker, text = "@hostile@", draw.choice(HOSTILE)
    if not holders or draw.randrange(30) == 0:
        return text.encode()
    target, kind = draw.choice(holders), draw.randrange(4)
    keys: list[Any] = list(target) if isinstance(target, dict) else list(range(len(target)))
    if kind == 0:
        del target[draw.choice(keys)]
    elif kind == 1 and isinstance(target, dict):
        target[draw.choice(("extra", "", "schema", "x" * 1000, "\x1b[2J"))] = marker
    elif kind == 1:
        target.extend([marker] * draw.choice((1, 2, 1000)))
    else:
        target[draw.choice(keys)] = marker
    return json.dumps(value, indent=2, sort_keys=True).replace(json.dumps(marker), text).encode()


def _holders(value: Any) -> list[Any]:
    """All mappings and lists with content in a JSON value."""
    if not isinstance(value, dict | list) or not value:
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(found for each in inner for found in _holders(each))]


def mutated_lines(data: bytes, draw: random.Random) -> bytes:
    """JSON lines, or lines of text, with one line changed, lost, repeated or moved."""
    lines = data.split(b"\n")
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(other, lines[at])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3 and lines[at].startswith(b"{"):
        changed = json.loads(mutated_json_value(lines[at], draw))
        lines[at] = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
    else:
        return mutated_bytes(data, draw)
    return b"\n".join(lines)


def mutated_json_value(data: bytes, draw: random.Random) -> bytes:
    """As `mutated_json`, always JSON that Python reads."""
    while True:
        text = mutated_json(data, draw)
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            continue
        return text


def mutated_text(data: bytes, draw: random.Random) -> bytes:
    """A text of lines `key = value`, or of words, with one value replaced by a hostile one, or damaged as bytes."""
    lines = data.decode().split("\n")
    at = draw.randrange(len(lines))
    key, equals, _ = lines[at].partition("=")
    if draw.randrange(3) == 0:
        return mutated_bytes(data, draw)
    lines[at] = f"{key}{equals} {draw.choice((*HOSTILE, 'inf', 'nan', '-inf', '2026-11-17', '0x7f', chr(39) * 3))}"
    return "\n".join(lines).encode()


def mutated_tensors(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file with a changed header (types, shapes, offsets, note), or damaged as bytes."""
    if draw.randrange(3) == 0:
        return mutated_bytes(data, draw)
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    note = header.get("__metadata__", {}).get("note")
    if note and draw.randrange(2):
        header["__metadata__"]["note"] = mutated_json(note.encode(), draw).decode(errors="replace")
        text = json.dumps(header).encode()
    else:
        names = [name for name in header if name != "__metadata__"]
        if not names:
            return mutated_bytes(data, draw)
        name = draw.choice(names)
        text = _changed_header(header, name, draw)
    return struct.pack("<Q", len(text)) + text + body


def _changed_header(header: dict[str, Any], name: str, draw: random.Random) -> bytes:
    kind = draw.randrange(5)
    if kind == 0:
        header[draw.choice(("other", "", "x" * 500, "a\nb"))] = header.pop(name)
    elif kind == 1:  # the same bytes as another type of the same width
        same = {"F32": "I32", "I64": "F64", "U8": "BOOL", "F16": "BF16", "I32": "F32", "F64": "C64", "BOOL": "I8"}
        header[name]["dtype"] = same.get(header[name]["dtype"], "F8_E4M3")
    elif kind == 2:
        size = 1
        for each in header[name]["shape"]:
            size *= each
        header[name]["shape"] = draw.choice(([size], [1, size], [size, 1, 1], [0], [2**62, 4], []))
    elif kind == 3:
        del header[name]
    else:
        return mutated_json(json.dumps(header).encode(), draw)
    return json.dumps(header).encode()


def mutated_archive(data: bytes, draw: random.Random) -> bytes:
    """A zip file with one file damaged, renamed, lost, packed or added, or damaged as bytes."""
    if draw.randrange(3) == 0:
        return mutated_bytes(data, draw)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name, kind = draw.choice(sorted(files)), draw.randrange(5)
    if kind == 0:
        del files[name]
    elif kind == 1:
        files[draw.choice(("../evil", "/abs", "a\nb", "x" * 300, "extra.txt"))] = files[name]
    elif kind == 2 and name.endswith(".json"):
        files[name] = mutated_json(files[name], draw)
    else:
        files[name] = mutated_bytes(files[name], draw)
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as to:
        for each, content in files.items():
            to.writestr(zipfile.ZipInfo(each), content)
    return stream.getvalue()


Mutation = Callable[[bytes, random.Random], bytes]


def by_name(name: str) -> Mutation:
    """The mutation that fits a file of this name."""
    kinds: Sequence[tuple[str, Mutation]] = (
        (".json", mutated_json),
        (".head", mutated_json),
        (".jsonl", mutated_lines),
        (".safetensors", mutated_tensors),
        (".toml", mutated_text),
        (".csv", mutated_text),
        (".txt", mutated_text),
        (".zip", mutated_archive),
        (".pt", mutated_archive),
    )
    return next((kind for suffix, kind in kinds if name.endswith(suffix)), mutated_bytes)
