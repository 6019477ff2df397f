#!/usr/bin/env bash
# What to look at first on a GPU: whole answers of adaptive, fixed 3 and 5, and no speculation at
# batch sizes 1, 8, 32 and 64, with a draft model, a head and copies of the text. At most six minutes.
#
#   benchmarks/device_check.sh PROMPTS.jsonl [FOLDER FOR RESULTS]
set -euo pipefail
cd "$(dirname "$0")/.."
prompts=${1:?"give a file of prompts, JSON lines"}
folder=${2:-$(mktemp -d)}
python=${PYTHON:-.venv/bin/python}
# Seconds of each of the three runs. What was measured by then is printed and kept.
limit=110

"$python" -c 'import torch; assert torch.cuda.is_available(), "there is no GPU"; print(torch.cuda.get_device_name())'
for draft in zoo:draft zoo:eagle3@1500m suffix; do
    echo "== $draft"
    timeout --signal=INT "$limit" "$python" benchmarks/versions.py "$prompts" \
        --target zoo:target@1500m --draft "$draft" \
        --contenders none fixed:3 fixed:5 adaptive:7 --temperatures 0 --batch-sizes 1 8 32 64 \
        --turns 2 --max-tokens 64 --output "$folder/device_${draft//[^a-z0-9]/_}.json" || true
done
echo "results: $folder"
