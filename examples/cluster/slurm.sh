#!/bin/bash
# A study on all GPUs of a SLURM job: sbatch slurm.sh my-study.toml /shared/runs/my-study
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
set -euo pipefail

file=$1
out=$2 # on a file system that all nodes share

# Every process of the job needs the same token. It keeps others out; it does not encrypt.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0
# Workers take over this number of threads, which decides the last bits on CPUs.
export OMP_NUM_THREADS=1

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | cut -d ' ' -f 1)

# Ray starts on every node, the command runs on the first one, then Ray stops. The time limit ends
# before the job does (exit code 75); submitting the job again continues.
srun ray symmetric-run --address "$address:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "$SLURM_GPUS_PER_NODE" \
  -- fedzmg study "$file" --out "$out" --on auto --max-minutes 1420
