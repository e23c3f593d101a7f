# shellcheck shell=bash
# Starts the ranks of a job, restarts them after a failure, and requeues the job. Sourced after env.sh, never run.

# Maximum number of restarts after a lost rank or node without a new checkpoint in between. Stop requests do not count.
HEADRACE_RESTARTS=${HEADRACE_RESTARTS:-20}

# Seconds to wait until Slurm detects a failed node and removes it from the job (longer than SlurmdTimeout).
HEADRACE_PATIENCE=${HEADRACE_PATIENCE:-900}

# Stop request. With '--signal=B:' Slurm sends USR1 to this script at any time, and the script forwards it to the running
# job step. Without the B Slurm signals the running job steps once, and there may be none at that moment.
HEADRACE_STOP_REQUESTED='' HEADRACE_STEP=''
headrace_request_stop() {
    HEADRACE_STOP_REQUESTED=yes
    [ -z "$HEADRACE_STEP" ] || kill -USR1 "$HEADRACE_STEP" 2> /dev/null || true
}
trap headrace_request_stop USR1

# Runs a Python module as tasks on all nodes of the job. After a lost rank or node it restarts the module at once on the
# remaining nodes; after a stop request it requeues the job (docs/reference/exit-codes.md lists the codes).
# $1: tasks per node; $2: the module, which clone and installed package both have; the rest: its --config and --set.
headrace_train() {
    local tasks=$1 module=$2 nodes code started=0 saved=0 now
    HEADRACE_CONFIG=("${@:3}")
    headrace_note_start
    while :; do
        headrace_check_nodes
        nodes=${#HEADRACE_NODES[@]} code=0
        # Ranks end each other and report the cause; srun would kill them before that and report only the kill. It kills
        # the remaining ranks one minute after the first exit.
        headrace_step --nodes="$nodes" --ntasks=$((nodes * tasks)) --ntasks-per-node="$tasks" --kill-on-bad-exit=0 --wait=60 \
            python -m "$module" "${HEADRACE_CONFIG[@]}" || code=$?
        case $code in
            0 | 130) return "$code" ;;
            75 | 138) headrace_requeue "stop requested" ;; # 138: killed by USR1 before the handler was installed
            76 | 253) ;;                                         # a rank was lost; 253: to the out-of-memory killer
            *)
                headrace_nodes
                # 128 and more: a rank was killed. A node that failed takes its ranks with it, whatever srun then says
                [ "$code" -ge 128 ] || { [ "$code" != 0 ] && [ "${#HEADRACE_NODES[@]}" -lt "$nodes" ]; } || return "$code"
                ;;
        esac
        now=$(headrace_progress)
        now=${now%% *}
        [ "${now:-0}" -le "$saved" ] || started=0 saved=$now
        if [ "$started" -ge "$HEADRACE_RESTARTS" ]; then
            echo "error: started again $started times after a loss, without a new checkpoint: look for the cause" \
                "(HEADRACE_RESTARTS=$HEADRACE_RESTARTS)" >&2
            return "$code"
        fi
        started=$((started + 1))
        echo "job $SLURM_JOB_ID: a rank or a node was lost (exit code $code); starting again"
    done
}

# Runs srun in the background, so that a stop request is forwarded at once: bash delays a trap while a foreground command
# runs. $@: options and the command.
headrace_step() {
    local code=0
    srun "$@" &
    HEADRACE_STEP=$!
    [ -z "$HEADRACE_STOP_REQUESTED" ] || kill -USR1 "$HEADRACE_STEP" # requested before srun was started
    wait "$HEADRACE_STEP" || true
    while kill -0 "$HEADRACE_STEP" 2> /dev/null; do # the signal interrupted wait, the step still runs
        wait "$HEADRACE_STEP" || true
    done
    wait "$HEADRACE_STEP" || code=$? # the exit code, which bash keeps
    HEADRACE_STEP=''
    return "$code"
}

# Prints the step of the newest checkpoint, a blank, and the run's directory; nothing when they cannot be determined.
headrace_progress() {
    python -m pipeline check --progress "${HEADRACE_CONFIG[@]}" || true
}

# Records in the run's directory the step at which this start of the job begins.
headrace_note_start() {
    local step run_dir
    read -r step run_dir < <(headrace_progress) || return 0
    mkdir -p "$run_dir" && echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $step" >> "$run_dir/.slurm-starts" || true
}

# Succeeds when this start of the job and two earlier ones began at the step where the run still is.
headrace_no_progress() {
    local step run_dir
    read -r step run_dir < <(headrace_progress) || return 1
    [ "$(grep -csx "$SLURM_JOB_ID [0-9]* $step" "$run_dir/.slurm-starts")" -ge 3 ]
}

# Requeues the job and ends the script; without progress in three starts the job is held instead. $1: why.
headrace_requeue() {
    local how=requeue said="back into the queue"
    if headrace_no_progress; then
        how=requeuehold
        said="held, since 3 starts have not made a new checkpoint: raise --time or the 180 of --signal, then: scontrol release $SLURM_JOB_ID"
    fi
    echo "job $SLURM_JOB_ID: $1; $said"
    scontrol "$how" "$SLURM_JOB_ID" || echo "error: the job could not be requeued: submit it again, it resumes" >&2
    exit 75
}

# Lists the current nodes of the job: with --no-kill Slurm removes failed ones. The query is repeated while the controller
# does not answer, since that must not be taken for lost nodes.
headrace_nodes() {
    local list
    until list=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && [ -n "$list" ]; do
        sleep 5
    done
    mapfile -t HEADRACE_NODES < <(scontrol show hostnames "$list")
}

# Runs hostname on every node before the first process group is created. Waits for a node that does not answer until Slurm
# removes it from the job or it comes back.
headrace_check_nodes() {
    local deadline=$((SECONDS + HEADRACE_PATIENCE)) code
    while :; do
        [ -z "$HEADRACE_STOP_REQUESTED" ] || headrace_requeue "stop requested"
        headrace_nodes
        code=0
        headrace_step --label --nodes="${#HEADRACE_NODES[@]}" --ntasks="${#HEADRACE_NODES[@]}" --ntasks-per-node=1 hostname || code=$?
        [ "$code" != 138 ] || headrace_requeue "stop requested"
        [ "$code" != 0 ] || [ -n "$HEADRACE_STOP_REQUESTED" ] || return 0
        [ "$SECONDS" -lt "$deadline" ] || headrace_requeue "not all of ${HEADRACE_NODES[*]} answer"
        [ "$code" = 0 ] || sleep 5
    done
}
