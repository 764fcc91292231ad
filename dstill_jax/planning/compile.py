"""A run's real train step, compiled for a slice that is not attached. Nothing is allocated: shapes stand for arrays."""

import dataclasses
import functools
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.distill.conditioning import Frozen
from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.errors import UserError
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter
from dstill_jax.paths import in_home
from dstill_jax.planning.count import Counts, Program
from dstill_jax.runs import RunConfig, loss_function
from dstill_jax.sharding.mesh import build_mesh, check_model_divides
from dstill_jax.sharding.rules import tree_shardings
from dstill_jax.training import build_optimizer, init_state, make_train_step

_QUICK = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True)
class Compiled:
    """One train step on one device of a slice; bytes unless named otherwise."""

    fits: bool
    reason: str  # of not fitting, in the compiler's words
    argument: float = 0.0
    output: float = 0.0
    aliased: float = 0.0  # outputs written over donated arguments
    temporary: float = 0.0
    program: float = 0.0
    counts: Counts = dataclasses.field(default_factory=Counts)
    seconds: float = 0.0  # of compilation
    quick: bool = False  # at the lowest effort
    text: str = dataclasses.field(default="", repr=False)

    @property
    def peak(self) -> float:
        return self.argument + self.output - self.aliased + self.temporary + self.program


@dataclass(frozen=True)
class AbstractRun:
    """The arguments of a compiled function as shapes with places, and the function: a train step, or `decode.py`'s."""

    step: Any
    state: Any  # donated
    frozen: Any  # `Frozen`, of a train step
    batch: Any

    def argument_bytes(self) -> dict[str, float]:
        """Of one device, by kind."""
        state = self.state
        return {
            "drafter params": device_bytes(state["params"]),
            "optimiser": device_bytes(state["opt_state"]) + device_bytes(state["ema"]),
            "target params": device_bytes(self.frozen.target),
            "embedding, head": device_bytes((self.frozen.embedding, self.frozen.head)),
            "teacher params": device_bytes(self.frozen.teacher),
            "batch": device_bytes(self.batch),
        }

    def host_bytes(self) -> dict[str, float]:
        """Of one device's part of a host, above what a process needs: the state that an asynchronous save copies, and
        the largest piece that loading holds before it is on the device."""
        return {
            "checkpoint copy": device_bytes(self.state),
            "largest share": max(device_bytes(x) for x in jax.tree.leaves((self.state["params"], self.frozen))),
        }


