"""Every user mistake: one line on standard error, exit status 2, no traceback, nothing half-done."""

import errno
import json
import os
import re
import runpy
import shutil
import struct
from pathlib import Path

import pytest

from dstill_jax.cli import _parse, main
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompts import PromptSource
from dstill_jax.errors import UserError
from dstill_jax.locks import only_one
from dstill_jax.overrides import override
from dstill_jax.training.loop import _write_config
from dstill_jax.weights.cache_folder import locked

REFERENCE = Path(__file__).parent / "reference"
CONFIG = """
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.distill.config import StageOneConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.runs import RunConfig
from dstill_jax.training.config import OptimizerConfig, TrainConfig
CONFIG = RunConfig(
    target={target!r}, data="no-such-data", out="run", objective=StageOneConfig(),
    optimizer=OptimizerConfig(learning_rate=1e-3), train=TrainConfig(total_steps=2),
    batches=PipelineConfig(seq_len=16, batch_size=2),
    new=DrafterShape(mask_token_id=208, num_layers=1, block_size=4, num_taps=2), compute_dtype="float32",
)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a target that has a tokenizer, a drafter, prompts and a training config."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REFERENCE / "qwen3_tiny" / "target", tmp_path / "target")
    shutil.copytree(REFERENCE / "qwen3_tiny" / "draft", tmp_path / "draft")
    for file in tmp_path.rglob("*"):
        file.chmod(0o755)
    _write_tokenizer(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5"}\n')
    (tmp_path / "config.py").write_text(CONFIG.format(target="target"))
    return tmp_path


def _write_tokenizer(folder: Path) -> None:
    words = {f"w{i}": i for i in range(3, 200)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def edit_config(folder: str, **values: object) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write(path: str, text: str) -> str:
    Path(path).write_text(text)
    return path


def cut(path: str) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])


def change_header(path: str, change) -> None:
    """Rewrites the JSON header of a safetensors file."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + length]))
    packed = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + length :])


def _wrong_dtype(header: dict) -> dict:
    header["model.norm.weight"]["dtype"] = "I32"
    return header


def _renamed(header: dict) -> dict:
    header["model.stranger.weight"] = header.pop("model.norm.weight")
    return header


