#!/usr/bin/env bash
# Vision-OPD on one machine. MODEL: a Hugging Face folder or name; TRAIN, VAL: parquet files (see README.md for the columns).
set -euo pipefail

python -m opd_recipes --config-name vision_opd \
    actor_rollout_ref.model.path="${MODEL:?}" \
    data.train_files="${TRAIN:?}" \
    data.val_files="${VAL:?}" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.total_epochs=1 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.actor.fsdp_config.param_offload=false \
    "$@"
