#!/usr/bin/env bash
# The whole way, from raw text to a small quantized model, with the commands a user would type. Run it through
# `make demo`, which sets up the environment. Everything it writes is under out/demo; a second run goes on where the
# first one stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

python -c 'import headrace, torch' 2>/dev/null || { echo "error: no environment: run it with 'make demo'" >&2; exit 2; }

step() { printf '\n\033[1m== %s\033[0m\n' "$1"; shift; printf '$ %s\n' "$*"; "$@"; }

# Without a GPU: one process per core, one thread each. With GPUs deepspeed starts one process on each by itself.
processes=()
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
  processes=(--num_accelerators 2)
fi
if [ ${#processes[@]} = 0 ]; then  # the demo's 8 samples per step are for 1, 2, 4 or 8 GPUs
  gpus=$(python -c 'import torch; n = torch.cuda.device_count(); print(max(k for k in (1, 2, 4, 8) if k <= n))')
  processes=(--num_gpus "$gpus")
fi
stdlib=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
o=out/demo

[ -e $o/corpus/docstrings.jsonl.zst ] || step "Gather text that is on every machine" python demo/gather_corpus.py $o/corpus
step "Tokenize and shard it" headrace prep --config demo/corpus.json --set "sources.0.path=$stdlib"
step "What would be trained?" headrace check --config demo/teacher.json
step "Train a teacher" deepspeed --log_level warning "${processes[@]}" pipeline/train.py --config demo/teacher.json
step "Prune, distil, quantize and compare" headrace compress run --config demo/compress.json --set "distill.processes=${processes[1]}"
step "Let the smallest one write code" headrace complete $o/compressed/int4-gptq \
  --prompt '    def __init__(self' --temperature 0.6 --tokens 80
step "... and prose" headrace complete $o/compressed/int4-gptq --prompt 'This class is used to' --temperature 0.5
echo
echo "Open $o/compressed/report.html. Next: deepspeed ${processes[*]} pipeline/train.py --config ds_configs/zero3.json"
