#!/usr/bin/env bash
# Vision-OPD on a Ray cluster: submit from anywhere that reaches its dashboard. Every node needs the same environment
# (this package, verl, vLLM) and sees MODEL, TRAIN, VAL and OUT under the same paths.
#   follow:  ray job logs -f ID      stop:  ray job stop ID      continue: submit again with the same OUT (resume_mode=auto)
set -euo pipefail

ray job submit --address="${RAY_DASHBOARD:-http://127.0.0.1:8265}" --no-wait \
    --runtime-env-json '{"env_vars": {"HYDRA_FULL_ERROR": "1"}}' \
    -- python -m opd_recipes --config-name vision_opd \
    actor_rollout_ref.model.path="${MODEL:?}" \
    data.train_files="${TRAIN:?}" \
    data.val_files="${VAL:?}" \
    trainer.nnodes="${NODES:-4}" \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.default_local_dir="${OUT:?}/checkpoints" \
    trainer.resume_mode=auto \
    trainer.total_epochs=1 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    "$@"
