"""GPT: published sizes, what a causal model is, one function under every option, decoding, layouts, wrong configs."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models import GPTConfig
from models.gpt import _rotation
from models.gpt_layers import attend, rotate
from trainer.tasks.language_model import token_losses

TINY: dict[str, Any] = {"vocab_size": 40, "context": 16, "embed_dim": 32, "num_layers": 2, "num_heads": 8}
LLAMA: dict[str, Any] = {
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
    "num_kv_heads": 4,
    "hidden_dim": 48,
}
FAMILIES = pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])


def tokens_of(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).integers(TINY["vocab_size"], size=shape, dtype=np.int32)


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def build(**fields: Any) -> nnx.Module:
    """A model whose weights are large enough that a mistake in any of them shows; the same for equal shapes."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPTConfig(**TINY | fields).build(nnx.Rngs(0))))
    leaves, generator = [], np.random.default_rng(0)
    for path, variable in nnx.to_flat_state(state):
        value: Any = 0.2 * generator.normal(size=variable.shape) + (path[-1] == "scale")
        if isinstance(variable, nnx.RngState):
            value = jax.random.key(0) if isinstance(variable, nnx.RngKey) else 0
        dtype = variable.dtype if isinstance(variable, nnx.Param | nnx.RngCount) else None
        leaves.append((path, variable.replace(jnp.asarray(value, dtype))))
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


# Tests of values spend their time in the compiler: half of it without the optimisations that they do not need.
QUICK = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _forward(graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array) -> tuple[jax.Array, nnx.State]:
    model = nnx.merge(graphdef, state)
    return model(tokens), nnx.state(model, nnx.RngState)


def forward(model: nnx.Module, tokens: np.ndarray) -> jax.Array:
    logits, streams = _forward(*nnx.split(model), tokens)
    nnx.update(model, streams)
    return logits


def loss_and_grads(model: nnx.Module, tokens: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of the next-token loss, jitted; params by path."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: nnx.State) -> jax.Array:
        logits = nnx.merge(graphdef, params, rest, copy=True)(tokens)
        cross_entropy, log_normalizer = token_losses(logits, jnp.roll(tokens, -1, axis=1))
        return jnp.mean(cross_entropy + 1e-2 * log_normalizer**2)

    value, grads = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)
    return value, flat(grads)


def flat(state: nnx.State) -> dict[str, jax.Array]:
    return {"/".join(path): variable[...] for path, variable in nnx.to_flat_state(state)}


def unstacked(arrays: dict[str, jax.Array], num_layers: int) -> dict[str, jax.Array]:
    """The unrolled model's names and arrays for those of a scanned one."""
    named = {}
    for path, array in arrays.items():
        for index in range(num_layers) if path.startswith("blocks/") else ():
            named[path.replace("blocks/", f"blocks/{index}/")] = array[index]
        if not path.startswith("blocks/"):
            named[path] = array
    return named


def assert_close(actual: dict[str, jax.Array], expected: dict[str, jax.Array], rtol: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        scale = np.abs(array).max()
        np.testing.assert_allclose(actual[path], array, atol=rtol * scale, err_msg=path)


# Sizes and initialisation


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (GPTConfig.gpt2(), 124_439_808),
        (GPTConfig.gpt2(scan_layers=True), 124_439_808),
        (GPTConfig.llama3_8b(), 8_030_261_248),
        (GPTConfig.llama3_1b(), 1_235_814_400),
    ],
    ids=["gpt2", "gpt2-scan", "llama3_8b", "llama3_1b"],
)
def test_parameter_counts_are_those_published(config: GPTConfig, num_params: int) -> None:
    model = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    assert sum(math.prod(param.shape) for param in jax.tree.leaves(nnx.state(model, nnx.Param))) == num_params


def test_initialisation_is_gpt2s_and_differs_between_stacked_layers() -> None:
    sizes = {"vocab_size": 500, "context": 100, "embed_dim": 64, "num_layers": 2, "num_heads": 4}
    model = nnx.jit(lambda: GPTConfig(**sizes, scan_layers=True).build(nnx.Rngs(0)))()
    expected = {"embedding": 0.02, "positions": 0.01, "qkv/kernel": 0.02, "up/kernel": 0.02}
    expected |= {"out/kernel": 0.02 / 2, "down/kernel": 0.02 / 2, "bias": 0.0}
    for path, array in flat(nnx.state(model, nnx.Param)).items():
        for ending, stddev in expected.items():
            if path.endswith(ending):
                assert np.asarray(array).std() == pytest.approx(stddev, rel=0.05), path
    kernel = np.asarray(model.blocks.mlp.up.kernel[...])
    assert not np.array_equal(kernel[0], kernel[1])


