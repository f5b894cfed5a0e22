#!/usr/bin/env bash
# Grades a class on Slurm. The checkout that this file lies in, SUBMISSIONS and OUT must be on a
# file system that every node sees and that has locks:
#   export SUBMISSIONS=/shared/class OUT=/shared/grades TASKS=8
#   labs/cluster/grade.sh --due 2026-11-30T23:59+01:00
# Arguments go to `grade --only-queue`, files among them by their whole paths; a partition or an
# account goes into sbatch's own variables, as SBATCH_PARTITION. PYTHON names one where the
# checkout has no .venv. To go on after a failure, submit the same again.
# The logs go to $OUT.logs; they name students, so they are as private as OUT.
set -euo pipefail

: "${SUBMISSIONS:?name what was handed in, as SUBMISSIONS=/shared/class}"
: "${OUT:?name a folder for the results, as OUT=/shared/grades}"
SUBMISSIONS=$(realpath -e -- "$SUBMISSIONS")
OUT=$(realpath -m -- "$OUT")
COURSE=$(realpath -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
export SUBMISSIONS OUT COURSE
mkdir -p -- "$OUT.logs"
chmod 700 -- "$OUT.logs"

submit() {
  local step=$1 && shift
  sbatch --parsable --export=ALL --kill-on-invalid-dep=yes \
    --job-name="grade-$step" --output="$OUT.logs/$step-%j.log" "$@"
}
script=$COURSE/labs/cluster/grade.sbatch
prepare=$(submit prepare "$script" prepare "$@")
prepare=${prepare%%;*} # a cluster's name may follow
work=$(submit work --array="1-${TASKS:-4}" --dependency="afterok:$prepare" "$script" work)
work=${work%%;*}
# afterany: a task that died leaves the rest to the others, and the table says what nobody tried.
collect=$(submit collect --dependency="afterok:$prepare,afterany:$work" "$script" collect)
echo "prepare $prepare, work $work, collect ${collect%%;*}; logs in $OUT.logs, grades in $OUT"
