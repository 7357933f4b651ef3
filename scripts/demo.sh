#!/usr/bin/env bash
# Train EAGLE heads on a real language model, measure what they are worth, export them. No GPU, no model hub.
# Run it again and it goes on where it stopped; remove outputs/eagle-smollm2-135m to start over.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
source "${HEADSTART_VENV:-.venv}/bin/activate"
export TOKENIZERS_PARALLELISM=false DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
run=outputs/eagle-smollm2-135m
launch="accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"

echo "1/3 training heads (about six minutes on two cores)"
$launch train/train_heads.py experiment=demo resume=true
echo "2/3 measuring them on held-out prompts (about three minutes)"
# A tree of fixed size: a search over a few prompts and this minute's costs chooses now two nodes, now seven.
$launch eval/eval_heads.py heads=$run limit=12 benchmark.max_new_tokens=48 benchmark.probe_prompts=1 tree.source=dynamic tree.max_nodes=5 tree.depth=2 other_dtypes=[float32,bfloat16] | tee $run/evaluation.log
echo "3/3 exporting them, and checking that the files say what the trained heads said"
python scripts/export_heads.py heads=$run format=vllm dtype=bfloat16 expand_vocabulary=true output=$run/export-vllm
python scripts/verify_export.py export=$run/export-vllm
echo
echo "heads    $run/heads"
echo "exported $run/export-vllm"
echo "report   $run/report.html   picture $run/summary.png"
tail -n 1 $run/evaluation.log
