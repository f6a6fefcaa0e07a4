"""From a token to its bytes: what the decoder of a tokenizer.json says, one token at a time.

`tokenizers` decodes whole lists only. The bytes of single tokens let a text grow id by id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MARK = "\u2581"  # SentencePiece's sign for a space


@dataclass(frozen=True)
class DecoderSteps:
    """What is done with a token.

    Attributes:
        is_byte_level: each character of it means a byte.
        has_byte_fallback: `<0xF0>` means the byte 0xF0.
        replacements: texts, and what they are replaced with.
        strips_start: a text lacks the space that it starts with.
        mark_not_at_start: a text's first token lacks this character.
        prefix: what stands before every token.
    """

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strips_start: bool = False
    mark_not_at_start: str = ""
    prefix: str = ""

    def token_to_bytes(self, token: str, *, is_added: bool = False) -> bytes:
        """Return the bytes of a token.

        Of an added one the characters mean bytes only where these are a text: the byte-level token
        `"é"` is the byte 0xE9, the added one is the letter.
        """
        if self.is_byte_level:
            try:
                data = bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # a token that byte-level BPE did not make
                return token.encode()
            return token.encode() if is_added and not _is_text(data) else data
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        if self.has_byte_fallback and is_byte:
            return bytes.fromhex(token[3:5])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.prefix + token).encode()


def read_steps(decoder: Mapping[str, Any] | None) -> DecoderSteps:
    """Read the `decoder` of a tokenizer.json. Without one, spaces stand between tokens.

    Raises ValueError for a kind that does more than a token at a time can show.
    """
    if decoder is None:
        return DecoderSteps(prefix=" ", strips_start=True)
    replacements, is_fused = [], False
    found: dict[str, Any] = {}
    for part in decoder.get("decoders", [decoder]):
        match part.get("type"):
            case "ByteLevel":
                found["is_byte_level"] = True
            case "ByteFallback":
                found["has_byte_fallback"] = True
            case "Fuse":
                is_fused = True
            case "Replace" if "String" in part.get("pattern", {}):
                replacements.append((part["pattern"]["String"], part["content"]))
            case "Metaspace":
                replacements.append((part.get("replacement", MARK), " "))
                if part.get("prepend_scheme") != "never":
                    found["mark_not_at_start"] = part.get("replacement", MARK)
            case "Strip" if is_fused and _is_one_space(part):
                found["strips_start"] = part["start"] == 1
            case _:
                raise ValueError(f"decoder {part!r:.200} is unsupported")
    return DecoderSteps(replacements=tuple(replacements), **found)


def _is_one_space(strip: Mapping[str, Any]) -> bool:
    return strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each character of a byte-level BPE token means.

    The printable bytes of Latin-1 are themselves: `"A" -> 0x41`. The 68 others are the characters
    from U+0100 on, in order: `"Ā" -> 0x00`, `"Ġ" -> 0x20`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    of_others = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | of_others


BYTE_OF_CHAR = _byte_of_char()
