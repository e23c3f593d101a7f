# shellcheck shell=bash
# What the job scripts of this directory share. Sourced, never run.
# Any variable below can be exported before `sbatch`: a value that is set already is kept.

# Slurm runs a copy of the job script from a spool directory, so only this file knows where the repository is.
HEADRACE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export HEADRACE_ROOT

# The Python environment; it must be on a file system that all nodes see. Set it to the empty string to use the python
# that is on PATH already (modules, conda, containers).
HEADRACE_VENV=${HEADRACE_VENV-$HEADRACE_ROOT/.venv}
if [ -n "$HEADRACE_VENV" ]; then
    [ -f "$HEADRACE_VENV/bin/activate" ] || {
        echo "error: no virtual environment at $HEADRACE_VENV: create it, or export HEADRACE_VENV=PATH (or HEADRACE_VENV= )" >&2
        exit 2
    }
    # shellcheck source=/dev/null
    source "$HEADRACE_VENV/bin/activate"
fi

# Without it every task starts one thread per core of the whole node, and eight tasks fight for the same cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# The same for the threads of the tokenizers library, which come from another pool.
export RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-$OMP_NUM_THREADS}

# Since Slurm 22.05 srun no longer inherits --cpus-per-task from the job: without it a task is bound to a single core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}

# A job that is killed keeps what Python has in its buffer: the last lines are the ones that say why.
export PYTHONUNBUFFERED=1

# NCCL is silent by default, also about the reason of a failure; WARN prints reasons and nothing else.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Where the processes of a job meet: MASTER_ADDR, MASTER_PORT, and the network interface to talk through.
# A function, because it asks the controller: the thousand elements of an array should not.
headrace_rendezvous() {
    # The first node, by the address that Slurm itself reaches it at: host names need not resolve on compute nodes.
    # read, not head: head would close the pipe early, and a long node list would then fail under pipefail.
    local first interface
    read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')}

    # From the job id, so that two jobs on one node do not collide; below 32768, where Linux takes ports at random.
    export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}

    # Gloo listens on the address that a node's own host name resolves to. On Debian that is 127.0.1.1, and the other
    # nodes then wait for ever. Take the interface that carries MASTER_ADDR instead. NCCL is told the same for its
    # first contact only: it finds InfiniBand by itself. '=' asks for the exact name, not for a prefix.
    interface=$(ip -oneline -4 address show to "$MASTER_ADDR" 2>/dev/null | awk '{print $2; exit}') || true
    [ -n "$interface" ] || return 0
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface}
}

# How often a job may start its processes again after it has lost a rank or a node; being asked to stop does not count.
HEADRACE_RESTARTS=${HEADRACE_RESTARTS:-20}

# Seconds to wait for Slurm to see that a node has failed, and to take it out of the job (its SlurmdTimeout, and some).
HEADRACE_PATIENCE=${HEADRACE_PATIENCE:-900}

# Runs a command as tasks on all nodes of the job, as often as starting it again helps (docs/faults.md lists the codes):
# at once, on the nodes that are left, when a rank or a node was lost; by way of the queue when the job was asked to stop.
# $1: tasks per node; the rest: the command.
headrace_train() {
    local tasks=$1 nodes code started
    shift
    for ((started = 0; ; started++)); do
        headrace_answering
        nodes=${#HEADRACE_NODES[@]} code=0
        # The ranks end each other and say why; srun would kill them in the middle of it, and report only the kill. It ends
        # what is left a minute after the first one has gone.
        srun --nodes="$nodes" --ntasks=$((nodes * tasks)) --ntasks-per-node="$tasks" --kill-on-bad-exit=0 --wait=60 "$@" || code=$?
        case $code in
            0 | 130) return "$code" ;;
            75 | 138) headrace_requeue "it was asked to stop" ;; # 138: before it could note the signal
            76 | 253) ;;                                         # a rank was lost; 253: to the out-of-memory killer
            *)
                headrace_nodes
                # 128 and more: a rank was killed. A node that failed takes its ranks with it, whatever srun then says
                [ "$code" -ge 128 ] || { [ "$code" != 0 ] && [ "${#HEADRACE_NODES[@]}" -lt "$nodes" ]; } || return "$code"
                ;;
        esac
        if [ "$started" -ge "$HEADRACE_RESTARTS" ]; then
            echo "error: started again $started times after a loss: look for the cause (HEADRACE_RESTARTS=$HEADRACE_RESTARTS)" >&2
            return "$code"
        fi
        echo "job $SLURM_JOB_ID: a rank or a node was lost (exit code $code); starting again"
    done
}

# Puts the job back into the queue and ends the script. $1: why.
headrace_requeue() {
    echo "job $SLURM_JOB_ID: $1; back into the queue"
    scontrol requeue "$SLURM_JOB_ID" || echo "error: it could not be put back: submit it again, it goes on" >&2
    exit 75
}

# The nodes that the job has now: with --no-kill Slurm takes a failed one out of it. A controller that does not answer is
# asked again: it must not look like nodes that are gone.
headrace_nodes() {
    local list
    until list=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && [ -n "$list" ]; do
        sleep 5
    done
    mapfile -t HEADRACE_NODES < <(scontrol show hostnames "$list")
}

# Has every node of the job say its name, before the first process group waits for all of them. One that does not answer
# is waited for until Slurm takes it out of the job or it comes back.
headrace_answering() {
    local deadline=$((SECONDS + HEADRACE_PATIENCE)) code
    while :; do
        headrace_nodes
        code=0
        srun --label --nodes="${#HEADRACE_NODES[@]}" --ntasks="${#HEADRACE_NODES[@]}" --ntasks-per-node=1 hostname || code=$?
        [ "$code" != 0 ] || return 0
        [ "$code" != 138 ] || headrace_requeue "it was asked to stop"
        [ "$SECONDS" -lt "$deadline" ] || headrace_requeue "not all of ${HEADRACE_NODES[*]} answer"
        sleep 5
    done
}