# What it computes

PROJECTIONS = ("attention/qkv", "attention/out", "mlp/up", "mlp/down")


def reference_logits(config: GPTConfig, params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """One sequence, written out head by head as the papers have it, in float64."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        if config.norm == "rmsnorm":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * params[f"{name}/scale"]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon)
        return x * params[f"{name}/scale"] + params[f"{name}/bias"]

    def turn(x: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2
        waves = (x[:, :half] + 1j * x[:, half:]) * np.exp(
            1j * np.arange(len(x))[:, None] * config.rope_theta ** -(np.arange(half) / half)
        )
        return np.concatenate([waves.real, waves.imag], axis=1)

    x = params["tokens/embedding"][tokens]
    if config.positions == "learned":
        x = x + params["positions"][: len(tokens)]
    causal = np.tri(len(tokens), dtype=bool)
    names = [f"{projection}/{array}" for projection in PROJECTIONS for array in ("kernel", "bias")]
    for layer in range(config.num_layers):
        get = {name: params.get(f"blocks/{layer}/{name}", 0.0) for name in names}
        h = norm(x, f"blocks/{layer}/attention_norm")
        qkv = np.einsum("se,ekgh->skgh", h, get["attention/qkv/kernel"]) + get["attention/qkv/bias"]
        attended = np.zeros((*qkv.shape[:2], qkv.shape[2] - 2, qkv.shape[3]))
        for group in range(qkv.shape[1]):
            key, value = qkv[:, group, -2], qkv[:, group, -1]
            for head in range(attended.shape[2]):
                query = qkv[:, group, head]
                scores = turn(query) @ turn(key).T if config.positions == "rope" else query @ key.T
                weights = np.where(causal, np.exp(scores / math.sqrt(query.shape[1])), 0)
                attended[:, group, head] = weights / weights.sum(-1, keepdims=True) @ value
        x = x + np.einsum("skgh,kghe->se", attended, get["attention/out/kernel"]) + get["attention/out/bias"]
        h = norm(x, f"blocks/{layer}/mlp_norm")
        up = np.tensordot(h, get["mlp/up/kernel"], 1) + get["mlp/up/bias"]
        if config.activation == "swiglu":
            up = up[:, 0] / (1 + np.exp(-up[:, 0])) * up[:, 1]
        else:
            up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + up @ get["mlp/down/kernel"] + get["mlp/down/bias"]
    head = params["tokens/embedding"].T if config.tie_embeddings else params["head/kernel"]
    return norm(x, "final_norm") @ head


@FAMILIES
def test_it_is_the_published_function(family: dict[str, Any]) -> None:
    model = build(**family)
    params = {path: np.asarray(array, np.float64) for path, array in flat(nnx.state(model, nnx.Param)).items()}
    tokens = tokens_of(0, (2, 16))
    expected = np.stack([reference_logits(model.config, params, np.asarray(row)) for row in tokens])
    np.testing.assert_allclose(forward(model, tokens), expected, atol=2e-5 * np.abs(expected).max())


@FAMILIES
def test_a_token_changes_no_logit_before_it_and_all_from_it_on(family: dict[str, Any]) -> None:
    model, tokens = build(**family), tokens_of(1, (1, 16))
    changed = np.where(np.eye(16, dtype=bool), (tokens + 1) % TINY["vocab_size"], tokens)  # row i in its token i
    logits = np.asarray(forward(model, np.concatenate([tokens, changed])))
    differs = np.any(logits[1:] != logits[:1], axis=-1)
    np.testing.assert_array_equal(differs, np.triu(np.ones((16, 16), bool)))


def test_rope_sees_the_distance_of_two_positions_only() -> None:
    config = GPTConfig(**TINY | LLAMA, head_dim=16)
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 1, 16))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, _rotation(config, jnp.array([position])))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(1004, 1000), abs=1e-3)
    assert score(7, 3) == pytest.approx(score(4, 0), abs=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2
    np.testing.assert_allclose(
        jnp.linalg.norm(rotate(key, _rotation(config, jnp.array([5])))), jnp.linalg.norm(key), 1e-6
    )


def test_llama_3_scaling_lengthens_the_long_waves_and_leaves_the_short() -> None:
    """Against the loop in Meta's `apply_scaling`."""
    config = GPTConfig.llama3_1b()
    cosines, sines = _rotation(config, jnp.array([1]))
    scaled = np.arctan2(sines, cosines)[0]
    for actual, frequency in zip(scaled, 500_000.0 ** -(np.arange(32) / 32), strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192:
            expected = frequency / 32
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 32 + smooth * frequency
        assert actual == pytest.approx(expected, rel=1e-4)


def test_grouped_queries_equal_all_heads_with_their_keys_and_values_repeated() -> None:
    grouped, full = build(**LLAMA), build(**LLAMA | {"num_kv_heads": None})
    arrays = flat(nnx.state(grouped, nnx.Param))
    for path, param in ((("/".join(path)), p) for path, p in nnx.to_flat_state(nnx.state(full, nnx.Param))):
        array = arrays[path]
        if path.endswith("qkv/kernel"):  # [embed, groups, queries + key + value, head_dim]
            queries = array[:, :, :-2].reshape(32, 8, 1, 4)
            array = jnp.concatenate([queries, jnp.repeat(array[:, :, -2:], 2, axis=1)], axis=2)
        param[...] = array.reshape(param.shape)
    tokens = tokens_of(2, (2, 16))
    np.testing.assert_allclose(forward(grouped, tokens), forward(full, tokens), atol=1e-4)


# One function under every option


def test_remat_equals_no_remat() -> None:
    tokens = tokens_of(3, (2, 8))
    plain = loss_and_grads(build(num_layers=1, dropout=0.2), tokens)
    rematerialised = loss_and_grads(build(num_layers=1, dropout=0.2, remat="nothing_saveable"), tokens)
    np.testing.assert_allclose(plain[0], rematerialised[0], rtol=1e-6)
    assert_close(rematerialised[1], plain[1])


def test_scan_equals_unrolled() -> None:
    fields = LLAMA | {"dropout": 0.2, "remat": "dots_with_no_batch_dims_saveable"}
    tokens, scanned, unrolled = tokens_of(4, (2, 8)), build(**fields, scan_layers=True), build(**fields)
    arrays = unstacked(flat(nnx.state(scanned)), TINY["num_layers"])
    for path, variable in nnx.to_flat_state(nnx.state(unrolled)):
        variable[...] = arrays["/".join(path)]
    loss, grads = loss_and_grads(scanned, tokens)
    expected_loss, expected_grads = loss_and_grads(unrolled, tokens)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(unstacked(grads, TINY["num_layers"]), expected_grads)


@FAMILIES
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_params_and_logits(family: dict[str, Any]) -> None:
    tokens = tokens_of(5, (2, 8))
    model, exact = build(**family, dtype="bfloat16"), build(**family)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    hidden = jnp.ones((2, 8, 32), jnp.bfloat16)
    rotation = None if not family else _rotation(model.config, jnp.arange(8))
    block = nnx.eval_shape(lambda: model.blocks["0"](hidden, rotation)[0])
    assert block.dtype == jnp.bfloat16
    logits, expected = forward(model, tokens), forward(exact, tokens)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - np.asarray(expected)).mean() < 0.05 * np.asarray(expected).std()


@FAMILIES
def test_float64_is_float64_throughout(family: dict[str, Any]) -> None:
    """jax.nn.dot_product_attention is not: its softmax is float32. Rounding would show at 1e-7."""
    with jax.enable_x64(True):
        model = build(**family, dtype="float64")
        params = {path: np.asarray(array) for path, array in flat(nnx.state(model, nnx.Param)).items()}
        tokens = tokens_of(0, (1, 16))
        logits = forward(model, tokens)
        expected = reference_logits(model.config, params, np.asarray(tokens[0]))
        assert logits.dtype == jnp.float64
        np.testing.assert_allclose(logits[0], expected, atol=1e-12 * np.abs(expected).max())


def test_float64_without_x64_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"GPTConfig\.dtype: \"float64\" expects jax_enable_x64"):
        GPTConfig(**TINY, dtype="float64").build(nnx.Rngs(0))


