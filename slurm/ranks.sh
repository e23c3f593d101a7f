# shellcheck shell=bash
# How a job starts its ranks, starts them again, and comes back from the queue. Sourced after env.sh, never run.

# How often a job may start its processes again after it has lost a rank or a node, without a new checkpoint in between.
# Being asked to stop does not count.
HEADRACE_RESTARTS=${HEADRACE_RESTARTS:-20}

# Seconds to wait for Slurm to see that a node has failed, and to take it out of the job (its SlurmdTimeout, and some).
HEADRACE_PATIENCE=${HEADRACE_PATIENCE:-900}

# Asked to stop. With '--signal=B:' Slurm asks this script, at any time, and the script asks the step that runs; without
# the B it asks the steps that happen to run, once, which may be none.
HEADRACE_ASKED='' HEADRACE_STEP=''
headrace_asked() {
    HEADRACE_ASKED=yes
    [ -z "$HEADRACE_STEP" ] || kill -USR1 "$HEADRACE_STEP" 2> /dev/null || true
}
trap headrace_asked USR1

# Runs a script as tasks on all nodes of the job, as often as starting it again helps (docs/reference/exit-codes.md lists the codes):
# at once, on the nodes that are left, when a rank or a node was lost; by way of the queue when the job was asked to stop.
# $1: tasks per node; $2: the script; the rest: its --config and --set.
headrace_train() {
    local tasks=$1 script=$2 nodes code started=0 saved=0 now
    HEADRACE_CONFIG=("${@:3}")
    headrace_note_start
    while :; do
        headrace_answering
        nodes=${#HEADRACE_NODES[@]} code=0
        # The ranks end each other and say why; srun would kill them in the middle of it, and report only the kill. It ends
        # what is left a minute after the first one has gone.
        headrace_step --nodes="$nodes" --ntasks=$((nodes * tasks)) --ntasks-per-node="$tasks" --kill-on-bad-exit=0 --wait=60 \
            python "$script" "${HEADRACE_CONFIG[@]}" || code=$?
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

# srun, as a step that hears at once what this script is asked: bash keeps a signal for as long as it waits in the
# foreground. $@: options and the command.
headrace_step() {
    local code=0
    srun "$@" &
    HEADRACE_STEP=$!
    [ -z "$HEADRACE_ASKED" ] || kill -USR1 "$HEADRACE_STEP" # asked a moment ago
    wait "$HEADRACE_STEP" || true
    while kill -0 "$HEADRACE_STEP" 2> /dev/null; do # the signal has ended the waiting and not the step
        wait "$HEADRACE_STEP" || true
    done
    wait "$HEADRACE_STEP" || code=$? # bash remembers it
    HEADRACE_STEP=''
    return "$code"
}

# The step of the run's newest checkpoint, a blank, and the run's directory. Nothing when that cannot be told.
headrace_progress() {
    python -m pipeline check --progress "${HEADRACE_CONFIG[@]}" || true
}

# Notes in the run's directory where this start of the job begins.
headrace_note_start() {
    local step run_dir
    read -r step run_dir < <(headrace_progress) || return 0
    mkdir -p "$run_dir" && echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $step" >> "$run_dir/.slurm-starts" || true
}

# Whether this start of the job and two others have all begun where the run still is.
headrace_in_vain() {
    local step run_dir
    read -r step run_dir < <(headrace_progress) || return 1
    [ "$(grep -csx "$SLURM_JOB_ID [0-9]* $step" "$run_dir/.slurm-starts")" -ge 3 ]
}

# Puts the job back into the queue and ends the script; when that would go on for ever it is held there. $1: why.
headrace_requeue() {
    local how=requeue said="back into the queue"
    if headrace_in_vain; then
        how=requeuehold
        said="held, since 3 starts have not made a new checkpoint: raise --time or the 180 of --signal, then: scontrol release $SLURM_JOB_ID"
    fi
    echo "job $SLURM_JOB_ID: $1; $said"
    scontrol "$how" "$SLURM_JOB_ID" || echo "error: it could not be put back: submit it again, it goes on" >&2
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
        [ -z "$HEADRACE_ASKED" ] || headrace_requeue "it was asked to stop"
        headrace_nodes
        code=0
        headrace_step --label --nodes="${#HEADRACE_NODES[@]}" --ntasks="${#HEADRACE_NODES[@]}" --ntasks-per-node=1 hostname || code=$?
        [ "$code" != 138 ] || headrace_requeue "it was asked to stop"
        [ "$code" != 0 ] || [ -n "$HEADRACE_ASKED" ] || return 0
        [ "$SECONDS" -lt "$deadline" ] || headrace_requeue "not all of ${HEADRACE_NODES[*]} answer"
        [ "$code" = 0 ] || sleep 5
    done
}
