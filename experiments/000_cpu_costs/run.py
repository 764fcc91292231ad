"""Where the time goes on a CPU: decoding, data generation, training step. Writes results.json.

Command:  python experiments/000_cpu_costs/run.py [decode] [generate] [step]      (default: all three)
Needs:    `dstill fetch smollm2 gsm8k` (done here when missing), an otherwise idle machine of two cores, about 5 minutes.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dstill_jax import blocks as blocks_lib
from dstill_jax.allocator import keep_freed_memory
from dstill_jax.data.generate import prepare
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompt_sets import read_prompts, render, training_prompts
from dstill_jax.data.prompts import PromptSource
from dstill_jax.decoding.session import Request, Session
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Frozen, Task
from dstill_jax.distill.config import StageTwoConfig, dflash_baseline
from dstill_jax.distill.initialise import DrafterShape, new_params
from dstill_jax.distill.stage_one import stage_one_loss
from dstill_jax.distill.stage_two import stage_two_loss
from dstill_jax.evaluation.environment import current_commit, installed_versions
from dstill_jax.evaluation.measure import device_name
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.target import Target
from dstill_jax.weights.embedded import fetch
from dstill_jax.weights.load import load_target
from pallas_kernels.fused_head_loss import fused_head_loss

SHAPE = DrafterShape(mask_token_id=16, num_layers=2, block_size=16, init_from_layers=(28, 29))


def decode_costs(target: Target, prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds of a round (median over prompts), and of the prefill, batch 1."""
    config = SHAPE.build(target.config)
    drafter = Drafter(config, new_params(SHAPE, config, target.config, target.params, jax.random.key(0)))
    costs = {}
    cases = [("autoregressive, 1 token", "autoregressive", {})]
    cases += [(f"verify {w + 1} tokens (prompt lookup)", "lookup", {"draft_tokens": w}) for w in (1, 3, 7, 15)]
    cases += [(f"verify {w + 1} tokens and draft {w}", "dflash", {"draft_tokens": w}) for w in (3, 7, 15)]
    cases += [("verify 8 tokens and draft 7 in 7 passes", "refine", {"draft_tokens": 7, "passes": 7})]
    for name, method, options in cases:
        session = Session(
            target,
            drafter=drafter,
            method=method,
            batch_size=1,
            max_prompt_tokens=128,
            max_new_tokens=96,
            stop_token_ids=[],
            **options,
        )
        times, prefills = [], []
        for i, tokens in enumerate(prompts):
            before = session.clock.prefill
            state = session.start(session.idle(), [0], [Request(i, tokens)], 1)
            prefills.append(session.clock.prefill - before)
            began = time.perf_counter()
            state = session.advance(state, 30)
            times.append((time.perf_counter() - began) / int(state.rounds[0]) * 1e3)
        costs[name] = float(np.median(times[1:]))  # the first one compiles
        costs["prefill of a prompt"] = float(np.median(prefills[len(prompts) // 2 :])) * 1e3
    return costs


def generation_rate(source: str) -> dict[str, float]:
    """New tokens a second of `dstill prepare` with two workers, compilation included and left out."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        summary = prepare(
            PrepareConfig(
                target=source,
                source=PromptSource(training_prompts("gsm8k")),
                limit=256,
                out=f"{folder}/out",
                max_prompt_tokens=256,  # all of them fit: two full batches a worker
                max_new_tokens=192,
                batch_size=64,
                workers=2,
            )
        )
        seconds = time.perf_counter() - began
    return {
        "new tokens": summary.new_tokens,
        "tokens per second, from loaded target to last answer": summary.tokens_per_second,
        "tokens per second, whole command": summary.new_tokens / seconds,
    }


def step_costs(target: Target) -> dict[str, float]:
    """Milliseconds of a training step and of its parts: 4 rows of 232 tokens, 16 anchors each, blocks of 8."""
    shape = dataclasses.replace(SHAPE, block_size=8)
    drafter = shape.build(target.config)
    params = new_params(shape, drafter, target.config, target.params, jax.random.key(0))
    task = Task(target.config, drafter, 16)
    B, S, D = 4, 232, target.config.hidden_size
    random = np.random.default_rng(0)
    batch = {
        "tokens": jnp.asarray(random.integers(0, 4096, (B, S)), jnp.int32),
        "loss_mask": jnp.broadcast_to(jnp.arange(S) >= 96, (B, S)),
        "document_ids": jnp.ones((B, S), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(S), (B, S)),
        "features": jnp.asarray(random.standard_normal((B, S, 6 * D)), jnp.float16),
    }
    head = target_lib.head_matrix(target.config, target.params)[:, :4096]
    scale = jnp.ones(5 * D)
    frozen = Frozen(target.params["embed"]["embedding"], head, jnp.arange(4096), scale, None, params)
    key, half = jax.random.key(0), jnp.float32(0.5)
    data = jax.jit(lambda f, b: conditioning.condition(task, f, b, key))(frozen, batch)
    context = jax.jit(lambda p, d: conditioning.project(task, p, d))(params, data)
    tokens = blocks_lib.mask_tokens(data.blocks.tokens, jnp.arange(8) == 0, 16)
    hidden = jnp.asarray(random.standard_normal((448, D)), jnp.float32)
    one, two = dflash_baseline(), StageTwoConfig()

    def total(tree: Any) -> jax.Array:
        return sum(x.sum() for x in jax.tree.leaves(tree))  # type: ignore[return-value]

    def head_loss(h: jax.Array) -> jax.Array:
        return fused_head_loss(h, head, labels=(jnp.zeros(448, jnp.int32),)).values[0].sum()

    parts: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "features, anchors, blocks": (lambda f, b: conditioning.condition(task, f, b, key), (frozen, batch)),
        "context keys and values, forward and backward": (
            jax.grad(lambda p, d: total(conditioning.project(task, p, d))),
            (params, data),
        ),
        "one pass over the blocks, forward and backward": (
            jax.grad(lambda p, c: conditioning.run_pass(task, frozen, p, data, c, tokens).sum(), argnums=(0, 1)),
            (params, context),
        ),
        "head and loss, forward and backward": (jax.grad(head_loss), (hidden,)),
        "stage 1 or baseline, whole gradient": (
            jax.grad(lambda p, f, b: stage_one_loss(task, one, p, f, b, key, half)[0]),
            (params, frozen, batch),
        ),
        "stage 2 (7 passes left to right), whole gradient": (
            jax.grad(lambda p, f, b: stage_two_loss(task, two, p, f, b, key, half)[0]),
            (params, frozen, batch),
        ),
    }
    return {name: _median_ms(jax.jit(function), *arguments) for name, (function, arguments) in parts.items()}


def _median_ms(function: Callable[..., Any], *arguments: Any, repeats: int = 7) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def main() -> None:
    wanted = sys.argv[1:] or ["decode", "step", "generate"]
    path = Path(__file__).with_name("results.json")
    results = json.loads(path.read_text()) if path.exists() else {}
    keep_freed_memory()
    source = str(fetch("smollm2"))
    target = load_target(source)
    if "decode" in wanted:
        prompts = render(target, read_prompts("gsm8k", 9))
        _keep(path, results, "decode, ms a round", decode_costs(target, [p[:128] for p in prompts]))
    if "step" in wanted:
        _keep(path, results, "training step, ms", step_costs(target))
    del target
    if "generate" in wanted:
        _keep(path, results, "data generation", generation_rate(source))


def _keep(path: Path, results: dict[str, Any], part: str, found: dict[str, float]) -> None:
    """Each part as soon as it is measured, with where and by which code that was."""
    conditions = {"device": device_name(), "versions": installed_versions(), "commit": current_commit()}
    results[part] = found | conditions
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({part: results[part]}, indent=2), flush=True)


if __name__ == "__main__":
    main()