def test_attention_takes_the_same_keys_with_a_mask_as_without() -> None:
    query, key, value = normal(0, (2, 6, 2, 3, 8)), normal(1, (2, 6, 2, 8)), normal(2, (2, 6, 2, 8))
    both = jax.jit(lambda *arrays: [attend(*arrays, mask) for mask in (None, np.tri(6, dtype=bool))])
    np.testing.assert_allclose(*both(query, key, value), atol=1e-6)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_dropout_draws_while_training_only_and_from_its_stream_alone(scan_layers: bool) -> None:
    model, tokens = build(dropout=0.3, scan_layers=scan_layers), tokens_of(6, (2, 8))
    streams = jax.tree.map(jnp.copy, nnx.state(model, nnx.RngState))
    first, second = forward(model, tokens), forward(model, tokens)
    assert not np.array_equal(first, second)
    nnx.update(model, streams)
    np.testing.assert_array_equal(forward(model, tokens), first)
    model.eval()
    np.testing.assert_array_equal(forward(model, tokens), forward(model, tokens))


def test_has_random_state_only_with_dropout() -> None:
    assert not jax.tree.leaves(nnx.state(build(), nnx.RngState))


# Decoding


@pytest.mark.parametrize("fields", [{}, LLAMA, LLAMA | {"scan_layers": True}], ids=["gpt2", "llama", "scan"])
def test_cached_logits_equal_the_whole_forward_pass_at_each_position(fields: dict[str, Any]) -> None:
    model, tokens = build(**fields), tokens_of(7, (2, 12))
    expected = forward(model, tokens)
    scale = np.abs(expected).max()
    graphdef, state = nnx.split(model)
    decode = jax.jit(lambda *arguments: nnx.merge(graphdef, state).decode(*arguments), compiler_options=QUICK)
    logits, caches = decode(tokens[:, :5], model.init_caches(2, 14), 0)
    np.testing.assert_allclose(logits, expected[:, :5], atol=1e-5 * scale)
    for position in range(5, 12):
        logits, caches = decode(tokens[:, position : position + 1], caches, jnp.int32(position))
        np.testing.assert_allclose(logits[:, 0], expected[:, position], atol=1e-5 * scale)


