#!/usr/bin/env bash
# train.sh as a job on a running Ray cluster; settings as there, and RAY_DASHBOARD. Start it from anywhere that reaches the dashboard.
#
#   NODES=4 MODEL=... TRAIN=... VAL=... OUT=... examples/ray_job.sh [overrides]      prints the job's ID and returns
#   ray job logs --follow ID       ray job status ID       ray job stop ID           (with RAY_ADDRESS=$RAY_DASHBOARD)
#   the same command again: continues from the last checkpoint in OUT
#
# The job brings this checkout with it as its working directory; verl, vLLM and flash-attn have to be on every node, and what they
# read of the environment (HF_HOME, HF_HUB_OFFLINE, NCCL_...) is set there.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${MODEL:?}" "${TRAIN:?}" "${VAL:?}" "${OUT:?}"

# To the entry point, not into the runtime environment: Ray refuses a variable there that verl gives its workers as well.
settings=(env)
for name in RECIPE NODES GPUS MODEL TRAIN VAL OUT; do
    [[ -z "${!name:-}" ]] || settings+=("$name=${!name}")
done

ray job submit --address="${RAY_DASHBOARD:-http://127.0.0.1:8265}" --no-wait --working-dir "$repository" \
    --runtime-env-json '{"excludes": ["/docs/results", "/tests", "/runs", "/outputs", "/data"]}' \
    -- "${settings[@]}" bash examples/train.sh "$@"
