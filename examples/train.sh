#!/usr/bin/env bash
# The training command; on one machine it is run as it is, and every launcher in this folder runs it on a cluster.
#
#   MODEL=Qwen/Qwen3.5-4B TRAIN=train.parquet VAL=val.parquet OUT=runs/first examples/train.sh [overrides]
#
# RECIPE   a recipe's name (vision_opd)            NODES, GPUS  machines, and GPUs of each (1, 8)
# MODEL    a Hugging Face folder or name           OUT          checkpoints; the same again continues the run
# TRAIN, VAL  parquet files, see README.md         DRY_RUN=1    only check, and estimate memory for GPU_MEMORY (80GiB)
set -euo pipefail

settings=(
    --config-name "${RECIPE:-vision_opd}"
    actor_rollout_ref.model.path="${MODEL:?a Hugging Face folder or name}"
    data.train_files="${TRAIN:?a parquet file}"
    data.val_files="${VAL:?a parquet file}"
    trainer.default_local_dir="${OUT:?a folder that all machines see}/checkpoints"
    trainer.nnodes="${NODES:-1}"
    trainer.n_gpus_per_node="${GPUS:-8}"
    trainer.resume_mode=auto
    trainer.total_epochs=1
    trainer.save_freq=20
    trainer.test_freq=10
    # A checkpoint has 16 bytes for each parameter; two are enough to lose none to an interruption.
    trainer.max_actor_ckpt_to_keep=2
    # Qwen3.5 else thinks before it answers; templates that know no thinking are not changed by it.
    +data.apply_chat_template_kwargs.enable_thinking=false
    "$@"
)

if [[ -n "${DRY_RUN:-}" ]]; then
    exec python -m opd_recipes.cli estimate --gpu-memory "${GPU_MEMORY:-80GiB}" "${settings[@]}"
fi
exec python -m opd_recipes "${settings[@]}" hydra.run.dir="$OUT/hydra/$(date +%Y%m%d-%H%M%S)"