@pytest.mark.parametrize(
    "fields", [{"dropout": 0.5, "num_layers": 1}, LLAMA | {"scan_layers": True}], ids=["gpt2", "llama"]
)
def test_greedy_generation_is_the_argmax_of_repeated_forward_passes(fields: dict[str, Any]) -> None:
    model, prompt = build(**fields), tokens_of(8, (3, 4))
    generated = model.generate(prompt, 8, jax.random.key(0), temperature=0.0)
    model.eval()
    tokens = np.concatenate([prompt, np.zeros((3, 8), prompt.dtype)], axis=1)
    for position in range(4, 12):
        tokens[:, position] = np.asarray(forward(model, tokens))[:, position - 1].argmax(axis=-1)
    np.testing.assert_array_equal(generated, tokens[:, 4:])


def test_generation_draws_from_the_softmax_at_the_temperature() -> None:
    model, prompt = build(num_layers=1), np.tile(tokens_of(9, (1, 4)), (4000, 1))
    drawn = model.generate(prompt, 1, jax.random.key(3), temperature=2.0)[:, 0]
    expected = np.exp(np.asarray(forward(model, prompt[:1]))[0, -1] / 2)
    expected /= expected.sum()
    shares = np.bincount(drawn, minlength=TINY["vocab_size"]) / len(drawn)
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / math.sqrt(4000))
    np.testing.assert_array_equal(drawn, model.generate(prompt, 1, jax.random.key(3), temperature=2.0)[:, 0])


def test_generation_leaves_the_model_as_it_was() -> None:
    model = build(num_layers=1, dropout=0.5)
    streams = jax.tree.map(jnp.copy, nnx.state(model, nnx.RngState))
    model.generate(tokens_of(0, (1, 2)), 2, jax.random.key(0))
    assert not model.dropout.deterministic
    for before, after in zip(*(jax.tree.leaves(s) for s in (streams, nnx.state(model, nnx.RngState))), strict=True):
        assert jnp.array_equal(before, after)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "expected"),
    [(4, 13, r"to fit the context of 16; found 4 \+ 13"), (0, 1, "found 0 and 1"), (4, 0, "found 4 and 0")],
)
def test_generation_that_cannot_be_is_an_error(prompt: int, num_tokens: int, expected: str) -> None:
    model = nnx.eval_shape(lambda: GPTConfig(**TINY).build(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=expected):
        model.generate(jnp.zeros((1, prompt), jnp.int32), num_tokens, jax.random.key(0))


# The loss


def test_token_losses_are_optaxs_and_survive_large_logits() -> None:
    logits, targets = 1e4 * normal(0, (2, 5, 40)), tokens_of(1, (2, 5))
    expected = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, targets)
    cross_entropy, log_normalizer = jax.jit(token_losses)(logits, targets)
    np.testing.assert_allclose(cross_entropy, expected, rtol=1e-6)
    np.testing.assert_allclose(log_normalizer, np.logaddexp.reduce(logits, axis=-1), rtol=1e-6)


