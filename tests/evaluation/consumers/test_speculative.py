"""vLLM serves an export with its own modules for multi-token prediction as the drafts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pipeline.evaluation.consumers.consumer import VLLM_PYTHON
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.support import output_of

SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
PROGRAM = """\
import json, sys
from vllm import LLM, SamplingParams

def main(how):
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 96, "disable_log_stats": False}
    llm = LLM(model=sys.argv[1], **settings, **how)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = [each.outputs[0].text for each in llm.generate(["The river ", "When the "], sampling, use_tqdm=False)]
    names = ["vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"]
    print(json.dumps([texts, {each.name: each.value for each in llm.get_metrics() if each.name in names}]))

main({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if sys.argv[2] == "drafts" else {})
"""


@pytest.mark.sweep
@pytest.mark.skipif(VLLM_PYTHON not in os.environ, reason=f"needs vLLM, whose environment's Python {VLLM_PYTHON} names")
def test_vllm_generates_the_same_text_with_the_drafts_of_an_exports_own_modules(tokens: Path, tmp_path: Path) -> None:
    fields = {"model_type": "glm4_moe", "n_shared_experts": 1, "intermediate_size": 128, "use_qk_norm": False}
    model = {"config": {**fields, **SIZES, **EXPERTS, "n_group": 1, "topk_group": 1, "max_position_embeddings": 128}}
    config = tiny_config(tokens, tmp_path / "run", model=model, engine="torch", loss={"mtp": {}})
    config["run"] |= {"steps": 400, "checkpoint_every": 400}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-3}}
    config.pop("scheduler")
    launch("train.py", write_config(tmp_path / "c.json", config))
    output_of(warm.run("-m", "pipeline", "export", tmp_path / "run", tmp_path / "out"))
    (texts, _), (drafted, counts) = (_generated(tmp_path / "out", how) for how in ("plain", "drafts"))
    assert drafted == texts
    accepted, drafts = (counts[f"vllm:spec_decode_num_{each}"] for each in ("accepted_tokens", "drafts"))
    assert 0.2 * drafts < accepted <= drafts  # 54 of 102 were, of 4 texts; without training none is


def _generated(folder: Path, how: str) -> tuple[list[str], dict[str, int]]:
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    command = [os.environ[VLLM_PYTHON], "-c", PROGRAM, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    texts, counts = json.loads(done.stdout.strip().splitlines()[-1])
    return texts, counts
