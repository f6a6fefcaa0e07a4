"""The sizes and options of a Llama-family decoder."""

import math
from dataclasses import dataclass, field

from paged_jax.checks import check_int
from paged_jax.kv_group import KVGroup, attention_group
from paged_jax.models.rope import RopeConfig, inverse_frequencies

DTYPES = ("float32", "float16", "bfloat16")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "max_model_len",
)
# A number from a damaged file is refused before anything is made of it.
MAX_LAYERS, MAX_HEAD_DIM = 10_000, 65_536


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama, Mistral, Qwen2, Qwen3 or SmolLM decoder: hashable, checked when made.

    Raises ValueError that names the field, its value and what is accepted.

    Attributes:
        head_dim: width of a head; 0 means hidden_size / num_heads.
        windows: each layer's sliding window in tokens, None for full attention; empty means full
            attention in all layers.
        tie_embeddings: the logits are products with the embedding; there is no `head`.
        qkv_bias, out_bias, mlp_bias: these products have a bias.
        qk_norm: queries and keys of each head are normed before they are rotated.
        eos_token_ids: ids that end an answer.
        dtype: of newly made parameters, one of DTYPES; computation follows the parameters.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_model_len: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    windows: tuple[int | None, ...] = ()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self):
        for name in SIZES:
            self._check_size(name, 1)
        self._check_size("num_layers", 1, MAX_LAYERS)
        self._check_size("head_dim", 0, MAX_HEAD_DIM)
        self._check_heads()
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise ValueError(f"rms_norm_eps must be positive, got {self.rms_norm_eps!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"windows names {len(self.windows)} layers, the model has {self.num_layers}"
            )
        if bad := [w for w in self.windows if w is not None and w < 1]:
            raise ValueError(f"a window must be at least one token, got {bad[0]}")
        if bad := [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"eos_token_ids names {bad[0]}, the vocabulary has {self.vocab_size}")
        if not any(self.windows):
            object.__setattr__(self, "windows", ())  # equal models have equal configs
        inverse_frequencies(self.rope, self.head_dim)  # raises on a wrong number of factors

    def _check_size(self, name: str, least: int, most: int | None = None) -> None:
        value = check_int(name, getattr(self, name), least, most, error=ValueError)
        object.__setattr__(self, name, value)

    def _check_heads(self) -> None:
        """Replace a head_dim of 0. Raise ValueError where heads and widths do not fit."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim == 0:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of "
                    f"num_heads {self.num_heads}: give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return each layer's window, None for full attention."""
        return self.windows or (None,) * self.num_layers

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """Return the window of each KV-cache group: those in use, in order of their first layer."""
        return tuple(dict.fromkeys(self.layer_windows))

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Return the KV-cache groups, in the order of `group_windows`."""
        windows = self.layer_windows
        return tuple(attention_group(w, windows.count(w)) for w in self.group_windows)

    @property
    def kv_places(self) -> tuple[tuple[int, int], ...]:
        """Return each layer's KV-cache group and its place there, which is also its page array."""
        windows, groups = self.layer_windows, self.group_windows
        return tuple((groups.index(w), windows[:layer].count(w)) for layer, w in enumerate(windows))
