#!/usr/bin/env bash
# The whole way, from raw text to a small quantized model, with the commands a user would type. Run it through
# `make demo`, which sets up the environment. Everything it writes is under out/demo; a second run goes on where the
# first one stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

python -c 'import headrace, torch' 2>/dev/null || { echo "error: no environment: run it with 'make demo'" >&2; exit 2; }

step() { printf '\n\033[1m== %s\033[0m\n' "$1"; shift; printf '$ %s\n' "$*"; "$@"; }
once() { [ -e "$1" ] && echo "(done before: $1)" && return; shift; "$@"; }  # once MADE COMMAND: unless MADE is there

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
once $o/models/teacher step "Export it for Hugging Face" headrace export $o/runs/teacher $o/models/teacher
step "Distill it into two of its three layers" deepspeed --log_level warning "${processes[@]}" pipeline/distill.py --config demo/student.json
once $o/models/student step "Export the student" headrace export $o/runs/student $o/models/student
once $o/models/student-int8 step "Quantize to 8 bits" headrace quantize --config demo/int8.json
once $o/models/student-int4 step "Quantize to 4 bits" headrace quantize --config demo/int4.json
once $o/models/student-q8_0 step "Write it for llama.cpp, in 8 bits" headrace quantize --config demo/q8_0.json
step "Compare them all" headrace report $o/report.html \
  --run teacher=$o/runs/teacher --run student=$o/runs/student \
  --model student=$o/models/student --model teacher=$o/models/teacher \
  --model int8=$o/models/student-int8 --model q8_0=$o/models/student-q8_0 --model int4=$o/models/student-int4 \
  --data $o/tokens --sequence-length 128 --max-tokens 40000 --prompt "    def __init__(self" --prompt "This class is used to"
step "Let the smallest one write code" headrace complete $o/models/student-int4 \
  --prompt '    def __init__(self' --temperature 0.6 --tokens 80
step "... and prose" headrace complete $o/models/student-int4 --prompt 'This class is used to' --temperature 0.5
echo
echo "Open $o/report.html. Next: deepspeed ${processes[*]} pipeline/train.py --config ds_configs/zero3.json"
