"""Archives of the published set's layout for tests: sound ones, hostile ones, damaged ones."""

from __future__ import annotations

import gzip
import io
import json
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

ROWS = 4
Add = Callable[[tarfile.TarFile], None]


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def pictures(field: str) -> dict[str, bytes]:
    return {f"{field}/{n}.png": png(n + 100 * (field == "images")) for n in range(ROWS)}


def write_rows(folder: Path, prefix: str = "") -> Path:
    folder.mkdir(parents=True)
    fields = ("images", "teacher_images")
    rows = [
        {"problem": f"Question {n}?", "answer": "B", **{field: [f"{prefix}{field}/{n}.png"] for field in fields}}
        for n in range(ROWS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tar(files: dict[str, bytes], mode: str = "w", *more: Add) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for add in more:
            add(archive)
    return buffer.getvalue()


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def source_of(folder: Path, files: dict[str, bytes]) -> Path:
    """Rows, and archives (or whatever) by name."""
    write_rows(folder)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


IMAGES, CROPS = pictures("images"), pictures("teacher_images")
BOTH = IMAGES | CROPS


def short(files: dict[str, bytes]) -> dict[str, bytes]:
    """Members without the folder, as ``tar -C images`` packs them."""
    return {name.split("/")[1]: data for name, data in files.items()}


# Hostile


def special(kind: bytes, name: str = "images/evil.png", target: str = "/etc/passwd") -> Add:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        archive.addfile(member)

    return add


def plain(name: str, data: bytes = b"x") -> Add:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))

    return add


def unknown(archive: tarfile.TarFile) -> None:
    special(b"Z")(archive)


HOSTILE_TARS: dict[str, tuple[Add, str]] = {
    "absolute": (plain("/tmp/evil.png"), "'/tmp/evil.png' is a path out of the folder"),
    "dots": (plain("images/../../evil.png"), "is a path out of the folder"),
    "backslashes": (plain("images\\..\\..\\evil.png"), "is a path out of the folder"),
    "drive": (plain("C:\\evil.png"), "is a path out of the folder"),
    "symbolic link": (special(tarfile.SYMTYPE), "'images/evil.png' is a symbolic link"),
    "symbolic link in the place of an image": (special(tarfile.SYMTYPE, "images/0.png"), "is a symbolic link"),
    "symbolic link to a folder": (special(tarfile.SYMTYPE, "images", ".."), "'images' is a symbolic link"),
    "hard link": (special(tarfile.LNKTYPE), "is a hard link"),
    "device": (special(tarfile.CHRTYPE), "is a device"),
    "disk": (special(tarfile.BLKTYPE), "is a device"),
    "pipe": (special(tarfile.FIFOTYPE), "is a pipe"),
    "folder that leads out": (special(tarfile.DIRTYPE, "../evil"), "is a path out of the folder"),
    "twice": (plain("images/0.png"), "has 'images/0.png' twice"),
}


def zip_with(name: str, kind: int = 0, encrypted: bool = False, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO(zipped(BOTH))
    with zipfile.ZipFile(buffer, "a") as archive:
        member = zipfile.ZipInfo(name)
        member.external_attr, member.compress_type = (kind | 0o644) << 16, method
        archive.writestr(member, b"/etc/passwd")
    data = bytearray(buffer.getvalue())
    if encrypted:
        data[data.rindex(b"PK\1\2") + 8] |= 1
    return bytes(data)


HOSTILE_ZIPS = {
    "absolute": (zip_with("/tmp/evil.png"), "is a path out of the folder"),
    "dots": (zip_with("../evil.png"), "is a path out of the folder"),
    "backslashes": (zip_with("..\\evil.png"), "is a path out of the folder"),
    "symbolic link": (zip_with("images/evil.png", stat.S_IFLNK), "is a symbolic link"),
    "device": (zip_with("images/evil.png", stat.S_IFCHR), "is a device or a pipe"),
    "encrypted": (zip_with("images/evil.png", encrypted=True), "is encrypted"),
    "another compression": (zip_with("images/evil.png", method=zipfile.ZIP_LZMA), "is compressed by method 14"),
}


def long_header(archive: tarfile.TarFile) -> None:
    """A name of 2 MB, which tarfile would hold in memory."""
    plain("images/" + "x" * 2**21)(archive)


def claimed(archive: tarfile.TarFile) -> None:
    """An extended header that claims 8 GB."""
    member = tarfile.TarInfo("pax")
    member.type, member.size = tarfile.XHDTYPE, 2**33
    archive.fileobj.write(member.tobuf(tarfile.GNU_FORMAT))  # type: ignore[union-attr]
    archive.fileobj.write(bytes(2**22))  # type: ignore[union-attr]


def nested_headers(archive: tarfile.TarFile) -> None:
    """Each header says that another one follows: tarfile would follow them by recursion."""
    for _ in range(990):
        member = tarfile.TarInfo("pax")
        member.type = tarfile.XHDTYPE
        archive.fileobj.write(member.tobuf(tarfile.USTAR_FORMAT))  # type: ignore[union-attr]


# Damaged


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


def sparse(archive: tarfile.TarFile) -> None:
    """A file of 2^40 zeros in no bytes."""
    member = tarfile.TarInfo("images/evil.png")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"\x80" + struct.pack(">Q", 2**40).rjust(11, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    archive.fileobj.write(bytes(header))  # type: ignore[union-attr]


DAMAGED = {
    "cut tar": ("data.tar", tar(BOTH)[:3000]),
    "cut in a header": ("data.tar", tar(BOTH)[: 1024 + 100]),
    "without its end": ("data.tar", tar(BOTH)[:-10240]),
    "damaged header": ("data.tar", flipped(tar(BOTH), 1024 + 20)),
    "cut gzip": ("data.tar.gz", tar(BOTH, "w:gz")[:-20]),
    "gzip with another checksum": ("data.tar.gz", flipped(tar(BOTH, "w:gz"), -8)),
    "gzip of nothing": ("data.tar.gz", gzip.compress(b"")),
    "empty": ("data.tar", b""),
    "no archive": ("data.zip", b"<html>404</html>" * 100),
    "cut zip": ("data.zip", zipped(BOTH)[:-30]),
    "zip with another checksum": ("data.zip", flipped(zipped(BOTH, zipfile.ZIP_STORED), 50)),
    "sparse": ("data.tar", tar(BOTH, "w", sparse)),
}
