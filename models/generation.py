"""Sampling from a language model: one compiled loop over a cache of fixed size."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int


def generate(
    model: Any, prompt: Int[Array, "batch seq"], num_tokens: int, key: Array, temperature: float | Array = 1.0
) -> Int[Array, "batch num_tokens"]:
    """Tokens that follow the prompt, drawn one after the other from softmax(logits / temperature).

    The model is not changed; its dropout is off. Compiled once for each shape of the prompt and each `num_tokens`.

    Args:
      model: a `GPT`, or anything with its `decode`, `init_caches` and `config.context`.
      prompt: at least one token in each row.
      num_tokens: how many to draw.
      key: decides the draws, and nothing else does.
      temperature: 0 always takes the likeliest token.

    Raises:
      ValueError: for an empty prompt, no tokens to draw, or more in all than the model's context.
    """
    length = prompt.shape[1] + num_tokens
    if prompt.shape[1] < 1 or num_tokens < 1:
        raise ValueError(
            f"generate: expected at least one token in each prompt and one to draw; "
            f"found {prompt.shape[1]} and {num_tokens}."
        )
    if length > model.config.context:
        raise ValueError(
            f"generate: expected prompt and new tokens to fit the context of {model.config.context}; "
            f"found {prompt.shape[1]} + {num_tokens}. Shorten one of them."
        )
    graphdef, state = nnx.split(nnx.view(model, deterministic=True))
    return _generate(graphdef, state, prompt, num_tokens, key, jnp.asarray(temperature, jnp.float32))


@functools.partial(jax.jit, static_argnames=("graphdef", "num_tokens"))
def _generate(
    graphdef: nnx.GraphDef, state: nnx.State, prompt: Array, num_tokens: int, key: Array, temperature: Array
) -> Array:
    model = nnx.merge(graphdef, state)
    batch_size, prompt_length = prompt.shape
    caches = model.init_caches(batch_size, prompt_length + num_tokens)

    def draw(logits: Array, number: int | Array) -> Array:
        greedy = jnp.argmax(logits, axis=-1)
        scaled = logits / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(jax.random.fold_in(key, number), scaled)
        return jnp.where(temperature > 0, drawn, greedy).astype(prompt.dtype)

    def step(carry: tuple[Array, Any], number: Array) -> tuple[tuple[Array, Any], Array]:
        token, caches = carry
        logits, caches = model.decode(token[:, None], caches, prompt_length + number - 1)
        token = draw(logits[:, 0], number)
        return (token, caches), token

    logits, caches = model.decode(prompt, caches, 0)
    first = draw(logits[:, -1], 0)
    _, rest = jax.lax.scan(step, (first, caches), jnp.arange(1, num_tokens))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
