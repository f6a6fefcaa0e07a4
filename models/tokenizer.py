"""Text to token ids and back, over the `tokenizers` package."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from paged_jax.models.chat_template import render


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's special tokens and chat template.

    Takes byte-level BPE and byte-fallback (SentencePiece) vocabularies. Decoding goes through bytes, so that the text
    of ids taken piece by piece (`detokenize.Detokenizer`) is the text of the whole.
    """

    def __init__(
        self, backend: Any, *, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None
    ):
        """`special_tokens` maps bos_token, eos_token, ... to their text."""
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content.encode() for i, token in added.items()}

    @property
    def vocab_size(self) -> int:
        """Ids with a meaning, added tokens included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that starts a text, if the model has one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if the model has one; the model's `eos_token_ids` may name more."""
        return self._special_id("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Text from a chat template has its special tokens already: pass False for it."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.id_to_bytes(i) for i in ids if i not in skipped)
        return self.strip_start(data).decode("utf-8", "replace")

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for, which may be part of a character; empty for an id outside the vocabulary."""
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # a token that byte-level BPE did not make
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def strip_start(self, data: bytes) -> bytes:
        """Bytes at the start of a text, without the space that SentencePiece puts before it."""
        return data.removeprefix(b" ") if self._strips_space else data

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation; `variables` go to the template.

        Raises ValueError when the model has no template or the template fails.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: write the prompt as text")
        variables = {"tools": None, **self.special_tokens, **variables}
        return render(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **variables)

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = json.loads(self.backend.to_str())["decoder"] or {}
        return decoder.get("decoders", [decoder])

    @cached_property
    def _byte_level(self) -> bool:
        return any(d.get("type") == "ByteLevel" for d in self._decoders)

    @cached_property
    def _strips_space(self) -> bool:
        return any(
            (d.get("type") == "Strip" and d.get("content") == " " and d.get("start", 0) > 0)
            or (d.get("type") == "Metaspace" and d.get("prepend_scheme") != "never")
            for d in self._decoders
        )


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the 68 others as characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
