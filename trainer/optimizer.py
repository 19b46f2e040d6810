"""OptimizerConfig → the Optax chain, and the learning rate of every step.

The chain is: clip the mean gradient by its global norm → decay weights (where the optimizer itself has no decay) →
the Optax optimizer → per-parameter factors. The learning rate is an argument of the step, so that another rate or
schedule is no other program.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.duration import Calendar, is_duration
from trainer.errors import UserError, unknown_name
from trainer.sharding import matching_paths

_DECAY_ARGUMENTS = ("weight_decay", "weight_decay_rate")
_MASK_ARGUMENTS = ("mask", "weight_decay_mask")


@dataclasses.dataclass
class ScheduleConfig:
    """An Optax schedule by name; its values multiply `optimizer.learning_rate`.

    Attributes:
      name: a function of `optax.schedules`.
      arguments: its own arguments. Where it takes a number of steps, a duration does too: '5 epochs', '100%'.
    """

    name: str = "constant_schedule"
    arguments: dict[str, Any] = dataclasses.field(default_factory=lambda: {"value": 1.0})


@dataclasses.dataclass
class OptimizerConfig:
    """An Optax optimizer by name, and what surrounds it.

    Attributes:
      name: a function of `optax` that takes a `learning_rate`.
      learning_rate: the base rate, multiplied by the schedule's value.
      per_examples: the batch size for which `learning_rate` is stated; the rate used is
        `learning_rate * batch_size / per_examples` (linear scaling, Goyal et al. 2017, https://arxiv.org/abs/1706.02677).
        None: used as it is.
      schedule: the schedule.
      arguments: the optimizer's other arguments, as Optax names them.
      weight_decay: decoupled where the Optax optimizer has it (AdamW, LAMB, Lion …), otherwise added to the gradient
        (L2, as SGD recipes mean it).
      decay_params: patterns of the parameter paths that are decayed.
      clip_norm: largest global norm of the mean gradient; None: no clipping.
      frozen: patterns of parameter paths that are not trained; they have no gradient and no moments.
      learning_rate_factors: pattern → factor on the update of the matching parameters.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    per_examples: int | None = None
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.0
    decay_params: tuple[str, ...] = (r"(.*/)?kernel",)
    clip_norm: float | None = None
    frozen: tuple[str, ...] = ()
    learning_rate_factors: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise UserError(f"optimizer.{field}: expected a number ≥ 0, found {getattr(self, field)}")
        for pattern, factor in self.learning_rate_factors.items():
            if not 0 <= factor < float("inf"):
                raise UserError(f"optimizer.learning_rate_factors[{pattern!r}]: expected a number ≥ 0, found {factor}")
        if self.per_examples is not None and self.per_examples < 1:
            raise UserError(f"optimizer.per_examples: expected a batch size ≥ 1 or None, found {self.per_examples}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"optimizer.clip_norm: expected a norm > 0 or None, found {self.clip_norm}")


class Optimizer:
    """The chain for one model's parameters.

    Attributes:
      trainable: paths of the parameters that are trained.
    """

    def __init__(self, config: OptimizerConfig, params: Mapping[str, jax.ShapeDtypeStruct]):
        """Checks the config against Optax's signature and the parameters' paths.

        Raises:
          UserError: for an unknown optimizer or argument, a pattern that matches nothing, or what Optax refuses.
        """
        self._config = config
        frozen = matching_paths(config.frozen, params, "optimizer.frozen")
        stopped = {path for paths in frozen.values() for path in paths}
        self.trainable = [path for path in params if path not in stopped]
        if not self.trainable:
            raise UserError(f"optimizer.frozen: {list(config.frozen)} freezes every parameter; nothing would train")
        decayed = matching_paths(config.decay_params, params, "optimizer.decay_params") if config.weight_decay else {}
        self._decayed = {path for paths in decayed.values() for path in paths}
        factors = matching_paths(config.learning_rate_factors, params, "optimizer.learning_rate_factors")
        self._factors = {
            path: config.learning_rate_factors[pattern]
            for pattern, paths in reversed(factors.items())
            for path in paths
        }
        self._make = _find_optimizer(config)
        _try_update(self, params)

    def init(self, params: Mapping[str, jax.Array]) -> optax.OptState:
        """The optimizer's state for the trainable ones of `params`."""
        return self._chain(0.0).init({path: params[path] for path in self.trainable})

    def update(
        self,
        grads: dict[str, jax.Array],
        opt_state: optax.OptState,
        params: dict[str, jax.Array],
        learning_rate: Any,
    ) -> tuple[dict[str, jax.Array], optax.OptState]:
        """One update at `learning_rate`: `(new params, new opt_state)`; frozen params come back as they were.

        Args:
          grads: path → gradient of each trainable parameter.
          opt_state: from `init` or the last update.
          params: path → array, all of them.
          learning_rate: float32[], may be traced.
        """
        trained = {path: params[path] for path in self.trainable}
        updates, opt_state = self._chain(learning_rate).update(grads, opt_state, trained)
        return {**params, **optax.apply_updates(trained, updates)}, opt_state

    def _chain(self, learning_rate: Any) -> optax.GradientTransformation:
        config = self._config
        mask = {path: path in self._decayed for path in self.trainable}
        accepted = inspect.signature(self._make).parameters
        decay = next((name for name in _DECAY_ARGUMENTS if name in accepted), None)
        masked = next((name for name in _MASK_ARGUMENTS if name in accepted), None)
        arguments = dict(config.arguments)
        steps = []
        if config.clip_norm is not None:
            steps.append(optax.clip_by_global_norm(config.clip_norm))
        if decay is not None and masked is not None:  # NovoGrad's own decay takes no mask.
            arguments.update({decay: config.weight_decay, masked: mask})
        elif config.weight_decay:
            steps.append(optax.add_decayed_weights(config.weight_decay, mask))
        steps.append(self._make(learning_rate=learning_rate, **arguments))
        if self._factors:
            steps.append(optax.stateless(lambda updates, _: self._scale(updates)))
        return optax.chain(*steps)

    def _scale(self, updates: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: update * self._factors.get(path, 1.0) for path, update in updates.items()}


def _find_optimizer(config: OptimizerConfig) -> Callable[..., optax.GradientTransformation]:
    known = {
        name
        for name, value in vars(optax).items()
        if inspect.isfunction(value)
        and "learning_rate" in inspect.signature(value).parameters
        and not name.startswith(("_", "scale_"))
    }
    if config.name not in known:
        raise _renamed(unknown_name("optimizer", config.name, known), "optimizer.name")
    make = getattr(optax, config.name)
    own = set(inspect.signature(make).parameters) - {"learning_rate", *_DECAY_ARGUMENTS, *_MASK_ARGUMENTS}
    _check_arguments(config.arguments, own, f"optimizer.arguments: optax.{config.name}")
    return make


def _check_arguments(arguments: Mapping[str, Any], own: set[str], where: str) -> None:
    for name in arguments:
        if name in (*_DECAY_ARGUMENTS, *_MASK_ARGUMENTS, "learning_rate") and name not in own:
            raise UserError(
                f"{where}: {name!r} is set by the optimizer's own fields weight_decay, decay_params, learning_rate"
            )
        if name not in own:
            raise _renamed(unknown_name("argument", name, own), where)


def _renamed(error: UserError, where: str) -> UserError:
    return UserError(f"{where}: {error}")


def _try_update(optimizer: Optimizer, params: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Traces one update, so that Optax's objections come at construction."""

    def update(params: dict[str, jax.Array]) -> Any:
        grads = {path: params[path] for path in optimizer.trainable}
        return optimizer.update(grads, optimizer.init(params), params, jnp.float32(1.0))

    def init(learning_rate: float) -> Any:
        return optimizer._chain(learning_rate).init({path: jnp.zeros(()) for path in optimizer.trainable})

    config = optimizer._config
    try:
        jax.eval_shape(update, dict(params))
        jaxpr = jax.make_jaxpr(init)(1.0).jaxpr
    except Exception as error:
        raise UserError(
            f"optimizer: optax.{config.name} with arguments {config.arguments} cannot update these parameters: {error}"
        ) from error
    tainted = {id(jaxpr.invars[0])}
    for equation in jaxpr.eqns:
        if any(id(var) in tainted for var in equation.invars):
            tainted |= {id(var) for var in equation.outvars}
    if any(id(var) in tainted for var in jaxpr.outvars):
        raise UserError(
            f"optimizer.name: optax.{config.name} keeps the learning_rate of the first step in its state, where no "
            "schedule reaches it; use another optimizer"
        )


def resolve_schedule(config: ScheduleConfig, calendar: Calendar) -> dict[str, Any]:
    """The schedule's arguments with every duration turned into steps.

    Raises:
      UserError: for an unknown schedule, argument or duration.
    """
    known = [
        name
        for name, value in vars(optax.schedules).items()
        if inspect.isfunction(value) and not name.startswith(("inject_", "join_"))
    ]
    if config.name not in known:
        raise _renamed(unknown_name("schedule", config.name, known), "optimizer.schedule.name")
    where = f"optimizer.schedule.arguments: optax.{config.name}"
    _check_arguments(config.arguments, set(inspect.signature(getattr(optax, config.name)).parameters), where)

    def resolve(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {resolve(key, name): resolve(item, name) for key, item in value.items()}
        return calendar.steps(value, f"{where}, {name}") if is_duration(value) else value

    return {name: resolve(value, name) for name, value in config.arguments.items()}


def learning_rates(config: OptimizerConfig, calendar: Calendar, num_steps: int) -> np.ndarray:
    """The learning rate of every update of the run: float32[num_steps].

    Raises:
      UserError: if the schedule refuses its arguments or gives a rate that is negative or not finite.
    """
    arguments = resolve_schedule(config.schedule, calendar)
    try:
        schedule = getattr(optax, config.schedule.name)(**arguments)
        values = np.asarray(jax.vmap(schedule)(jnp.arange(num_steps)), np.float64)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"optimizer.schedule: optax.{config.schedule.name} refuses {arguments} (durations in steps): {error}"
        ) from error
    scale = 1.0 if config.per_examples is None else calendar.batch_size / config.per_examples
    rates = (values * config.learning_rate * scale).astype(np.float32)
    wrong = np.flatnonzero(~(np.isfinite(rates) & (rates >= 0)))
    if wrong.size:
        raise UserError(f"optimizer.schedule: the learning rate of step {wrong[0]} is {rates[wrong[0]]}; expected ≥ 0")
    return rates
