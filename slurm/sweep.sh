# shellcheck shell=bash
# The elements of a job array: each trains in a run directory of its own. Sourced after env.sh, never run.

# Sets HEADRACE_ARGUMENTS to the config and the overrides of this job. In a job array they are the element's: its values of
# --sweep, and run.dir with a directory below it. $@: CONFIG [--set KEY=VALUE ...] [--sweep KEY=VALUE,VALUE ...]
#
#   sbatch --array=0-2 slurm/train.sbatch ds_configs/zero3.json --sweep optimizer.params.lr=1e-3,3e-4,1e-4
headrace_sweep() {
    HEADRACE_ARGUMENTS=("$@")
    [ "${HEADRACE_SWEEP:-}" != resolved ] || return 0 # by headrace submit, whose config is that of the element
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || [[ " $* " == *" --sweep "* ]] || return 0
    local printed
    printed=$(python -m headrace.submission.element "$@") || exit 2
    mapfile -t HEADRACE_ARGUMENTS <<< "$printed"
}
