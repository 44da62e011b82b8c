"""What counts as the same text, and hashes of content."""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path

ID_LENGTH = 16
_CHUNK_BYTES = 1 << 20


def clean_text(text: str) -> str:
    """Return a text in NFC without white space at its ends: equal results are one text."""
    return unicodedata.normalize("NFC", text).strip()


def loose_key(text: str) -> str:
    """Return a text without case, accents and white space.

    Tokenizers differ in what they tell apart; this is coarser than nearly all of them, so texts
    that some tokenizer reads as one have one key. It decides only which rows share a split.
    """
    decomposed = unicodedata.normalize("NFKD", text)
    bare = "".join(c for c in decomposed if not unicodedata.combining(c))
    return "".join(bare.casefold().split())


def content_hash(*parts: str) -> str:
    """Return the SHA-256 of some texts, as hex; ``("a", "bc")`` and ``("ab", "c")`` differ."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
