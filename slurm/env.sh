# shellcheck shell=bash
# Environment of the job scripts in this directory. Sourced, never run.
# Any variable below can be exported before `sbatch`: a value that is set already is kept.

# Slurm runs a copy of the job script from a spool directory; this file is sourced from its real place: the root of the
# repository, or headrace/share in an installed package.
HEADRACE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export HEADRACE_ROOT

# The Python environment; it must be on a file system that all nodes see. Set it to the empty string to use the python
# that is on PATH already (modules, conda, containers). An installed package has no .venv beside this directory: then the
# python on PATH is used when it has headrace (sbatch passes the PATH of the shell that submits).
if [ -z "${HEADRACE_VENV+set}" ] && [ ! -e "$HEADRACE_ROOT/.venv" ] && python -c 'import headrace' 2> /dev/null; then
    HEADRACE_VENV=''
fi
HEADRACE_VENV=${HEADRACE_VENV-$HEADRACE_ROOT/.venv}
if [ -n "$HEADRACE_VENV" ]; then
    [ -f "$HEADRACE_VENV/bin/activate" ] || {
        echo "error: no virtual environment at $HEADRACE_VENV: create it, or export HEADRACE_VENV=PATH (or HEADRACE_VENV= )" >&2
        exit 2
    }
    # shellcheck source=/dev/null
    source "$HEADRACE_VENV/bin/activate"
fi

# The code of HEADRACE_ROOT runs, whatever the virtual environment has installed: that may be another clone. Without SAFEPATH
# python -m would look into the working directory first. An installed package has its code elsewhere, where it is found.
if [ -d "$HEADRACE_ROOT/headrace" ]; then
    export PYTHONPATH=$HEADRACE_ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
fi

# How Slurm's commands know this job: the id of the last element of an array is that of the whole array as well.
HEADRACE_JOB=${SLURM_JOB_ID:-}
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || HEADRACE_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# Without it every task starts one thread per core of the node, and the tasks oversubscribe the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# The same for the thread pool of the tokenizers library.
export RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-$OMP_NUM_THREADS}

# Since Slurm 22.05 srun no longer inherits --cpus-per-task from the job: without it a task is bound to a single core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}

# A killed process loses its output buffer, and with it the last lines, which name the cause.
export PYTHONUNBUFFERED=1

# NCCL prints nothing by default, not even the cause of a failure; WARN prints causes only.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Prints NAME=ADDRESS of nodes, one to a line: the addresses that Slurm itself reaches them at. $1: nodes as Slurm lists them.
headrace_addresses() {
    scontrol show node --oneliner "$1" | sed -n 's/^NodeName=\([^ ]*\) .* NodeAddr=\([^ ]*\) .*/\1=\2/p'
}

# Sets the network interface. A function, since it queries the controller, which the elements of a job array should not do.
headrace_interface() {
    # Gloo listens on the address that a node's own host name resolves to. On Debian that is 127.0.1.1, and the other
    # nodes then hang. Use the interface that has this node's address instead, the one that Slurm itself uses: host names
    # need not resolve on compute nodes. NCCL uses it for its bootstrap only: it finds InfiniBand by itself. '=' matches the
    # exact name, not a prefix.
    local address interface
    address=$(headrace_addresses "$SLURMD_NODENAME")
    address=${address#*=}
    interface=$(ip -oneline -4 address show to "$address" 2> /dev/null | awk '{print $2; exit}') || true
    [ -n "$interface" ] || return 0
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface}
}
