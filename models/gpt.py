"""GPT: a decoder-only transformer, from GPT-2 to Llama 3.

Radford et al. 2019 (GPT-2), https://github.com/openai/gpt-2, and Grattafiori et al. 2024 (Llama 3),
https://arxiv.org/abs/2407.21783. The block stands in `gpt_layers.py`, sampling in `generation.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from models.checks import check_choice, check_positive, check_positive_int
from models.constraints import BATCH, MODEL, SEQ, check_divides, constrain
from models.generation import generate
from models.gpt_layers import Block, BlockConfig, Embedding, Projection, Rotation, make_norm

_REMAT = ("none", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


@dataclasses.dataclass(unsafe_hash=True)  # the model keeps a copy, and jax.jit wants to hash the model's definition
class GPTConfig(BlockConfig):
    """Which GPT. The defaults are GPT-2 124M, with 124,439,808 parameters.

    >>> config = GPTConfig(vocab_size=256, context=16, embed_dim=32, num_layers=2, num_heads=4)
    >>> nnx.eval_shape(lambda: config.build(nnx.Rngs(0))(jnp.ones((2, 16), jnp.int32))).shape
    (2, 16, 256)
    """

    vocab_size: int = 50_257  # different tokens
    context: int = 1024  # tokens that the model can look at
    positions: str = "learned"  # one vector each, added to the tokens'; or "rope": queries and keys are turned
    rope_theta: float = 10_000.0  # base of the wavelengths, which go from 2π to 2π·theta tokens
    rope_scaling: float = 1.0  # by which Llama 3.1 lengthens the long wavelengths; 1: not at all
    rope_original_context: int = 8192  # tokens of the context before rope_scaling
    tie_embeddings: bool = True  # the embedding is the head's kernel too
    z_loss: float = 0.0  # weight of the squared log-normaliser in the loss
    remat: str = "none"  # else the jax.checkpoint policy that says what the backward pass need not compute again
    scan_layers: bool = False  # one compiled block over stacked params: compiles sooner, may run slower

    def __post_init__(self) -> None:
        """Raises ValueError for a field that makes no GPT."""
        super().__post_init__()
        for field in ("vocab_size", "context", "rope_original_context"):
            check_positive_int(f"GPTConfig.{field}", getattr(self, field), "Count in tokens.")
        for field in ("rope_theta", "rope_scaling"):
            check_positive(f"GPTConfig.{field}", getattr(self, field), "Llama 3.2 1B has 500000 and 32.")
        check_choice("GPTConfig.positions", self.positions, ("learned", "rope"), "GPT-2 learns, Llama turns.")
        check_choice("GPTConfig.remat", self.remat, _REMAT, "They are policies of jax.checkpoint.")
        if self.positions == "rope" and self.head_features % 2:
            raise ValueError(
                f"GPTConfig.head_dim: expected an even number for rope; found {self.head_features}. "
                "Features turn in pairs."
            )

    @classmethod
    def gpt2(cls, **overrides: Any) -> "GPTConfig":
        """GPT-2 124M: 124,439,808 parameters. `overrides` are fields."""
        return cls(**overrides)

    @classmethod
    def llama3_8b(cls, **overrides: Any) -> "GPTConfig":
        """Llama 3 8B: 8,030,261,248 parameters. `overrides` are fields."""
        fields: dict[str, Any] = {
            "vocab_size": 128_256,
            "context": 8192,
            "embed_dim": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 8,
            "hidden_dim": 14_336,
            "positions": "rope",
            "rope_theta": 500_000.0,
            "norm": "rmsnorm",
            "activation": "swiglu",
            "bias": False,
            "tie_embeddings": False,
        }
        return cls(**fields | overrides)

    @classmethod
    def llama3_1b(cls, **overrides: Any) -> "GPTConfig":
        """Llama 3.2 1B: 1,235,814,400 parameters. `overrides` are fields."""
        fields: dict[str, Any] = {
            "context": 131_072,
            "embed_dim": 2048,
            "num_layers": 16,
            "hidden_dim": 8192,
            "rope_scaling": 32.0,
            "tie_embeddings": True,
        }
        return cls.llama3_8b(**fields | overrides)

    def build(self, rngs: nnx.Rngs) -> "GPT":
        """The model with its parameters drawn from `rngs`, from which dropout takes its stream as well."""
        return GPT(self, rngs=rngs)

    def sharding_rules(self) -> tuple[tuple[str, P], ...]:
        """Megatron's pairs: a first projection is split by what it puts out, a second by what it takes in.

        Heads are split by the key and value they share, the embedding and the head by vocabulary (Shoeybi et al.
        2019, https://arxiv.org/abs/1909.08053, section 3). First match wins.
        """
        block = r"blocks" if self.scan_layers else r"blocks/\d+"
        layers = (None,) if self.scan_layers else ()  # the dim that stacks them
        pairs = (None,) if self.activation == "swiglu" else ()  # the dim that holds gate and up
        biases = (
            (rf"{block}/attention/qkv/bias", P(*layers, "model", None, None)),
            (rf"{block}/mlp/up/bias", P(*layers, *pairs, "model")),
        )
        return (
            (r"tokens/embedding", P("model", None)),
            *(((r"positions", P()),) if self.positions == "learned" else ()),
            (rf"{block}/attention/qkv/kernel", P(*layers, None, "model", None, None)),
            (rf"{block}/attention/out/kernel", P(*layers, "model", None, None, None)),
            (rf"{block}/mlp/up/kernel", P(*layers, None, *pairs, "model")),
            (rf"{block}/mlp/down/kernel", P(*layers, "model", None)),
            *(biases if self.bias else ()),
            (rf"{block}/.*", P()),
            (r"final_norm/.*", P()),
            *(() if self.tie_embeddings else ((r"head/kernel", P(None, "model")),)),
        )


class GPT(nnx.Module):
    """Embedding, blocks, norm and head. `train()` and `eval()` switch dropout.

    Matrices start as normal(0.02), those that add to the residual stream divided by √(2·layers), positions as
    normal(0.01), as GPT-2's paper and code have it. Meta has published no initialisation of Llama 3; 0.02 is that of
    its configuration on the Hugging Face hub.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        if jax.dtypes.canonicalize_dtype(config.param_dtype) != config.param_dtype:
            raise ValueError(
                'GPTConfig.dtype: "float64" expects jax_enable_x64, else JAX computes in float32. '
                'Set jax.config.update("jax_enable_x64", True) first.'
            )
        self.config = dataclasses.replace(config)  # flags may go on changing the user's
        self.tokens = Embedding(config.vocab_size, config, 0.02, rngs=rngs)
        if config.positions == "learned":
            init, shape = nnx.initializers.normal(0.01), (config.context, config.embed_dim)
            self.positions = nnx.Param(init(rngs.params(), shape, config.param_dtype))
        self.blocks: Any = _stacked_blocks(config, rngs) if config.scan_layers else _blocks(config, rngs)
        self.final_norm = make_norm(config, rngs=rngs)
        if not config.tie_embeddings:
            sizes = (config.embed_dim,), (config.vocab_size,)
            self.head = Projection(config, *sizes, 0.02, is_head=True, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)
        # One stream for all: each layer's key is split from it, so that scan and remat draw the same masks.
        self.noise = rngs.dropout.fork() if config.dropout else None

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
        """Logits, in float32 (float64 where the computation is), of the token after each.

        Raises ValueError for more tokens than `context`, and for dims that a mesh around the trace does not divide.
        """
        check_divides(tokens, "GPT")
        return self._forward(tokens, None, 0)[0]

    def decode(
        self, tokens: Int[Array, "batch seq"], caches: Any, offset: int | Array
    ) -> tuple[Float[Array, "batch seq vocab"], Any]:
        """Logits of tokens that stand at `offset` and after, and the caches with them added.

        Args:
          tokens: the next ones.
          caches: what `init_caches` or the last `decode` gave.
          offset: number of tokens before these; `offset + seq` must not exceed the caches' length.
        """
        return self._forward(tokens, caches, offset)

    def init_caches(self, batch_size: int, length: int) -> Any:
        """Room for the keys and values of `length` tokens: one pair per layer, stacked under scan_layers."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        shape: tuple[int, ...] = (batch_size, length, config.kv_heads, config.head_features)
        if config.scan_layers:
            shape = (config.num_layers, *shape)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]

    def generate(
        self, prompt: Int[Array, "batch seq"], num_tokens: int, key: Array, temperature: float | Array = 1.0
    ) -> Int[Array, "batch num_tokens"]:
        """See `models.generation.generate`."""
        return generate(self, prompt, num_tokens, key, temperature)

    def _forward(
        self, tokens: Int[Array, "batch seq"], caches: Any, offset: int | Array
    ) -> tuple[Float[Array, "batch seq vocab"], Any]:
        config, length = self.config, tokens.shape[1]
        if length > config.context:
            raise ValueError(
                f"GPT: expected at most {config.context} tokens; found {tokens.shape}. Set GPTConfig.context higher."
            )
        vectors = self.tokens.copies(tokens)
        x = self.tokens.lookup(vectors, tokens)
        rotation = None
        if config.positions == "learned":
            positions = jax.lax.dynamic_slice_in_dim(self.positions[...], offset, length)
            x = x + positions.astype(x.dtype)
        else:
            rotation = _rotation(config, offset + jnp.arange(length))
        keys = None
        if self.noise is not None and not self.dropout.deterministic:
            keys = jax.random.split(self.noise(), config.num_layers + 1)
        x = self.dropout(constrain(x, BATCH, SEQ, ()), rngs=None if keys is None else keys[-1])
        x, caches = self._run_blocks(x, rotation, keys, caches, offset)
        x = self.final_norm(x)
        logits = self.tokens.logits(vectors, x) if config.tie_embeddings else self.head(x)
        return constrain(logits, BATCH, SEQ, MODEL), caches

    def _run_blocks(
        self, x: Float[Array, "batch seq embed"], rotation: Rotation | None, keys: Any, caches: Any, offset: int | Array
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        config = self.config
        layers = [self.blocks] if config.scan_layers else [self.blocks[str(i)] for i in range(config.num_layers)]
        graphdef, states = nnx.graphdef(layers[0]), [nnx.state(layer) for layer in layers]

        def apply(x: Array, layer: tuple[nnx.State, Any, Any]) -> tuple[Array, Any]:
            state, key, cache = layer
            return nnx.merge(graphdef, state)(x, rotation, key, cache, offset)

        if config.remat != "none":
            policy = getattr(jax.checkpoint_policies, config.remat)
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=not config.scan_layers)
        if config.scan_layers:
            return jax.lax.scan(apply, x, (states[0], None if keys is None else keys[:-1], caches))
        new_caches = []
        for index, state in enumerate(states):
            layer = state, None if keys is None else keys[index], None if caches is None else caches[index]
            x, cache = apply(x, layer)
            new_caches.append(cache)
        return x, new_caches


def _blocks(config: GPTConfig, rngs: nnx.Rngs) -> nnx.Dict:
    return nnx.Dict({str(index): Block(config, rngs=rngs) for index in range(config.num_layers)})


def _stacked_blocks(config: GPTConfig, rngs: nnx.Rngs) -> Block:
    """One block whose variables have a leading dim of layers."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return build(rngs)


def _rotation(config: GPTConfig, positions: Int[Array, " seq"]) -> Rotation:
    """Cosines and sines of position × frequency, in float32 at least.

    Llama 3.1 divides by `rope_scaling` the frequencies whose wavelength is over the original context, leaves those
    under a quarter of it, and blends between (https://arxiv.org/abs/2407.21783; the constants 1 and 4 are those of
    Meta's code and of the published configurations).
    """
    half = config.head_features // 2
    frequencies = config.rope_theta ** -(np.arange(half) / half)
    turns = config.rope_original_context * frequencies / (2 * np.pi)  # in the original context
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    frequencies = frequencies * (kept + (1 - kept) / config.rope_scaling)
    angles = positions[:, None] * jnp.asarray(frequencies, config.param_dtype)
    return jnp.cos(angles), jnp.sin(angles)
