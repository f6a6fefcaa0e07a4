"""Text to token ids and back, over the `tokenizers` package."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from paged_jax.models.chat_template import render


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's special tokens and chat template.

    Serves byte-level BPE and byte-fallback (SentencePiece) vocabularies. It decodes by way of
    bytes, so that ids decoded in pieces (`detokenize.Detokenizer`) give the text of the whole.
    """

    def __init__(
        self,
        backend: Any,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        """Wrap a `tokenizers.Tokenizer`; `special_tokens` maps bos_token, ... to their text."""
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in added.items() if token.special
        )
        self._added = {i: token.content.encode() for i, token in added.items()}

    @property
    def vocab_size(self) -> int:
        """Count the ids with a meaning, added tokens included. An embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Return the id of the token that starts a text, if the model has one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the token that ends a text, if the model has one.

        The model's `eos_token_ids` may have more.
        """
        return self._special_id("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Text from a chat template contains its special tokens: pass False for it.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        Bytes that are not UTF-8 become U+FFFD. An id outside the vocabulary gives nothing.
        """
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.id_to_bytes(i) for i in ids if i not in skipped)
        return self.strip_start(data).decode("utf-8", "replace")

    def id_to_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id, which may be part of a character.

        Byte level: the id of `"Ġw" -> b" w"`. Byte fallback: of `"▁hi" -> b" hi"`, of
        `"<0xF0>" -> b"\\xf0"`. An id outside the vocabulary gives none.
        """
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # a token that byte-level BPE did not make
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def strip_start(self, data: bytes) -> bytes:
        """Return the bytes of a text less the space that SentencePiece inserts at its start."""
        return data.removeprefix(b" ") if self._has_space_at_start else data

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation; `variables` go to the template.

        Raises ValueError where the model has no template or the template fails.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: write the prompt as text")
        variables = {"tools": None, **self.special_tokens, **variables}
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = json.loads(self.backend.to_str())["decoder"] or {}
        return decoder.get("decoders", [decoder])

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(d.get("type") == "ByteLevel" for d in self._decoders)

    @cached_property
    def _has_space_at_start(self) -> bool:
        return any(
            (d.get("type") == "Strip" and d.get("content") == " " and d.get("start", 0) > 0)
            or (d.get("type") == "Metaspace" and d.get("prepend_scheme") != "never")
            for d in self._decoders
        )


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
