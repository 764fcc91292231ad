"""A small training run, for one device and for meshes of eight simulated ones.

Tests call the functions of this file through `simulated.py`, in processes of their own.
"""

import dataclasses
import functools
import math
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path as leaves_with_path
from simulated import called_in
from tiny_models import random_drafter, random_target, stack_layers

from dstill_jax.blocks import ViewMix
from dstill_jax.config import RopeConfig, TargetConfig
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.distill.conditioning import Frozen
from dstill_jax.distill.config import StageOneConfig, StageTwoConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.losses.config import BlockTerms, LossConfig, TermWeights
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Memory
from dstill_jax.models.layers import store_input_first
from dstill_jax.runs import RunConfig, loss_function
from dstill_jax.sharding import MeshConfig, batch_sharding, build_mesh, tree_shardings
from dstill_jax.training import OptimizerConfig, TrainConfig, build_optimizer, init_state, make_train_step

call = called_in(__file__)
S, ROWS, ANCHORS = 32, 8, 8
SHAPE = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
DRAFTER = {"intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
OBJECTIVES = {
    # Every view, the drafter's own order among them, and the terms that need the target's distribution.
    "stage1": StageOneConfig(
        LossConfig(TermWeights(data_ce=1.0), TermWeights(data_ce=0.5, target_kl=0.3, target_l1=0.2)),
        ViewMix(0.4, 0.2, 0.2, 0.2),
        ViewMix(0.8, 0.1, 0.1),
        own_tokens=0.3,
    ),
    "stage2": StageTwoConfig(
        LossConfig(TermWeights(data_ce=1.0), TermWeights(hard_ce=0.2, teacher_kl=1.0), kl_direction="reverse")
    ),
    # What stage 2 has besides: two models' outputs at two states, terms of whole blocks, a student of two passes.
    "stage2 terms": StageTwoConfig(
        LossConfig(
            TermWeights(data_ce=1.0),
            TermWeights(teacher_kl=0.5, consistency_kl=0.5),
            whole=BlockTerms(first_error=0.5, chain=0.5, ddo_real=1.0, ddo_fake=0.5),
        ),
        student_passes=2,
    ),
}


def run_config(stage: str, mesh: MeshConfig, memory: Memory, steps: int, accumulate: int) -> RunConfig:
    return RunConfig(
        target="memory",
        data="memory",
        out="memory",
        objective=OBJECTIVES[stage],
        optimizer=OptimizerConfig(learning_rate=1e-2, ema_decay=0.5),
        train=TrainConfig(total_steps=steps, accumulate_steps=accumulate),
        batches=PipelineConfig(seq_len=S, batch_size=ROWS),
        start_from="memory",
        anchors_per_row=ANCHORS,
        compute_dtype="float32",
        mesh=mesh,
        memory=memory,
    )


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Packed rows of very unequal numbers of supervised tokens; one row has none."""
    random = np.random.default_rng((5, step))
    cut = random.integers(4, S - 4, (ROWS, 1))
    at = np.arange(S)
    ids = np.where(at < cut, 1, 2).astype(np.int32)
    supervised = random.random((ROWS, S)) < np.linspace(0, 1, ROWS)[:, None]
    tokens = random.integers(0, SHAPE["vocab_size"] - 1, (ROWS, S)).astype(np.int32)
    positions = np.where(at < cut, at, at - cut).astype(np.int32)
    return {"tokens": tokens, "loss_mask": supervised, "document_ids": ids, "positions": positions}


@functools.cache
def weights(tied: bool, stacked: bool, draft_layers: int):
    target = random_target(tie_embeddings=tied, **SHAPE)
    params = stack_layers(target.params) if stacked else target.params
    student, teacher = (random_drafter(target, seed, **DRAFTER, num_layers=draft_layers) for seed in (1, 2))
    scale = jnp.asarray(np.random.default_rng(3).uniform(0.5, 2, 64), jnp.float32)
    frozen = Frozen(params["embed"]["embedding"], target_lib.head_matrix(target.config, params), None, scale, params)
    return target.config, student, frozen._replace(teacher=teacher.params)


def prepare(
    stage: str,
    mesh_config: MeshConfig,
    memory: Memory = Memory(),
    *,
    steps: int = 4,
    accumulate: int = 1,
    tied: bool = False,
    stacked: bool = True,
    draft_layers: int = 2,
):
    """(train step, state, frozen, how to place a batch) of the run on this mesh."""
    target, student, frozen = weights(tied, stacked, draft_layers)
    config = run_config(stage, mesh_config, memory, steps, accumulate)
    optimizer = build_optimizer(config.optimizer, steps)
    create = functools.partial(init_state, optimizer=optimizer, seed=0)
    if mesh_config.size == 1:
        state = create(student.params)
        step = make_train_step(loss_function(config, target, student.config), optimizer, config.train)
        return step, state, frozen, jax.device_put
    mesh = build_mesh(mesh_config)
    places = tree_shardings(jax.eval_shape(create, student.params), mesh)
    state = jax.jit(create, out_shardings=places)(student.params)
    loss = loss_function(config, target, student.config, mesh)
    step = make_train_step(loss, optimizer, config.train, state_shardings=places)
    rows = batch_sharding(mesh, split_rows=mesh_config.split_rows)
    return (
        step,
        state,
        jax.device_put(frozen, tree_shardings(frozen, mesh)),
        functools.partial(jax.device_put, device=rows),
    )


def curves(stage: str, mesh: dict, memory: dict | None = None, **options) -> dict[str, Any]:
    """A short run: the curve of every metric, the norm of every final weight and average, and `facts` of its program."""
    step, state, frozen, place = prepare(stage, MeshConfig(**mesh), Memory(**(memory or {})), **options)
    compiled = step.lower(state, frozen, place(batch_of(0))).compile()
    values: dict[str, Any] = {}
    for i in range(options.get("steps", 4)):
        with jax.transfer_guard("disallow"):  # but for copies that are asked for, such as `place`
            state, metrics = compiled(state, frozen, place(batch_of(i)))
        for name, (total, weight) in jax.device_get(metrics).items():
            values.setdefault(name, []).append(float(total / max(weight, 1e-9)))
    for name in ("params", "ema"):
        values[name] = [float(jnp.linalg.norm(x)) for x in jax.tree.leaves(state[name])]
    return values | {"facts": facts(compiled.as_text(), state=state, frozen=frozen, batch=batch_of(0))}


def facts(text: str, **arguments: Any) -> dict[str, Any]:
    """Of a compiled program: the shapes of all gathered arrays, and the parameters that every device holds whole.

    The text has the shapes on one device; `arguments`, by the names of the compiled function, have the whole ones.
    """
    from dstill_jax.planning.hlo import parse

    computations, entry = parse(text)
    gathers = []
    for computation in computations.values():
        for i in computation.values():
            if i.opcode in ("all-gather", "all-gather-start"):
                gathers += [list(s.dims) for s in i.shapes]
    parameters = [i for i in computations[entry].values() if i.opcode == "parameter"]
    given = {name + jax.tree_util.keystr(p): x.shape for name, a in arguments.items() for p, x in leaves_with_path(a)}
    names = {i.name: (i.quoted("op_name") or "").replace("\\'", "'") for i in parameters}
    whole = [i for i in parameters if i.shapes[0].dims == given[names[i.name]]]
    return {
        "gathers": gathers,
        "spread": len(parameters) - len(whole),
        "replicated": [[names[i.name], sum(s.size for s in i.shapes)] for i in whole],
    }


def counted_product() -> dict[str, Any]:
    """What the counter finds in one sharded product and its gradients, weights over eight devices."""
    from dstill_jax.planning.count import Program
    from dstill_jax.sharding import matmul, use_mesh

    mesh = build_mesh(MeshConfig(fsdp=8))

    def loss(x, w):
        with use_mesh(mesh):
            return jnp.sum(jnp.tanh(matmul(x, w, "q_proj/kernel")) ** 2)

    axes = jax.sharding.PartitionSpec(("dcn_data", "data", "fsdp")), jax.sharding.PartitionSpec("fsdp", "tensor")
    places = [jax.sharding.NamedSharding(mesh, spec) for spec in axes]
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        for shape, place in zip(((64, 32), (32, 32)), places, strict=True)
    ]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=tuple(places)).lower(*arguments).compile()
    counts = Program(compiled.as_text()).count()
    moved = {c.kind: (c.times, c.bytes) for c in counts.by_kind()}
    # A CPU may write a scattered sum as a whole sum of which it keeps a part: twice the bytes.
    kind, per_sum = ("reduce-scatter", 1) if "reduce-scatter" in moved else ("all-reduce", 2)
    gathers = moved["all-gather"]
    return {"all-gather": gathers, "flops": counts.flops, "summed": moved[kind][1], "per_sum": per_sum}


def found_devices(names: list[str]) -> dict[str, int]:
    """How many devices the compiler sees in each slice."""
    from dstill_jax.planning.chips import parse_slice, slice_devices

    return {name: len(slice_devices(parse_slice(name))) for name in names}


def too_big(slice_name: str) -> dict[str, Any]:
    """What planning makes of a program whose one array is larger than a device."""
    from dstill_jax.planning.chips import parse_slice, slice_devices
    from dstill_jax.planning.compile import AbstractRun, compile_step

    place = jax.sharding.SingleDeviceSharding(slice_devices(parse_slice(slice_name))[0])
    rows = jax.ShapeDtypeStruct((200_000, 100_000), jnp.float32, sharding=place)
    step = jax.jit(lambda state, frozen, batch: (state + 1, jnp.sort(state, axis=0)))
    made = compile_step(AbstractRun(step, rows, None, None))  # type: ignore[arg-type]
    return {"fits": made.fits, "reason": made.reason}


def loaded_alike(folder: str, mesh: dict, stacked: bool, hidden_size: int = 32) -> dict[str, Any]:
    """Whether a target loaded onto a mesh has the numbers of one loaded whole; bytes read, and bytes in its file."""
    from dstill_jax.weights import load, safetensors_io

    model = random_target(**{**SHAPE, "hidden_size": hidden_size})
    load.save_target(folder, model.config, model.params)
    whole = store_input_first(load.load_target(folder, "float32", stacked).params)
    # What is asked of the disk: more than what is kept, where whole rows are read for a few of their columns.
    read, plain = [], safetensors_io._read_into

    def counting(file, stored, start, out, name):
        plain(file, stored, start, out, name)
        read.append(out.nbytes)

    with mock.patch.object(safetensors_io, "_read_into", counting):
        spread = load.load_target(folder, "float32", stacked, build_mesh(MeshConfig(**mesh))).params
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), whole, spread)
    stored = sum(t.num_bytes for t in safetensors_io.open_weights(Path(folder)).tensors.values())
    return {"equal": all(jax.tree.leaves(same)), "bytes_read": sum(read), "bytes_stored": stored}


def memory_of_loading(folder: str, stacked: bool, shape: tuple[int, int, int, int, int]) -> dict[str, float]:
    """Peak resident memory of loading a random bfloat16 folder onto eight devices, above what there was before.

    `shape`: vocabulary, width, MLP width, layers, heads."""
    import ml_dtypes
    import psutil

    from dstill_jax.weights import load
    from dstill_jax.weights.folders import write_json
    from dstill_jax.weights.hf_config import target_config_dict
    from dstill_jax.weights.names import target_entries
    from dstill_jax.weights.safetensors_io import WEIGHTS_FILE, write_safetensors

    config = TargetConfig("qwen3", *shape, 8, 128, 1e-6, RopeConfig(1e6), True, False, False, 4096)
    entries, random = target_entries(config), np.random.default_rng(0)
    sizes = (2 * math.prod(e.shape) for e in entries)
    values = (
        np.frombuffer(random.bytes(n), ml_dtypes.bfloat16).reshape(e.shape) for e, n in zip(entries, sizes, strict=True)
    )
    write_safetensors(Path(folder) / WEIGHTS_FILE, [(e.name, e.shape, "BF16") for e in entries], values)
    write_json(Path(folder) / "config.json", target_config_dict(config, "bfloat16"))
    mesh = build_mesh(MeshConfig(fsdp=8))
    jax.block_until_ready([jax.device_put(np.zeros(8), d) for d in jax.devices()])
    process = psutil.Process()
    # A child would start with its own maximum; here the file was written in this process, so the peak is sampled.
    before, peak, stop = process.memory_info().rss, [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    params = load.load_target(folder, "bfloat16", stacked, mesh).params
    jax.block_until_ready(params)
    stop.set()
    sampler.join()
    leaves = jax.tree.leaves(params)
    held = sum(s.data.nbytes for x in leaves for s in x.addressable_shards)
    return {
        "held": held,
        "peak": max(peak[0], process.memory_info().rss) - before,
        "largest_share": max(s.data.nbytes for x in leaves for s in x.addressable_shards),
    }


def whole_runs(folder: str, mesh: dict, stop: int | None = None) -> dict[str, Any]:
    """`run_stage` of stage 1, then of stage 2 on its drafter; with `stop`, stage 1 alone and only to that step.

    A run folder that is there already is continued. The losses of every step, and the norms of the exported weights.
    """
    from dstill_jax.data.dataset import Conversation, write_dataset
    from dstill_jax.runs import run_stage
    from dstill_jax.training import read_jsonl
    from dstill_jax.weights import load

    root = Path(folder)
    if not (root / "target").exists():
        model = random_target(**{**SHAPE, "num_layers": 6})
        load.save_target(root / "target", model.config, model.params)
        random = np.random.default_rng(0)
        rows = [np.resize(random.integers(0, 60, 4), 28).astype(np.int32) for _ in range(24)]
        texts = [Conversation(f"row {i}", tokens, np.arange(28) >= 5) for i, tokens in enumerate(rows)]
        write_dataset(root / "data" / "dataset", texts, {"inputs": {"target_fingerprint": None, "tap_ids": []}})
    base = run_config("stage1", MeshConfig(**mesh), Memory(True, True, 2), 6, 2)
    first = dataclasses.replace(
        base,
        target=str(root / "target"),
        data=str(root / "data"),
        out=str(root / "stage1"),
        train=dataclasses.replace(base.train, save_every=1, progress=False),
        batches=PipelineConfig(seq_len=S, batch_size=ROWS, mode="pack"),
        start_from=None,
        new=DrafterShape(mask_token_id=79, num_layers=2, block_size=4, num_taps=2, init_from_layers=(3, 5)),
        vocabulary=64,
    )

    def stopping(step: int, state: Any) -> None:
        if stop is not None and step > stop:
            raise KeyboardInterrupt

    try:
        run_stage(first, on_step=stopping)
    except KeyboardInterrupt:
        return {}
    second = dataclasses.replace(
        first, objective=OBJECTIVES["stage2"], out=str(root / "stage2"), new=None, start_from=f"{first.out}/drafter"
    )
    trained = load.load_drafter(str(run_stage(second)))
    logs = {name: read_jsonl(root / name / "metrics.jsonl") for name in ("stage1", "stage2")}
    return {
        "steps": [record["step"] for record in logs["stage1"]],
        **{name: [record["train/loss"] for record in log] for name, log in logs.items()},
        "weights": [float(jnp.linalg.norm(x)) for x in jax.tree.leaves(trained.params)],
    }


def many(calls: list[tuple[str, dict]]) -> list[Any]:
    """Several calls in one process, so that jax starts once."""
    return [globals()[function](**arguments) for function, arguments in calls]
