#!/usr/bin/env bash
#SBATCH --job-name=opd
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# train.sh on a Slurm allocation: a Ray cluster over its nodes, and the job on the first of them. From the repository's root:
#
#   MODEL=... TRAIN=... VAL=... OUT=... sbatch examples/slurm.sh [overrides]            four nodes with eight GPUs each
#   ... sbatch --nodes=1 examples/slurm.sh [overrides]                                  one
#
# Follow its log; scancel stops it; the same command again, or Slurm's own requeue, continues from the last checkpoint in OUT.
set -euo pipefail
: "${MODEL:?}" "${TRAIN:?}" "${VAL:?}" "${OUT:?}"
cd "${SLURM_SUBMIT_DIR:-.}"

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export NODES=$SLURM_JOB_NUM_NODES GPUS=${SLURM_GPUS_ON_NODE:-8}
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
# Who reaches a Ray cluster may run code on it, so this one asks for a token. Said here because Ray's head would otherwise
# ask for one, and its workers have none, where a home folder has a token from some earlier run.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
address=$head:${RAY_PORT:-6379}
finished=$OUT/.finished-$SLURM_JOB_ID
mkdir -p "$OUT"
rm -f "$finished"

# Ray says nothing of a cluster that did not start, so the trainer's end is what counts.
# shellcheck disable=SC2016
srun ray symmetric-run --address "$address" --min-nodes "$NODES" --num-gpus "$GPUS" -- \
    bash -c 'RAY_ADDRESS=$1 bash examples/train.sh "${@:3}" && touch "$2"' train "$address" "$finished" "$@"
[[ -e $finished ]] || { echo "slurm.sh: training did not finish, see above" >&2; exit 1; }
rm -f "$finished"
