"""Text to token ids and back, over the `tokenizers` package."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.chat_template import render
from paged_jax.models.decoder_steps import read_steps


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
        """Wrap a `tokenizers.Tokenizer`; `special_tokens` maps bos_token, ... to their text.

        Raises ValueError for a decoder that does more than a token at a time can show.
        """
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in added.items() if token.special
        )
        self._added_ids = frozenset(added)
        self._steps = read_steps(json.loads(backend.to_str())["decoder"])

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
        data = self.ids_to_bytes(self.shown(ids, skip_special_tokens), starts_text=True)
        return data.decode("utf-8", "replace")

    def shown(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
        """Return those ids that have a text, less the special ones where they are skipped."""
        skipped = self.special_ids if skip_special_tokens else ()
        return [i for i in ids if i not in skipped and self.backend.id_to_token(i) is not None]

    def ids_to_bytes(self, ids: Sequence[int], *, starts_text: bool = False) -> bytes:
        """Return the bytes of ids, which may begin or end in a character.

        A text that starts with them lacks the space that SentencePiece inserts there:
        `"▁hi", "▁hi" -> b"hi hi"`.
        """
        data = b"".join(map(self.id_to_bytes, ids))
        if not (starts_text and ids):
            return data
        if self._steps.strips_start:
            return data.removeprefix(b" ")
        if mark := self._steps.mark_not_at_start:
            token = self.backend.id_to_token(ids[0])
            first = self._steps.token_to_bytes(token.replace(mark, ""))
            return first + data[len(self.id_to_bytes(ids[0])) :]
        return data

    def id_to_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id, which may be part of a character.

        Byte level: the id of `"Ġw" -> b" w"`. Byte fallback: of `"▁hi" -> b" hi"`, of
        `"<0xF0>" -> b"\\xf0"`, of the added token `"▁<PRE>" -> b" <PRE>"`. An id outside the
        vocabulary gives none.
        """
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        return self._steps.token_to_bytes(token, is_added=token_id in self._added_ids)

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
