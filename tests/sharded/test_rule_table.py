"""The rule table: every parameter of every kind of model has a place, and what has none is refused by name."""

import functools
import re
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from tiny_models import drafter_config, target_config

from dstill_jax.errors import UserError
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.sharding import (
    AXES,
    MeshConfig,
    build_mesh,
    check_model_divides,
    constrain,
    matmul,
    rows_of_table,
    spec_of,
)
from dstill_jax.sharding.mesh import check_rows_divide
from dstill_jax.sharding.rules import logical_axes
from dstill_jax.training import OptimizerConfig, build_optimizer, init_state
from dstill_jax.training.config import OPTIMIZERS

MESH = AbstractMesh((1, 2, 4, 2), AXES, axis_types=(AxisType.Auto,) * 4)


def paths(tree, prefix: str = "") -> list[tuple[str, tuple[int, ...]]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(prefix + jax.tree_util.keystr(p, simple=True, separator="/"), x.shape) for p, x in leaves]


def models() -> list[tuple[str, tuple[int, ...]]]:
    found = []
    for changes in ({}, {"tie_embeddings": True, "family": "llama", "qk_norm": False}, {"attention_bias": True}):
        config = target_config(**changes)
        for stacked in (False, True):
            init = functools.partial(target_lib.init_params, config, scan_layers=stacked)
            found += paths(jax.eval_shape(init, jax.random.key(0)))
    drafter = jax.eval_shape(
        functools.partial(drafter_lib.init_params, drafter_config(target_config())), jax.random.key(0)
    )
    found += paths(drafter)
    for kind in OPTIMIZERS:
        optimizer = build_optimizer(OptimizerConfig(learning_rate=1e-3, kind=kind), 10)
        found += paths(jax.eval_shape(functools.partial(init_state, optimizer=optimizer, seed=0), drafter))
    cache = jax.eval_shape(lambda: target_lib.init_cache(target_config(), 2, 16, jnp.float32, True))
    return found + paths(cache)


def test_every_array_of_every_model_state_and_cache_has_a_rule() -> None:
    for path, shape in models():
        assert len(logical_axes(path, len(shape))) == len(shape), path


def test_every_matrix_is_spread_over_the_devices_that_share_weights() -> None:
    for path, shape in models():
        if path.endswith(("kernel", "embedding")):
            axes = logical_axes(path, len(shape))
            assert {"embed", "vocab", "table_columns"} & set(axes), path


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layers_0/attention/q_proj/kernel", (16, 32), ("fsdp", "tensor")),
        ("layers/attention/o_proj/kernel", (3, 32, 16), (None, "tensor", "fsdp")),
        ("opt_state/1/mu/layers_0/mlp/down_proj/kernel", (24, 16), ("tensor", "fsdp")),
        ("ema/fc/kernel", (32, 16), ("fsdp", "tensor")),
        ("embed/embedding", (37, 16), (None, ("fsdp", "tensor"))),
        ("head/kernel", (16, 40), (None, ("fsdp", "tensor"))),
        ("target/layers/input_layernorm/scale", (3, 16), (None, None)),
        ("tokens", (16, 8), (("dcn_data", "data", "fsdp"), None)),
        ("keys/0", (2, 8, 2, 8, 16), (None, ("dcn_data", "data", "fsdp"), "tensor", None, None)),
        ("step", (), ()),
    ],
)
def test_places_written_out(path: str, shape: tuple[int, ...], spec: tuple) -> None:
    assert spec_of(path, shape, MESH) == PartitionSpec(*spec)


def test_rows_longer_than_a_share_are_split_over_fsdp() -> None:
    assert spec_of("tokens", (2, 8), MESH, split_rows=True) == PartitionSpec(("dcn_data", "data"), "fsdp")


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no sharding rule matches layers_0/mixer/kernel"):
        spec_of("layers_0/mixer/kernel", (4, 4), MESH)
    with pytest.raises(UserError, match=r"q_proj/kernel has 3 axes"):
        spec_of("q_proj/kernel", (2, 4, 4), MESH)


def test_an_axis_that_does_not_divide_is_refused_with_both_names() -> None:
    message = r"head/kernel: axis 1 \(vocab\) of 37 does not divide over fsdp=4 x tensor=2 = 8 shares"
    with pytest.raises(UserError, match=message):
        spec_of("head/kernel", (16, 37), MESH)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: MeshConfig(data=0), "MeshConfig.data=0 must be a whole number"),
        (lambda: MeshConfig(fsdp=2.0), "MeshConfig.fsdp=2.0 must be a whole number"),  # type: ignore[arg-type]
        (lambda: MeshConfig(split_rows=True), "split_rows=True spreads rows over fsdp, which has 1 device"),
        (lambda: build_mesh(MeshConfig(data=3)), r"the mesh \(data=3\) has 3 places, but there are 1 devices"),
        (lambda: check_model_divides(MeshConfig(tensor=8), target_config(num_heads=28, num_kv_heads=4)),
         r"num_heads=28 does not divide over mesh axis tensor=8; use one of 1, 2, 4, 7, 14, 28"),
        (lambda: check_rows_divide(MeshConfig(data=4), 6, 8, 1), "batch_size=6 does not divide into 4 shares"),
        (lambda: check_rows_divide(MeshConfig(data=2), 6, 8, 2), "accumulate_steps=2; use a multiple of 4"),
        (lambda: check_rows_divide(MeshConfig(fsdp=4, split_rows=True), 1, 6, 1), "seq_len=6 does not divide over"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_is_refused(config, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config()


@pytest.mark.parametrize(("sizes", "slices"), [({"fsdp": 4}, 2), ({"dcn_data": 2, "fsdp": 4}, 4)])
def test_slices_that_the_mesh_does_not_tell_apart_are_refused(sizes: dict, slices: int) -> None:
    config = MeshConfig(**sizes)
    devices = [types.SimpleNamespace(platform="tpu", slice_index=i % slices) for i in range(config.size)]
    message = f"mesh.dcn_data={config.dcn_data}, but the devices are in {slices} slices; set mesh.dcn_data={slices}"
    with pytest.raises(UserError, match=message):
        build_mesh(config, devices)


@dataclass(frozen=True)
class Simulated:
    id: int
    platform: str = "cpu"


@pytest.mark.parametrize("sizes", [{"data": 4}, {"dcn_data": 2, "fsdp": 2}, {"dcn_data": 4}])
def test_devices_without_a_slice_take_any_mesh(sizes: dict) -> None:
    config = MeshConfig(**sizes)
    devices = [Simulated(i) for i in range(config.size)]
    mesh = build_mesh(config, devices)
    assert mesh.devices.shape == config.shape and list(mesh.devices.flat) == devices


def test_without_a_mesh_nothing_is_added_to_a_program() -> None:
    x, w, t = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32), np.zeros((2, 2), np.int32)

    def ours(x, w, t):
        return constrain(matmul(x, w, "q_proj/kernel"), "batch"), rows_of_table(w, t)

    def plain(x, w, t):
        return x @ w, w[t]

    texts = [str(jax.make_jaxpr(f)(jnp.asarray(x), jnp.asarray(w), jnp.asarray(t))) for f in (ours, plain)]
    assert re.sub(r"\s+", " ", texts[0]) == re.sub(r"\s+", " ", texts[1])