def test_gradients_of_token_losses_are_the_softmax_and_its_distance_to_the_target() -> None:
    logits, targets = normal(0, (3, 40)), np.array([0, 39, 7])
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))

    @jax.jit
    def gradient_of(part: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(part @ jnp.stack(token_losses(x, targets))))(jnp.asarray(logits))

    np.testing.assert_allclose(gradient_of(np.array([1.0, 0.0])), probabilities - np.eye(40)[targets], atol=1e-6)
    np.testing.assert_allclose(gradient_of(np.array([0.0, 1.0])), probabilities, atol=1e-6)


# Layouts


def on_mesh(config: GPTConfig, shape: dict[str, int]) -> tuple[Any, Any, Any, jax.sharding.Mesh]:
    """Jitted loss and gradients over the mesh, its params' shapes and shardings."""
    axes = ("replica", "data", "model", "seq")
    mesh = jax.make_mesh(tuple(shape.get(axis, 1) for axis in axes), axes, axis_types=(AxisType.Auto,) * 4)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)
    assert not jax.tree.leaves(rest)

    def sharding(path: tuple[str, ...]) -> NamedSharding:
        rules = config.sharding_rules()
        return NamedSharding(mesh, next(spec for pattern, spec in rules if re.fullmatch(pattern, "/".join(path))))

    arrays = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    shardings = {path: sharding(path) for path in arrays}
    rows = NamedSharding(mesh, PartitionSpec(("replica", "data")))

    def loss(arrays: dict[Any, jax.Array], tokens: jax.Array, targets: jax.Array) -> jax.Array:
        variables = [(path, variable.replace(arrays[path])) for path, variable in nnx.to_flat_state(params)]
        cross_entropy, log_normalizer = token_losses(
            nnx.merge(graphdef, nnx.from_flat_state(variables))(tokens), targets
        )
        return jnp.sum(cross_entropy + 1e-2 * log_normalizer**2)

    step = jax.jit(jax.value_and_grad(loss), in_shardings=(shardings, rows, rows), out_shardings=(None, shardings))
    return step, arrays, shardings, mesh


def all_reduces(config: GPTConfig, shape: dict[str, int], tokens: tuple[int, int]) -> list[tuple[int, ...]]:
    """Shape of each array that the compiled step sums over devices. Nothing else may be exchanged."""
    step, arrays, _, mesh = on_mesh(config, shape)
    ids = jax.ShapeDtypeStruct(tokens, jnp.int32)
    with jax.set_mesh(mesh):
        text = step.lower(arrays, ids, ids).compile().as_text()
    assert not re.search(r" (all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(", text)
    results = re.findall(r" = (.*?) all-reduce(?:-start)?\(", text)
    dims = [dims for result in results for dims in re.findall(r"f32\[([\d,]*)\]", result)]
    return [tuple(map(int, filter(None, text.split(",")))) for text in dims]


def test_data_parallel_sums_the_gradients_and_nothing_else() -> None:
    config = GPTConfig(**TINY)
    _, arrays, _, _ = on_mesh(config, {})
    summed = sorted(math.prod(shape) for shape in all_reduces(config, {"data": 4, "replica": 2}, (8, 16)) if shape)
    assert summed == sorted(math.prod(array.shape) for array in arrays.values())


@pytest.mark.parametrize(("family", "scan_layers"), [({}, False), (LLAMA, True)], ids=["gpt2", "llama-scan"])
def test_tensor_parallel_sums_activations_four_times_a_layer(family: dict[str, Any], scan_layers: bool) -> None:
    """Megatron-LM, section 3: twice forward, twice backward; once more for the embedding and once for the head."""
    config = GPTConfig(**TINY | family, scan_layers=scan_layers)
    summed = [math.prod(shape) for shape in all_reduces(config, {"data": 2, "model": 4}, (4, 13))]
    layers_in_text = 1 if scan_layers else config.num_layers
    assert summed.count(2 * 13 * 32) == 4 * layers_in_text + 2
    assert summed.count(2 * 13) == 3  # the loss: maximum, sum and the target's logit


