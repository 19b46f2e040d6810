"""The block of a decoder-only transformer: attention and MLP, each behind a norm and beside a shortcut.

Every fused projection is one kernel, so that tensor parallelism pays one all-reduce for it in the backward pass:
query, key and value as [embed, kv_heads, queries + 2, head_dim], SwiGLU's gate and up as [embed, 2, hidden].
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from models.checks import check_choice, check_positive, check_positive_int
from models.constraints import BATCH, MODEL, SEQ, by_batch, by_device, constrain

Rotation = tuple[Float[Array, "seq half"], Float[Array, "seq half"]]
"""Cosines and sines by which positions turn the halves of a head."""

Cache = tuple[Float[Array, "batch length kv_heads head_dim"], Float[Array, "batch length kv_heads head_dim"]]
"""Keys and values of one layer."""


@dataclasses.dataclass
class BlockConfig:
    """What one block is made of. The defaults are GPT-2 124M's."""

    embed_dim: int = 768  # features of the residual stream
    num_layers: int = 12  # blocks
    num_heads: int = 12  # of queries
    num_kv_heads: int | None = None  # of keys and values, each shared by num_heads / num_kv_heads; None: num_heads
    head_dim: int | None = None  # features of a head; None: embed_dim / num_heads
    hidden_dim: int | None = None  # features inside the MLP; None: 4 × embed_dim
    norm: str = "layernorm"  # or "rmsnorm"
    norm_epsilon: float = 1e-5  # added to the variance
    activation: str = "gelu"  # its tanh form, as GPT-2 has it; or "swiglu"
    bias: bool = True  # in the projections and in LayerNorm
    dropout: float = 0.0  # of the embeddings and of each branch; attention weights are never dropped
    attention: str | None = None  # of jax.nn.dot_product_attention: None (its choice), "xla" or "cudnn" (flash)
    dtype: str = "float32"  # of the computation: "float32", "bfloat16" or, under jax_enable_x64, "float64"

    def __post_init__(self) -> None:
        """Raises ValueError for a field that makes no block."""
        name = type(self).__name__
        for field in ("embed_dim", "num_layers", "num_heads"):
            check_positive_int(f"{name}.{field}", getattr(self, field), "GPTConfig() is GPT-2 124M.")
        for field in ("num_kv_heads", "head_dim", "hidden_dim"):
            if getattr(self, field) is not None:
                check_positive_int(f"{name}.{field}", getattr(self, field), "None takes the usual size.")
        check_positive(f"{name}.norm_epsilon", self.norm_epsilon, "Published models have 1e-5.")
        check_choice(f"{name}.norm", self.norm, ("layernorm", "rmsnorm"), "GPT-2 has the first, Llama the second.")
        check_choice(f"{name}.activation", self.activation, ("gelu", "swiglu"), "SwiGLU is Llama's.")
        check_choice(f"{name}.attention", self.attention, (None, "xla", "cudnn"), "None serves everywhere.")
        check_choice(f"{name}.dtype", self.dtype, ("float32", "bfloat16", "float64"), "Params are float32 or wider.")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"{name}.dropout: expected a probability in [0, 1); found {self.dropout!r}. 0 turns dropout off."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"{name}.num_kv_heads: expected a divisor of num_heads = {self.num_heads}; found {self.num_kv_heads}. "
                "Each key and value head serves the same number of query heads."
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"{name}.num_heads: expected a divisor of embed_dim = {self.embed_dim}; found {self.num_heads}. "
                "Change one of them, or give head_dim."
            )
        if self.attention == "cudnn" and (self.dtype != "bfloat16" or self.head_features % 8):
            raise ValueError(
                f'{name}.attention: "cudnn" expects dtype "bfloat16" and a head_dim that 8 divides; '
                f"found {self.dtype!r} and {self.head_features}. None serves everywhere."
            )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_features(self) -> int:
        """Features of a head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def hidden_features(self) -> int:
        """Features inside the MLP."""
        return self.hidden_dim or 4 * self.embed_dim

    @property
    def param_dtype(self) -> np.dtype:
        """float32, and float64 where the computation is."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)