WEIGHTS = "target/model.safetensors"
GENERATE = ["generate", "--target", "target"]
PREPARE = ["prepare", "--target", "target", "--prompts", "prompts.jsonl", "--out", "data"]
TRAIN = ["train", "config.py"]
EXPORT = ["export", "draft", "exported", "--target", "target"]
MISTAKES = {
    "export onto itself": (None, [*EXPORT[:2], "draft", *EXPORT[3:]], "is the drafter itself"),
    "drafter of no known target": (
        lambda: write("draft/dstill.json", '{"target_fingerprint": 5}'),
        [*GENERATE, "w5", "--drafter", "draft"],
        "target_fingerprint=5",
    ),
    "drafter trained on another target": (
        lambda: write("draft/dstill.json", '{"target_fingerprint": "abcdef"}'),
        EXPORT,
        "abcdef",
    ),
    "brackets thousands deep": (
        lambda: write("target/config.json", "[" * 100_000),
        [*GENERATE, "w5"],
        "config.json",
    ),
    "tokenizer of nothing": (lambda: write("target/tokenizer.json", "{}"), [*GENERATE, "w5"], "tokenizer"),
    "a number of too many digits": (
        lambda: write("prompts.jsonl", '{"prompt": ' + "9" * 5000 + "}"),
        PREPARE,
        "prompts.jsonl:1",
    ),
    "messages of unequal columns": (
        lambda: write("prompts.jsonl", '{"messages": {"role": ["user"], "content": []}}'),
        PREPARE,
        "messages",
    ),
    "manifest of bytes": (
        lambda: (Path("data").mkdir(), Path("data/manifest.json").write_bytes(b"\xff\xfe")),
        [*PREPARE, "--max-prompt-tokens", "16", "--max-new-tokens", "4"],
        "manifest.json",
    ),
    "provenance that is a list": (
        lambda: (Path("no-such-data").mkdir(), write("no-such-data/provenance.json", "[]")),
        TRAIN,
        "no-such-data",
    ),
    "temperature that float32 cannot divide by": (
        None,
        [*GENERATE, "w5", "--temperature", "1e-40"],
        "temperature=1e-40",
    ),
    "json output that is a folder": (lambda: Path("j").mkdir(), [*GENERATE, "w5", "--json", "j"], "json=j"),
    "json of a demo that is a folder": (lambda: Path("j").mkdir(), ["demo", "--json", "j"], "json=j"),
    "json of a plan that is a folder": (
        lambda: Path("j").mkdir(),
        ["plan", "config.py", "--slice", "v5e-16", "--json", "j"],
        "json=j",
    ),
    "prompt that is not UTF-8": (None, [*GENERATE, "w5 \udcff"], "UTF-8"),
    "override of a wrong type": (None, [*TRAIN, "vocabulary=abc"], "vocabulary='abc'"),
    "override inside a tuple": (None, [*TRAIN, "new.target_layer_ids=(0,'a')"], "target_layer_ids"),
    "override that unsets": (None, [*TRAIN, "out=None"], "out=None"),
    "override that is not finite": (None, [*TRAIN, "optimizer.learning_rate=1e400"], "learning_rate"),
    "override of a part that is not there": (None, [*TRAIN, "start_from.x=1"], "start_from.x"),
    "vocabulary of nothing": (None, [*TRAIN, "vocabulary=0"], "vocabulary=0"),
    "config that exits": (lambda: write("config.py", "import sys; sys.exit('bye')"), TRAIN, "config.py"),
    "unknown embedded name": (None, ["fetch", "gpt5"], "gpt5"),
    "unknown command": (None, ["serve"], "serve"),
    "option that does not exist": (None, [*GENERATE, "hi", "--speed", "9"], "--speed"),
    "option of the wrong type": (None, [*GENERATE, "hi", "--top-k", "many"], "many"),
    "target folder missing": (None, ["generate", "--target", "nowhere/target", "hi"], "nowhere"),
    "target without config": (lambda: Path("target/config.json").unlink(), [*GENERATE, "w5"], "config.json"),
    "target without tokenizer": (lambda: Path("target/tokenizer.json").unlink(), [*GENERATE, "w5"], "tokenizer"),
    "weights cut short": (lambda: cut(WEIGHTS), [*GENERATE, "w5"], "model.safetensors"),
    "weights of a wrong dtype": (lambda: change_header(WEIGHTS, _wrong_dtype), [*GENERATE, "w5"], "model.norm.weight"),
    "tensor missing": (lambda: change_header(WEIGHTS, _renamed), [*GENERATE, "w5"], "norm.weight"),
    "unknown rope": (
        lambda: edit_config("target", rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        [*GENERATE, "w5"],
        "yarn",
    ),
    "sliding window": (
        lambda: edit_config("target", use_sliding_window=True, sliding_window=8),
        [*GENERATE, "w5"],
        "sliding",
    ),
    "mixture of experts": (lambda: edit_config("target", num_experts=8), [*GENERATE, "w5"], "num_experts"),
    "unknown method": (None, [*GENERATE, "w5", "--method", "magic"], "magic"),
    "method without its drafter": (None, [*GENERATE, "w5", "--method", "dflash"], "drafter"),
    "option that the method does not read": (None, [*GENERATE, "w5", "--method", "lookup", "--passes", "3"], "passes"),
    "more drafted tokens than the block has": (
        None,
        [*GENERATE, "w5", "--drafter", "draft", "--draft-tokens", "8"],
        "draft_tokens=8",
    ),
    "drafter of a run that has not ended": (
        lambda: (Path("run").mkdir(), write("run/metrics.jsonl", "")),
        [*GENERATE, "w5", "--drafter", "run"],
        "has not ended",
    ),
    "drafter of another target": (
        None,
        [*GENERATE, "w5", "--drafter", str(REFERENCE / "llama_tied" / "draft")],
        "131",
    ),
    "empty prompt": (None, [*GENERATE, ""], "empty"),
    "prompt longer than the context": (None, [*GENERATE, "w5 " * 600], "512"),
    "negative temperature": (None, [*GENERATE, "w5", "--temperature", "-1"], "temperature=-1"),
    "top_p above one": (None, [*GENERATE, "w5", "--top-p", "1.5"], "top_p=1.5"),
    "prompts missing": (None, [*PREPARE[:4], "none.jsonl", *PREPARE[5:]], "none.jsonl"),
    "prompts empty": (lambda: write("prompts.jsonl", ""), PREPARE, "prompts.jsonl"),
    "prompts malformed": (
        lambda: write("prompts.jsonl", '{"prompt": "w5"}\n{"prompt": \n'),
        PREPARE,
        "prompts.jsonl:2",
    ),
    "prompts without a prompt": (lambda: write("prompts.jsonl", '{"question": "w5"}\n'), PREPARE, "prompts.jsonl:1"),
    "conversation without an answer": (
        lambda: write("prompts.jsonl", '{"messages": [{"role": "user", "content": "w5"}]}\n'),
        [*PREPARE, "--conversations"],
        "prompts.jsonl:1",
    ),
    "sampling of finished conversations": (
        None,
        [*PREPARE, "--conversations", "--temperature", "1"],
        "temperature=1.0",
    ),
    "no room for an answer": (None, [*PREPARE, "--max-new-tokens", "0"], "max_new_tokens=0"),
    "training config missing": (None, ["train", "nothing.py"], "nothing.py"),
    "training config that fails": (lambda: write("config.py", "1 / 0"), TRAIN, "ZeroDivisionError"),
    "training config without CONFIG": (lambda: write("config.py", "x = 1"), TRAIN, "CONFIG"),
    "unknown field": (None, [*TRAIN, "train.total_stepz=5"], "total_steps"),
    "value of the wrong type": (None, [*TRAIN, "train.total_steps=many"], "total_steps"),
    "term of stage 2 in stage 1": (None, [*TRAIN, "objective.loss.whole.ddo_fake=0.5"], "whole.ddo_fake"),
    "partner of a term that is off": (None, [*TRAIN, "objective.loss.consistency_with=teacher"], "consistency_kl"),
    "unknown slice": (None, ["plan", "config.py", "--slice", "v5e-17"], "v5e-16"),
    "unknown field behind an option": (None, ["plan", "config.py", "--slice", "v5e-16", "mesh.bogus=1"], "fsdp"),
    "rows that do not divide over a mesh": (None, [*TRAIN, "mesh.fsdp=3"], "multiple of 3"),
    "block of one slot": (None, [*TRAIN, "new.block_size=1"], "block_size=1"),
    "mask token outside the vocabulary": (None, [*TRAIN, "new.mask_token_id=500"], "mask_token_id=500"),
    "dataset missing": (None, TRAIN, "no-such-data"),
    "evaluation of no prompts": (
        None,
        ["eval", "--target", "target", "--prompts", "prompts.jsonl", "--limit", "0"],
        "limit=0",
    ),
    "settings of a drafter that is not given": (
        None,
        ["eval", "--target", "target", "--prompts", "prompts.jsonl", "--tree-budget", "16"],
        "--drafter",
    ),
    "chat template missing": (None, [*PREPARE, "--chat-template", "nothing.jinja"], "chat-template=nothing.jinja"),
    "run without a folder": (None, [*TRAIN, "out=''"], "out is empty"),
    "decay of a view that is off": (
        None,
        [*TRAIN, *(f"objective.views.{x}" for x in ("full=1", "prefix=0", "random=0", "prefix_decay=0.5"))],
        "prefix_decay=0.5",
    ),
    "beta of a term that is off": (None, [*TRAIN, "objective.loss.whole.ddo_beta=0.5"], "ddo_beta=0.5"),
    "two sayings of the taps": (None, [*TRAIN, "new.num_taps=3", "new.target_layer_ids=(1, 2)"], "num_taps=3"),
    "a search of no settings": (
        None,
        ["plan", "config.py", "--slice", "v5e-16", "--search", "--limit", "0"],
        "limit=0",
    ),
    "evaluation of one prompt": (
        None,
        ["eval", "--target", "target", "--prompts", "prompts.jsonl", "--limit", "1"],
        "at least 2 prompts",
    ),
    "drafter to export missing": (None, ["export", "nothing", "out", "--target", "target"], "nothing"),
    "demo of no length": (None, ["demo", "--target", "tiny", "--minutes", "0"], "minutes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(mistake: str, place: Path, capsys: pytest.CaptureFixture) -> None:
    spoil, arguments, named = MISTAKES[mistake]
    if spoil is not None:
        spoil()
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert len(lines) == 1 and lines[0].startswith("dstill")
    assert named in lines[0]


@pytest.mark.parametrize("more", [["--method", "lookup", "--draft-tokens", "12"], ["--draft-tokens", "2"], []])
def test_a_terminal_gets_colours_whatever_is_drafted(
    more: list[str], place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many colours as may be drafted, which is not always what the drafter's block holds."""
    command = [*GENERATE, "--drafter", "draft", "w5 w6 w7 w5 w6 w7", "--max-new-tokens", "24", *more]
    assert main(command) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(command) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_each_run_of_a_series_is_trained_on_its_own_target(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("target", "other")
    config = CONFIG.format(target="target") + "\nimport dataclasses\n"
    write("two.py", config + "CONFIG = (CONFIG, dataclasses.replace(CONFIG, target='other', out='b'))\n")
    trained = []
    monkeypatch.setattr("dstill_jax.runs.run_stage", lambda config, report: trained.append(config.target))
    assert main(["train", "two.py"]) == 0
    assert [Path(target).name for target in trained] == ["target", "other"]


def test_a_cache_that_is_a_file_is_one_line_and_exit_2(
    place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTILL_CACHE", write("cache", ""))
    assert main(["fetch", "tiny"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "cache" in line


def test_what_is_not_a_drafter_or_a_run_is_not_overwritten(place: Path) -> None:
    before = {file.name: file.read_bytes() for file in Path("target").iterdir()}
    assert main(["export", "draft", "target", "--target", "target"]) == 2
    with pytest.raises(UserError, match="not a run's"):
        _write_config(Path("target"), {})
    assert {file.name: file.read_bytes() for file in Path("target").iterdir()} == before


def test_a_folder_has_one_process_at_a_time(place: Path) -> None:
    with only_one(Path("run")), pytest.raises(UserError, match="another process"), only_one(Path("run")):
        pass
    with only_one(Path("run")):  # the first has left
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_disk_without_locks_is_worked_on_without_them(tmp_path: Path, monkeypatch, number: int) -> None:
    def flock(*_) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with only_one(tmp_path), locked(tmp_path / "cache"):
        pass


def test_a_full_disk_is_one_line_and_exit_2(
    place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")

    monkeypatch.setattr("dstill_jax.weights.load.write_safetensors", full)
    assert main(["export", "draft", "out", "--target", "target"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "No space left on device" in lines[0]
    assert not list(place.glob("out/*.safetensors"))


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell spells it out in `--out ~/x`, and not in `--out=~/x`, in `data=~/x` or in a config file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = PromptSource("~/p.jsonl")
    prepared = PrepareConfig("~/target", source, "~/data")
    assert (prepared.target, prepared.source.path, prepared.out) == tuple(
        str(tmp_path / name) for name in ("target", "p.jsonl", "data")
    )
    exported = runpy.run_path(write(str(tmp_path / "config.py"), CONFIG.format(target="Qwen/Qwen3-8B")))["CONFIG"]
    run = override(exported, ["out=~/run", "data=('~/a', 'b')", "checkpoints=gs://bucket/~x"])
    assert (run.target, run.out, run.data) == ("Qwen/Qwen3-8B", str(tmp_path / "run"), (str(tmp_path / "a"), "b"))
    assert run.checkpoints == "gs://bucket/~x"
    assert _parse([*PREPARE[:-1], "~/data"]).out == str(tmp_path / "data")
