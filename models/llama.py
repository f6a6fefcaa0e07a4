"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM) as a Flax NNX module over pages."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from paged_jax.kernels import AttentionPlan, plan_attention, ragged_paged_attention, write_kv
from paged_jax.models.interface import Pages, TokenBatch
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.product import product
from paged_jax.models.rope import rotate, rotation


class Llama(nnx.Module):
    """A decoder that satisfies `interface.Decoder`. All but the parameters is static.

    With d = hidden_size, F = intermediate_size, H = KV x G query heads over KV heads of width D:

    Attributes:
        embed: [V, d].
        head: [V, d]; absent when tied.
        norm.scale: [d].
        layers[i].attention_norm.scale, layers[i].mlp_norm.scale: [d].
        layers[i].attention.qkv: [KV, G + 2, D, d]; for each KV head its G query heads, its key
            head, its value head.
        layers[i].attention.out: [d, H * D].
        layers[i].mlp.gate_up: [2, F, d].
        layers[i].mlp.down: [d, F].

    Where the config asks for them, each layer has `attention.qkv_bias` [KV, G + 2, D],
    `attention.out_bias` [d], `attention.q_norm.scale` and `attention.k_norm.scale` [D],
    `mlp.gate_up_bias` [2, F] and `mlp.down_bias` [d].

    q, k, v are one product, and so are gate, up. The summed axis is last, as in checkpoints: on
    CPU that is the faster form for 1 to 32 rows. To shard by head, partition axis 0 of `qkv` and
    axis 1 of `out`: no head is divided and a query head stays with its KV head. In the MLP
    partition F.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_model_len
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.eos_token_ids = config.eos_token_ids
        self.kv_groups = config.kv_groups
        embedding = (config.vocab_size, config.hidden_size)
        self.embed = _normal(rngs, embedding, config)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config)
        if not config.tie_embeddings:
            self.head = _normal(rngs, embedding, config)

    def __call__(
        self, tokens: Int[Array, "T"], batch: TokenBatch, k_pages: Pages, v_pages: Pages
    ) -> tuple[Float[Array, "T d"], Pages, Pages]:
        """Return hidden states after the final norm, and the pages with this step's K, V written.

        `k_pages[p]`, `v_pages[p]` serve the p-th layer of every group. Raises ValueError if there
        are not as many as the largest group has layers.
        """
        num_arrays = max(group.num_layers for group in self.kv_groups)
        if not len(k_pages) == len(v_pages) == num_arrays:
            raise ValueError(
                f"the model has {num_arrays} page arrays, "
                f"got {len(k_pages)} for K and {len(v_pages)} for V"
            )
        ks, vs = list(k_pages), list(v_pages)
        # Layers of a group attend by one plan.
        plans = tuple(
            plan_attention(
                tokens.shape[0],
                batch.kv_lens,
                batch.block_tables[group],
                batch.cu_q_lens,
                batch.num_seqs,
                num_blocks=ks[0].shape[0],
                block_size=ks[0].shape[1],
                window=window,
            )
            for group, window in enumerate(self.config.group_windows)
        )
        turn = rotation(batch.positions, self.config.rope, self.head_dim)
        x = jnp.take(self.embed[...], tokens, axis=0, mode="clip")
        for layer, (group, p) in zip(self.layers, self.config.kv_places, strict=True):
            graphdef, params = nnx.split(layer)
            seen = GroupBatch(
                batch.slots[group],
                batch.block_tables[group],
                batch.kv_lens,
                batch.cu_q_lens,
                batch.num_seqs,
                plans[group],
            )
            x, ks[p], vs[p] = _run_layer(graphdef, params, x, turn, seen, ks[p], vs[p])
        return self.norm(x), tuple(ks), tuple(vs)

    @property
    def dtype(self) -> str:
        """Return the dtype of the parameters."""
        return self.embed.get_value().dtype.name

    def logits(self, hidden: Float[Array, "S d"]) -> Float32[Array, "S V"]:
        """Return the logits of hidden states, float32."""
        head = self.embed if self.config.tie_embeddings else self.head
        return product(hidden, head[...])


class GroupBatch(NamedTuple):
    """What the layers of one KV-cache group see of a batch (`interface.TokenBatch`)."""

    slots: Int[Array, "T"]
    block_tables: Int[Array, "S M"]
    kv_lens: Int[Array, "S"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, ""]
    plan: AttentionPlan


class Layer(nnx.Module):
    """One layer: attention and feed-forward network, each after a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config, rngs)

    def __call__(self, x, turn, batch: GroupBatch, k_pages, v_pages):
        """Return the layer's output and its pages."""
        attended, k_pages, v_pages = self.attention(
            self.attention_norm(x), turn, batch, k_pages, v_pages
        )
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), k_pages, v_pages