@pytest.mark.parametrize(
    ("family", "shape"),
    [({}, {"data": 8}), (LLAMA, {"model": 4, "data": 2}), ({}, {"replica": 2, "model": 2, "seq": 2})],
    ids=["data", "model", "all"],
)
def test_every_layout_gives_the_same_loss_and_gradients(family: dict[str, Any], shape: dict[str, int]) -> None:
    fields, ids = family | {"num_layers": 1}, (tokens_of(0, (8, 16)), tokens_of(1, (8, 16)))
    config = GPTConfig(**TINY | fields)
    step, _, shardings, mesh = on_mesh(config, shape)
    arrays = {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(build(**fields), nnx.Param))}
    loss, grads = jax.jit(step.__wrapped__, compiler_options=QUICK)(arrays, *ids)
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, shardings)
        rows = NamedSharding(mesh, PartitionSpec(("replica", "data")))
        split_loss, split_grads = step(placed, *jax.device_put(ids, rows))
    np.testing.assert_allclose(split_loss, loss, rtol=1e-6)
    assert_close(split_grads, jax.tree.map(np.asarray, grads))


def test_a_batch_or_a_sequence_that_the_mesh_does_not_divide_is_an_error() -> None:
    step, arrays, _, mesh = on_mesh(GPTConfig(**TINY), {"data": 2, "seq": 4})
    with jax.set_mesh(mesh):
        ids = jax.ShapeDtypeStruct((4, 10), jnp.int32)
        with pytest.raises(ValueError, match=r"a sequence that divides over 4 devices .* found 10\. .* are 8 and 12"):
            step.lower(arrays, ids, ids)


def test_generates_under_a_mesh_that_divides_neither_prompt_nor_step() -> None:
    model, prompt = build(**LLAMA | {"num_layers": 1}), tokens_of(3, (1, 3))
    expected = model.generate(prompt, 5, jax.random.key(0), temperature=0.0)
    _, _, shardings, mesh = on_mesh(model.config, {"data": 2, "model": 2, "seq": 2})
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        param[...] = jax.device_put(param[...], shardings[path])
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(model.generate(prompt, 5, jax.random.key(0), temperature=0.0), expected)


# Wrong configs


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_layers": 0}, r"num_layers: expected an integer of at least 1; found 0"),
        ({"vocab_size": 1.5}, r"vocab_size: expected an integer of at least 1; found 1\.5"),
        ({"hidden_dim": -1}, r"hidden_dim: expected an integer of at least 1; found -1"),
        ({"positions": "rotary"}, r"positions: expected one of 'learned', 'rope'; found 'rotary'"),
        ({"norm": "rms_norm"}, r"norm: expected one of .* found 'rms_norm'\. Did you mean 'rmsnorm'\?"),
        ({"activation": "relu"}, r"activation: expected one of 'gelu', 'swiglu'; found 'relu'"),
        ({"attention": "flash"}, r"attention: expected one of None, 'xla', 'cudnn'; found 'flash'"),
        ({"dtype": "float16"}, r"dtype: expected one of .* found 'float16'"),
        ({"remat": "dot_saveable"}, r"remat: expected one of .* Did you mean 'dots_saveable'\?"),
        ({"dropout": 1.0}, r"dropout: expected a probability in \[0, 1\); found 1\.0"),
        ({"num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_heads = 8; found 3"),
        ({"num_heads": 7}, r"num_heads: expected a divisor of embed_dim = 32; found 7"),
        ({"attention": "cudnn"}, r'attention: "cudnn" expects dtype "bfloat16" .* found .float32. and 4'),
        ({"positions": "rope", "head_dim": 5}, r"head_dim: expected an even number for rope; found 5"),
        ({"positions": "rope", "rope_theta": 0.0}, r"rope_theta: expected a positive number; found 0\.0"),
        ({"norm_epsilon": "1e-5"}, r"norm_epsilon: expected a positive number; found '1e-5'"),
    ],
)
def test_wrong_configs_say_what_was_expected_and_found(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=r"GPTConfig\." + expected):
        GPTConfig(**TINY | fields)


def test_more_tokens_than_the_context_are_an_error_with_both() -> None:
    model = nnx.eval_shape(lambda: GPTConfig(**TINY).build(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"at most 16 tokens; found \(2, 17\)"):
        model(jnp.zeros((2, 17), jnp.int32))


def test_a_model_does_not_change_with_the_config_it_was_built_from() -> None:
    config = GPTConfig(**TINY)
    model = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    config.context = 4
    logits = nnx.eval_shape(lambda model: model(jnp.zeros((1, 16), jnp.int32)), model)
    assert logits.shape == (1, 16, 40)
