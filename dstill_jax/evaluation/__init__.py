"""Evaluation: acceptance counts, intervals over prompts, results, tables, figures, report. numpy only until drawn."""

from dstill_jax.evaluation.acceptance import (
    SLOT_DEFINITION,
    TAU_DEFINITION,
    AcceptanceCounts,
    tau_mean,
    tau_pooled,
)
from dstill_jax.evaluation.colour import IncrementalDecoder, Segment, colour_segments
from dstill_jax.evaluation.environment import current_commit, digest_tokens, hash_prompts, installed_versions
from dstill_jax.evaluation.report import Sample, render_report, write_report
from dstill_jax.evaluation.results import (
    LOSSLESS_DEFINITION,
    SPEEDUP_DEFINITION,
    EvaluationMetadata,
    EvaluationResult,
    MethodResult,
    identical_outputs,
    speedup,
    tau_change,
    tau_pooled_change,
)
from dstill_jax.evaluation.stats import (
    INTERVAL_DEFINITION,
    Bootstrap,
    Interval,
    mean_interval,
    paired_mean_change,
    paired_ratio_change,
    ratio_interval,
    require_prompts,
    speedup_interval,
)
from dstill_jax.evaluation.tables import Table, change_table, headline_table, print_headline, rich_table

__all__ = [
    "INTERVAL_DEFINITION",
    "LOSSLESS_DEFINITION",
    "SLOT_DEFINITION",
    "SPEEDUP_DEFINITION",
    "TAU_DEFINITION",
    "AcceptanceCounts",
    "Bootstrap",
    "EvaluationMetadata",
    "EvaluationResult",
    "IncrementalDecoder",
    "Interval",
    "MethodResult",
    "Sample",
    "Segment",
    "Table",
    "change_table",
    "colour_segments",
    "current_commit",
    "digest_tokens",
    "hash_prompts",
    "headline_table",
    "identical_outputs",
    "installed_versions",
    "mean_interval",
    "paired_mean_change",
    "paired_ratio_change",
    "print_headline",
    "ratio_interval",
    "render_report",
    "require_prompts",
    "rich_table",
    "speedup",
    "speedup_interval",
    "tau_change",
    "tau_mean",
    "tau_pooled",
    "tau_pooled_change",
    "write_report",
]