def device_bytes(tree: Any) -> float:
    """Bytes that a tree of placed shapes takes on one device."""
    return float(
        sum(jnp.dtype(x.dtype).itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
    )


def settle(
    config: RunConfig, target: TargetConfig, shape: DrafterShape | None = None
) -> tuple[RunConfig, DrafterConfig]:
    """The run with the vocabulary that training takes from the drafters given to it, and its drafter.

    That is `new`, or the one the run goes on from, or `shape` where no folder here has that one yet. A teacher that is
    in no folder here is not asked for its vocabulary.

    Raises UserError when none of them tells, or a drafter was made for another target.
    """
    begun = None if config.start_from is None else _given(config.start_from, target, required=shape is None)
    teacher = None if config.teacher is None else _given(config.teacher, target, required=False)
    for given in (begun, teacher):
        if given is not None and given.vocabulary is not None:
            config = dataclasses.replace(config, vocabulary=len(given.vocabulary))
    if begun is not None:
        return config, begun.config
    new = config.new or shape
    assert new is not None  # a drafter to go on from is required where there is no shape
    return config, new.build(target)


def _given(path: str, target: TargetConfig, *, required: bool) -> Drafter | None:
    """A drafter without its weights; None where no folder here has it and it is not required."""
    from dstill_jax.weights.load import describe_drafter

    folder = Path(in_home(path))
    here = any((folder / part / "config.json").exists() for part in ("", "drafter"))
    if not here and not required:
        return None
    try:
        return describe_drafter(path, target)
    except UserError as error:
        if here:
            raise
        raise UserError(
            f"{error}; to plan before this drafter is there, let the config file export SHAPE, a DrafterShape"
        ) from None


def abstract_run(config: RunConfig, target: TargetConfig, drafter: DrafterConfig, devices: list[Any]) -> AbstractRun:
    """The train step of a run, as `settle` gives it, on these devices, and the shapes it takes.

    Raises UserError when mesh, model and batch do not divide.
    """
    mesh = build_mesh(config.mesh, devices)
    for model in (target, drafter):
        check_model_divides(config.mesh, model)
    key = jax.random.key(0)
    target_params = jax.eval_shape(functools.partial(target_lib.init_params, target, scan_layers=True), key)
    target_params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.compute_dtype)), target_params
    )
    student = jax.eval_shape(functools.partial(drafter_lib.init_params, drafter), key)
    optimizer = build_optimizer(config.optimizer, config.train.total_steps)
    create = functools.partial(init_state, optimizer=optimizer, seed=0)
    state = _placed(jax.eval_shape(create, student), mesh)
    columns = config.vocabulary or target.vocab_size
    compute = jnp.dtype(config.compute_dtype)
    frozen = Frozen(
        embedding=target_params["embed"]["embedding"],
        head=jax.ShapeDtypeStruct((target.hidden_size, columns), compute),
        vocabulary=None if config.vocabulary is None else jax.ShapeDtypeStruct((columns,), jnp.int32),
        tap_scale=jax.ShapeDtypeStruct((drafter.num_taps * drafter.hidden_size,), jnp.float32),
        target=target_params,
        teacher=student if isinstance(config.objective, StageTwoConfig) else None,
    )
    shape = (config.batches.batch_size, config.batches.seq_len)
    kinds = {"tokens": jnp.int32, "loss_mask": jnp.bool_, "document_ids": jnp.int32, "positions": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}
    step = make_train_step(
        loss_function(config, target, drafter, mesh),
        optimizer,
        config.train,
        state_shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    split = config.mesh.split_rows
    return AbstractRun(step, state, _placed(frozen, mesh), _placed(batch, mesh, split_rows=split))


def _placed(tree: Any, mesh: Mesh, *, split_rows: bool = False) -> Any:
    places = tree_shardings(tree, mesh, split_rows=split_rows)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, places)


def compile_step(run: AbstractRun, num_slices: int = 1, *, quick: bool = False) -> Compiled:
    """Compiles; a step that does not fit comes back as such, any other failure of the compiler is raised.

    `quick` asks for the compiler's lowest effort on run time: another, slower program with nearly the same memory and
    collectives (docs/planning.md), in a quarter of the time.
    """
    began = time.perf_counter()
    lowered = run.step.lower(run.state, run.frozen, run.batch)
    try:
        compiled = lowered.compile(compiler_options=_QUICK if quick else None)
    except jax.errors.JaxRuntimeError as error:
        reason = _out_of_memory(str(error))
        if reason is None:
            raise
        return Compiled(False, reason, seconds=time.perf_counter() - began, quick=quick)
    seconds = time.perf_counter() - began
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    return Compiled(
        fits=True,
        reason="",
        argument=sizes.argument_size_in_bytes,
        output=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        temporary=sizes.temp_size_in_bytes,
        program=sizes.generated_code_size_in_bytes,
        counts=Program(text, num_slices).count(),
        seconds=seconds,
        quick=quick,
        text=text,
    )


def _out_of_memory(message: str) -> str | None:
    if "RESOURCE_EXHAUSTED" not in message and "out of memory" not in message.lower():
        return None
    found = re.search(r"Used [\d.]+\w of [\d.]+\w \w+|[^,:]*\([\d.]+\w\) exceeds available \w+ \([\d.]+\w\)", message)
    return found.group(0).strip() if found else message.splitlines()[0][:200]


def require_target(name: str) -> TargetConfig:
    """The target's configuration alone: of a shape known without a network by its name, of a folder, or of a hub id.

    A folder needs no weights, and of a hub id none are downloaded. Raises UserError listing the known names when it is
    none of them.
    """
    from dstill_jax.planning.targets import KNOWN

    if name in KNOWN:
        return KNOWN[name]
    from dstill_jax.weights.load import describe_target_config

    try:
        return describe_target_config(name)
    except UserError as error:
        raise UserError(f"{error}; planning knows without a network: {', '.join(KNOWN)}") from None