def make_norm(config: BlockConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Over the features; statistics in float32 at least."""
    dtypes: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "param_dtype": config.param_dtype}
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs, **dtypes)
    # The fast variance E[x²] − E[x]² loses digits where a feature is large, as some of GPT-2's are.
    return nnx.LayerNorm(
        config.embed_dim,
        epsilon=config.norm_epsilon,
        use_bias=config.bias,
        use_fast_variance=False,
        rngs=rngs,
        **dtypes,
    )


class Projection(nnx.LinearGeneral):
    """From the last dims to new ones, with a kernel [*in_dims, *out_dims]."""

    def __init__(
        self,
        config: BlockConfig,
        in_dims: tuple[int, ...],
        out_dims: tuple[int, ...],
        stddev: float,
        *,
        is_head: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            in_dims,
            out_dims,
            axis=tuple(range(-len(in_dims), 0)),
            use_bias=config.bias and not is_head,
            kernel_init=nnx.initializers.normal(stddev),
            dtype=jnp.dtype(config.dtype),
            param_dtype=config.param_dtype,
            preferred_element_type=config.param_dtype if is_head else None,  # the loss reads unrounded logits
            rngs=rngs,
        )

    def __call__(
        self, inputs: Float[Array, "batch seq *in_dims"], out_sharding: Any = None
    ) -> Float[Array, "batch seq *out_dims"]:
        return by_batch(super().__call__(by_device(inputs), out_sharding), *inputs.shape[:2])


class Embedding(nnx.Module):
    """The vectors of the tokens, which may be the head's kernel as well. The vocabulary is split over `model`."""

    def __init__(self, vocab_size: int, config: BlockConfig, stddev: float, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(stddev)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, config.embed_dim), config.param_dtype))
        self.dtype, self.logits_dtype = jnp.dtype(config.dtype), config.param_dtype

    def copies(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "devices vocab embed"]:
        """The vectors once for each device that holds a part of the tokens, for `lookup` and `logits`.

        Their two gradients are then added before the devices' are: one all-reduce in place of two.
        """
        num_copies = jax.eval_shape(by_device, tokens).shape[0]
        embedding = self.embedding[...].astype(self.dtype)
        return constrain(jnp.broadcast_to(embedding, (num_copies, *embedding.shape)), BATCH + SEQ, MODEL, ())

    def lookup(self, copies: Array, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """The tokens' vectors; NaN for a token outside the vocabulary."""
        # Float32, not for the values but for the gradient: it adds as many terms as a token has places in the batch.
        tables = copies.astype(self.logits_dtype)
        vectors = jax.vmap(lambda table, ids: jnp.take(table, ids, axis=0))(tables, by_device(tokens))
        return by_batch(vectors.astype(self.dtype), *tokens.shape)

    def logits(self, copies: Array, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """The products of the features with every token's vector."""
        products = jnp.einsum("dbse,dve->dbsv", by_device(x), copies, preferred_element_type=self.logits_dtype)
        return by_batch(products, *x.shape[:2])


class Attention(nnx.Module):
    """Causal self-attention. Heads are grouped by the key and value they share, and split by group over `model`."""

    def __init__(self, config: BlockConfig, stddev: float, residual_stddev: float, *, rngs: nnx.Rngs) -> None:
        queries = config.num_heads // config.kv_heads
        embed, heads = (config.embed_dim,), (config.kv_heads, queries, config.head_features)
        fused = (config.kv_heads, queries + 2, config.head_features)
        self.qkv = Projection(config, embed, fused, stddev, rngs=rngs)
        self.out = Projection(config, heads, embed, residual_stddev, rngs=rngs)
        self.implementation = config.attention

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        rotation: Rotation | None,
        cache: Cache | None,
        offset: int | Array,
    ) -> tuple[Float[Array, "batch seq embed"], Cache | None]:
        """The output and, where a cache is given, the cache with this call's keys and values from `offset` on."""
        qkv = constrain(self.qkv(x), BATCH, SEQ, MODEL)
        query_key, value = qkv[..., :-1, :], qkv[..., -1, :]
        if rotation is not None:
            query_key = rotate(query_key, rotation)
        query, key = query_key[..., :-1, :], query_key[..., -1, :]
        if cache is None:
            # A long sequence split over `seq`: each device keeps its queries and gathers all keys and values.
            key, value = (constrain(heads, BATCH, (), MODEL) for heads in (key, value))
            mask = None
        else:
            key = jax.lax.dynamic_update_slice_in_dim(cache[0], key, offset, axis=1)
            value = jax.lax.dynamic_update_slice_in_dim(cache[1], value, offset, axis=1)
            cache = key, value
            positions = offset + jnp.arange(x.shape[1])
            mask = jnp.arange(key.shape[1]) <= positions[:, None]
        attended = attend(query, key, value, mask, self.implementation)
        return self.out(constrain(attended, BATCH, SEQ, MODEL)), cache


def attend(
    query: Float[Array, "batch seq kv_heads queries head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Array | None,
    implementation: Any = None,
) -> Float[Array, "batch seq kv_heads queries head_dim"]:
    """softmax(query · key / √head_dim) · value over the keys where bool[seq, keys] `mask` is true; None: causal."""
    if query.dtype == jnp.float64:
        return _attend_float64(query, key, value, mask)
    heads = query.reshape(*query.shape[:2], -1, query.shape[-1])
    if mask is None:
        attended = jax.nn.dot_product_attention(heads, key, value, is_causal=True, implementation=implementation)
    else:
        attended = jax.nn.dot_product_attention(heads, key, value, mask=mask[None, None])
    return attended.reshape(query.shape)


def _attend_float64(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    """`jax.nn.dot_product_attention` takes its softmax in float32 whatever the inputs are."""
    mask = jnp.tri(query.shape[1], key.shape[1], dtype=bool) if mask is None else mask
    scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key) / math.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, value)


def rotate(x: Float[Array, "batch seq kv_heads heads head_dim"], rotation: Rotation) -> Array:
    """Rotary position embedding of Su et al. 2021, https://arxiv.org/abs/2104.09864.

    Feature i turns with feature i + head_dim/2, the layout of the weights on the Hugging Face hub (Meta's own files
    pair 2i with 2i + 1).
    """
    cosines, sines = (angles[:, None, None, :] for angles in rotation)
    first, second = jnp.split(x.astype(cosines.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return turned.astype(x.dtype)


class MLP(nnx.Module):
    """Up, activation, down. The hidden features are split over `model`."""

    def __init__(self, config: BlockConfig, stddev: float, residual_stddev: float, *, rngs: nnx.Rngs) -> None:
        self.gated = config.activation == "swiglu"
        embed, hidden = (config.embed_dim,), (config.hidden_features,)
        self.up = Projection(config, embed, (2, *hidden) if self.gated else hidden, stddev, rngs=rngs)
        self.down = Projection(config, hidden, embed, residual_stddev, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        hidden = self.up(x)
        if self.gated:
            hidden = constrain(hidden, BATCH, SEQ, (), MODEL)
            hidden = nnx.silu(hidden[..., 0, :]) * hidden[..., 1, :]  # Shazeer 2020, https://arxiv.org/abs/2002.05202
        else:
            hidden = nnx.gelu(constrain(hidden, BATCH, SEQ, MODEL), approximate=True)
        return self.down(hidden)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        stddev = 0.02
        # GPT-2's paper, section 2.3: 1/√N for N layers that add to the residual stream, two in each block.
        residual_stddev = stddev / math.sqrt(2 * config.num_layers)
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = Attention(config, stddev, residual_stddev, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs=rngs)
        self.mlp = MLP(config, stddev, residual_stddev, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        rotation: Rotation | None,
        dropout_key: Array | None = None,
        cache: Cache | None = None,
        offset: int | Array = 0,
    ) -> tuple[Float[Array, "batch seq embed"], Cache | None]:
        """The residual stream and the cache after this block; `dropout_key` is needed where dropout draws."""
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x = constrain(x, BATCH, SEQ, ())
        attended, cache = self.attention(self.attention_norm(x), rotation, cache, offset)
        x = x + self.dropout(attended, rngs=keys[0])
        x = x + self.dropout(self.mlp(self.mlp_norm(x)), rngs=keys[1])
        return constrain(x, BATCH, SEQ, ()), cache
