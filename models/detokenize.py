"""Text of a growing list of token ids, never a broken character."""

import codecs
from collections.abc import Sequence

from paged_jax.models.tokenizer import Tokenizer


class Detokenizer:
    """Takes ids as they come and gives the text they complete.

    The texts of all `push` and the `flush` joined are `tokenizer.decode` of all ids. A character whose bytes are not
    all there yet is held back; bytes that can never be UTF-8 become U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False):
        """`continues`: the ids carry on a text, so a leading space that SentencePiece decoding would drop stays."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._at_start = not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The characters that these ids complete."""
        data = b"".join(self._tokenizer.id_to_bytes(i) for i in ids if i not in self._skipped)
        if data and self._at_start:
            data, self._at_start = self._tokenizer.strip_start(data), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is held back, as U+FFFD; the next `push` starts on a character of its own."""
        return self._decoder.decode(b"", final=True)
