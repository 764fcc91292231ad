"""One round of decoding, compiled for a slice that is not attached: drafting a block, verifying it, keeping what it taught.

The program is `decoding.rounds.decode_rounds`, under a mesh of its own: weights, heads and caches are shared out over
`tensor`, requests over `data`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.decoding.proposers import BlockDiffusion
from dstill_jax.decoding.rounds import decode_rounds
from dstill_jax.decoding.sampling import Draw, SamplingConfig
from dstill_jax.decoding.state import STOP_SLOTS, DecodeSpec, DecodeState, Weights, init_state
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.errors import UserError
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.planning.chips import Slice, parse_slice, slice_devices
from dstill_jax.planning.compile import AbstractRun, compile_step, device_bytes, require_target, settle
from dstill_jax.planning.report import NOTE, bounds, memory_values, slice_values
from dstill_jax.runs import RunConfig
from dstill_jax.sharding.activations import use_mesh
from dstill_jax.sharding.mesh import MeshConfig, build_mesh, check_model_divides
from dstill_jax.sharding.rules import to_spec, tree_shardings


def plan_decoding(
    config: RunConfig,
    slice_name: str,
    rows: int,
    capacity: int,
    *,
    shape: DrafterShape | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Compiles a greedy round of `rows` requests of up to `capacity` tokens, drafted in one pass; see `decode_text`.

    `shape` and `quick` as in `planning.plan`.

    Raises UserError as `planning.plan`, and when the rows do not divide over the slice.
    """
    place = parse_slice(slice_name)
    devices = slice_devices(place)
    target = require_target(config.target)
    drafter = settle(config, target, shape)[1]
    mesh = decoding_mesh(target, drafter, place)
    run = abstract_round(target, drafter, mesh, rows, capacity, devices, jnp.dtype(config.compute_dtype))
    compiled = compile_step(run, place.num_slices, quick=quick)
    values: dict[str, Any] = {
        "note": NOTE,
        "slice": slice_values(place),
        "run": {
            "round_of": config.target,
            "mesh": mesh.describe(),
            "rows": rows,
            "capacity": capacity,
            "block_size": drafter.block_size,
        },
        "fits": compiled.fits,
        "reason": compiled.reason,
        "compile_seconds": round(compiled.seconds, 1),
        "quick": compiled.quick,
        "argument_bytes_by_kind": {
            "target params": device_bytes(run.frozen.target),
            "drafter params": device_bytes(run.frozen.drafter),
            "target cache": device_bytes(run.state.cache),
            "drafter context": device_bytes(run.state.context),
        },
    }
    if compiled.fits:
        # The loop over rounds runs until the texts end: it has no trip count, so the counts are those of one round.
        loops = sorted(note for note in compiled.counts.notes if note.startswith("loop "))
        counts = dataclasses.replace(compiled.counts, notes=compiled.counts.notes - set(loops[:1]))
        values |= memory_values(compiled)
        values |= bounds(counts, place)
        rounds = rows / max(values["seconds_at_least"].values())
        values["rounds_per_second_at_most"] = rounds  # of all rows together
        values["tokens_per_second_at_most"] = {"1": rounds, str(drafter.block_size): rounds * drafter.block_size}
    return values


def decoding_mesh(target: TargetConfig, drafter: DrafterConfig, place: Slice) -> MeshConfig:
    """As many shares of the weights as both models have key/value heads; the rest of the slice takes other requests."""
    inner = place.num_devices // place.num_slices
    tensor = math.gcd(inner, target.num_kv_heads, drafter.num_kv_heads)
    return MeshConfig(data=inner // tensor, tensor=tensor, dcn_data=place.num_slices)


def abstract_round(
    target: TargetConfig,
    drafter: DrafterConfig,
    mesh_config: MeshConfig,
    rows: int,
    capacity: int,
    devices: list[Any],
    dtype: jnp.dtype,
) -> AbstractRun:
    """The round and the shapes it takes: a decoding state, `Weights`, and for how many rounds.

    Raises UserError when rows or heads do not divide over the mesh.
    """
    if rows < 1 or rows % mesh_config.row_shares:
        raise UserError(
            f"{rows} rows of decoding do not divide over {mesh_config.row_shares} shares of the mesh"
            f" ({mesh_config.describe()}); use a multiple of {mesh_config.row_shares}"
        )
    mesh = build_mesh(mesh_config, devices)
    for model in (target, drafter):
        check_model_divides(mesh_config, model)
    spec = DecodeSpec.make(target, drafter, BlockDiffusion(drafter.block_size - 1), SamplingConfig())
    weights = _weights(target, drafter, mesh, dtype)
    state = _placed_state(
        jax.eval_shape(functools.partial(init_state, spec, batch=rows, capacity=capacity), weights), mesh
    )
    rounds = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))

    def step(state: DecodeState, weights: Weights, rounds: jax.Array) -> DecodeState:
        with use_mesh(mesh):  # past the jitted form, which would remember another mesh's program
            return decode_rounds.__wrapped__(spec, weights, state, rounds)

    places = jax.tree.map(lambda x: x.sharding, state)
    return AbstractRun(jax.jit(step, donate_argnums=0, out_shardings=places), state, weights, rounds)


def _weights(target: TargetConfig, drafter: DrafterConfig, mesh: Mesh, dtype: jnp.dtype) -> Weights:
    key = jax.random.key(0)
    models = (
        jax.eval_shape(functools.partial(target_lib.init_params, target, scan_layers=True), key),
        jax.eval_shape(functools.partial(drafter_lib.init_params, drafter), key),
    )
    placed = [
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), m, tree_shardings(m, mesh))
        for m in models
    ]
    whole = NamedSharding(mesh, PartitionSpec())
    draw, stops = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        jax.eval_shape(lambda: (Draw.of(SamplingConfig()), jnp.zeros(STOP_SLOTS, jnp.int32))),
    )
    return Weights(placed[0], placed[1], None, draw, stops)


def _placed_state(state: DecodeState, mesh: Mesh) -> DecodeState:
    """Caches by the rule table; everything else is a number or a line of tokens for each request."""
    rows = NamedSharding(mesh, to_spec(("batch",)))
    caches = {"cache": state.cache, "context": state.context}
    places = dict.fromkeys(state._fields, rows) | tree_shardings(caches, mesh)

    def place(name: str) -> Any:
        field = getattr(state, name)
        found = places[name] if name in caches else jax.tree.map(lambda _: rows, field)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), field, found)

    return DecodeState(**{name: place(name) for name in state._fields})
