"""What importing and using the data package loads."""

import subprocess
import sys


def loaded_after(code, *names):
    names = repr(names)
    script = f"import sys\n{code}\nprint([n for n in {names} if n in sys.modules])"
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_the_package_loads_no_data_library():
    code = "import dstill_jax.data\nfor n in dstill_jax.data.__all__: getattr(dstill_jax.data, n)"
    heavy = ("tensorflow", "tensorflow_datasets", "transformers", "tokenizers", "array_record", "rich")
    assert loaded_after(code, *heavy) == "[]"


def test_writing_and_reading_a_dataset_never_loads_tensorflow(tmp_path):
    code = f"""
from pathlib import Path
import numpy as np
from dstill_jax.data import BatchPipeline, Conversation, ConversationDataset, PipelineConfig, write_dataset
write_dataset(Path({str(tmp_path / "d")!r}), [Conversation("a", np.arange(9, dtype=np.int32), np.ones(9, bool))], {{}})
pipeline = BatchPipeline(ConversationDataset({str(tmp_path / "d")!r}), PipelineConfig(seq_len=8, batch_size=2))
pipeline.batch(0)
"""
    assert loaded_after(code, "tensorflow", "tensorflow_datasets") == "['tensorflow_datasets']"