# Jitted, so that layers of equal shape share one trace: a start spends its Python time there.
@partial(jax.jit, static_argnums=0)
def _run_layer(graphdef, params, x, turn, batch: GroupBatch, k_pages, v_pages):
    return nnx.merge(graphdef, params)(x, turn, batch, k_pages, v_pages)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, config: LlamaConfig):
        self.eps = config.rms_norm_eps
        self.scale = nnx.Param(jnp.ones(size, config.dtype))

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Return x normed, in its dtype."""
        return _rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over pages."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        d, kv, dim = config.hidden_size, config.num_kv_heads, config.head_dim
        heads = (kv, config.num_heads // kv + 2, dim)
        self.qkv = _normal(rngs, (*heads, d), config)
        self.out = _normal(rngs, (d, config.num_heads * dim), config)
        self.qkv_bias = _zeros(heads, config) if config.qkv_bias else None
        self.out_bias = _zeros((d,), config) if config.out_bias else None
        self.q_norm = RMSNorm(dim, config) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config) if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "T d"],
        turn: tuple[Float32[Array, "T half"], Float32[Array, "T half"]],
        batch: GroupBatch,
        k_pages: Float[Array, "N block_size KV D"],
        v_pages: Float[Array, "N block_size KV D"],
    ) -> tuple[
        Float[Array, "T d"], Float[Array, "N block_size KV D"], Float[Array, "N block_size KV D"]
    ]:
        """Write this step's K and V, then attend.

        In that order, rows of one step see what others write into the blocks that they share.
        """
        qkv = _add(product(x, self.qkv[...]), self.qkv_bias).astype(x.dtype)
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            # One norm of the query heads and the key head after them.
            of_q = jnp.broadcast_to(self.q_norm.scale[...], (qk.shape[2] - 1, qk.shape[3]))
            qk = _rms_norm(
                qk, jnp.concatenate([of_q, self.k_norm.scale[...][None]]), self.q_norm.eps
            )
        qk = rotate(qk, *turn)
        q, k = qk[:, :, :-1].reshape(qk.shape[0], -1, qk.shape[3]), qk[:, :, -1]
        k_pages, v_pages = write_kv(
            k_pages, v_pages, k.astype(k_pages.dtype), v.astype(v_pages.dtype), batch.slots
        )
        attended = ragged_paged_attention(
            q,
            k_pages,
            v_pages,
            batch.kv_lens,
            batch.block_tables,
            batch.cu_q_lens,
            batch.num_seqs,
            scale=q.shape[-1] ** -0.5,
            window=batch.plan.planned.window,
            plan=batch.plan,
        )
        out = _add(
            product(attended.reshape(x.shape[0], -1).astype(x.dtype), self.out[...]), self.out_bias
        )
        return out.astype(x.dtype), k_pages, v_pages


class MLP(nnx.Module):
    """The SwiGLU feed-forward network."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_up = _normal(rngs, (2, inner, d), config)
        self.down = _normal(rngs, (d, inner), config)
        self.gate_up_bias = _zeros((2, inner), config) if config.mlp_bias else None
        self.down_bias = _zeros((d,), config) if config.mlp_bias else None

    def __call__(self, x: Float[Array, "T d"]) -> Float[Array, "T d"]:
        """Return down(silu(gate(x)) * up(x))."""
        gate_up = _add(product(x, self.gate_up[...]), self.gate_up_bias)
        inner = jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]
        return _add(product(inner.astype(x.dtype), self.down[...]), self.down_bias).astype(x.dtype)


def _add(x: Float[Array, "T *out"], bias: nnx.Param | None) -> Float[Array, "T *out"]:
    """Add a bias [*out], if there is one."""
    return x if bias is None else x + jnp.broadcast_to(bias[...].astype(x.dtype), x.shape)


def _rms_norm(
    x: Float[Array, "*rows d"], scale: Float[Array, "*heads d"], eps: float
) -> Float[Array, "*rows d"]:
    """Norm the last axis; `scale` broadcasts against x, so that heads may have their own."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = jnp.broadcast_to(scale.astype(jnp.float32), x.shape)
    return (wide * scale).astype(x.dtype)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], config: LlamaConfig) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape, config.dtype) * shape[-1] ** -0.5)


def _zeros(shape: tuple[int, ...], config: LlamaConfig) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, config.dtype))
