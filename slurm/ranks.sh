# shellcheck shell=bash
# Starts one agent on every node; together they keep the run going (docs/reference/agents.md). Sourced after env.sh, never run.

# Maximum number of restarts after a lost rank or node without a new checkpoint in between. Stop requests do not count.
HEADRACE_RESTARTS=${HEADRACE_RESTARTS:-20}

# Seconds in which all nodes of the job have to answer; training then starts on those that have.
HEADRACE_PATIENCE=${HEADRACE_PATIENCE:-120}

# Seconds of silence after which a node is taken for dead.
HEADRACE_DEAD=${HEADRACE_DEAD:-20}

# Fewest nodes with which the run goes on when others are lost.
HEADRACE_MIN_NODES=${HEADRACE_MIN_NODES:-1}

# Whether a job of one node is submitted for each node that is lost, which takes part when it starts; 0: no.
HEADRACE_REPLACE=${HEADRACE_REPLACE:-1}

# Whether the nodes are checked before a start, and bad ones left out (docs/how-to/bad-nodes.md); 0: no.
HEADRACE_NODE_CHECKS=${HEADRACE_NODE_CHECKS:-1}

# Stop request to this script alone (--signal=B:USR1, scancel --batch): all agents get it, and those that start later.
# Without the B, Slurm signals the agents themselves, which works also when this script is gone with its node.
HEADRACE_STOP_REQUESTED='' HEADRACE_STOP_FILE=''
headrace_request_stop() {
    HEADRACE_STOP_REQUESTED=yes
    [ -z "$HEADRACE_STOP_FILE" ] || { touch "$HEADRACE_STOP_FILE" && scancel --signal=USR1 "$HEADRACE_JOB"; } || true
}
trap headrace_request_stop USR1

# Runs a Python module as ranks on all nodes of the job. The agents start the ranks, start them again after a fault on the
# nodes that are left, and queue the job again after a stop request: none of it needs this script or its node.
# $1: ranks of each node; $2: the module, which clone and installed package both have; the rest: its --config and --set.
headrace_train() {
    local tasks=$1 module=$2 step run_dir records directory output wanted node agent code=1 why='' agents=()
    step=$(python -m pipeline check --progress "${@:3}") || return
    read -r step run_dir <<< "$step"
    [ -n "$run_dir" ] || { echo "error: the run's directory is not known: python -m pipeline check says nothing of it" >&2; return 2; }
    records=$run_dir/.agents directory=$run_dir/.agents/$HEADRACE_JOB.${SLURM_RESTART_COUNT:-0}
    mkdir -p "$directory"

    echo "$HEADRACE_JOB $step" >> "$records/starts"
    # A later start may have fewer nodes than the job was submitted for, and asks for the others.
    [ -f "$records/$HEADRACE_JOB.nodes" ] || echo "$SLURM_JOB_NUM_NODES" > "$records/$HEADRACE_JOB.nodes"
    read -r wanted < "$records/$HEADRACE_JOB.nodes"
    output=$(scontrol show job --oneliner "$HEADRACE_JOB" | sed -n '/.* StdOut=/{ s///; s/ [A-Z][A-Za-z]*=.*//; p; }')
    headrace_addresses "$SLURM_JOB_NODELIST" > "$directory/nodes.txt"

    local options=(--nodes "@$directory/nodes.txt" --directory "$directory" --tasks "$tasks" --least "$HEADRACE_MIN_NODES"
        --restarts "$HEADRACE_RESTARTS" --join "$HEADRACE_PATIENCE" --dead "$HEADRACE_DEAD" --wanted "$wanted"
        --slurm-job "$HEADRACE_JOB" --batch-host "$SLURMD_NODENAME")
    [ -z "$output" ] || options+=(--output "$output")
    [ "$HEADRACE_NODE_CHECKS" = 0 ] || options+=(--node-checks)
    [ "$HEADRACE_REPLACE" = 0 ] || options+=(--join-script "$HEADRACE_ROOT/slurm/join.sbatch")

    HEADRACE_STOP_FILE=$directory/stop
    [ -z "$HEADRACE_STOP_REQUESTED" ] || touch "$HEADRACE_STOP_FILE"
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        headrace_agent "$node" "$directory" "$tasks" "${options[@]}" "$module" "${@:3}" &
        agents+=($!)
    done
    for agent in "${agents[@]}"; do
        while kill -0 "$agent" 2> /dev/null; do # a signal interrupts wait
            wait "$agent" || true
        done
    done
    if [ -f "$directory/outcome" ]; then
        { read -r code && read -r why; } < "$directory/outcome" || true
    else
        tail -n 20 "$directory/$SLURMD_NODENAME.log" >&2 || true
        why="the agents ended without an outcome: their logs are in $directory"
    fi
    [ "$code" != 75 ] || scontrol requeue "$HEADRACE_JOB" || true # the agents have done it, or could not
    headrace_end "$code" "$why"
    return "$code"
}

# Keeps the agent of one node running until the run has an outcome, or the node is no longer one of the job's. A step for
# each node, with all of its cores: a step of all nodes ends with the return of one that had died. Each writes a file of
# its own: what goes through srun is lost when srun dies with this node, and the agents then go on.
# The step gets all GPUs of its node: by the job's own options, which srun would apply to this step of one task, it would
# get one (--gpus-per-task=1), or wait for those of all nodes on one (--gpus=32).
# $1: node; $2: directory of the agents; $3: ranks; the rest: arguments of the agent.
headrace_agent() {
    local node=$1 directory=$2 began listed short=0 stopped=() gpus=()
    [ -z "${SLURM_GPUS_ON_NODE:-}" ] || gpus=(--gpus-per-node="${SLURM_GPUS_PER_NODE:-$SLURM_GPUS_ON_NODE}")
    trap - USR1
    while [ ! -f "$directory/outcome" ] && [ "$short" -lt 3 ]; do
        began=$SECONDS
        [ ! -f "$directory/stop" ] || stopped=(--stopped)
        env --unset=SLURM_GPUS{,_PER_NODE,_PER_TASK,_PER_SOCKET} \
            --unset=SLURM_{GPU_BIND,CPUS_PER_GPU,NTASKS_PER_GPU,TRES_PER_TASK} \
            srun --nodelist="$node" --nodes=1 --ntasks=1 --ntasks-per-node=1 "${gpus[@]}" \
            --cpus-per-task=$(($3 * ${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_GPU:-1}})) --overlap --no-kill \
            --output="$directory/%N.log" --open-mode=append \
            python -m pipeline.cluster.elastic "${stopped[@]}" "${@:4}" || true
        [ $((SECONDS - began)) -ge 30 ] && short=0 || short=$((short + 1))
        if listed=$(squeue --noheader --jobs="$HEADRACE_JOB" --format=%N) && [ -n "$listed" ]; then # else the controller is away
            listed=$(scontrol show hostnames "$listed")
            [[ $'\n'$listed$'\n' == *$'\n'$node$'\n'* ]] || return 0
        fi
        [ -f "$directory/outcome" ] || sleep 5
    done
}

# Takes part in the run of another job as one more node. $@: the options of its agents, the module, and its arguments.
headrace_join() {
    local address
    address=$(headrace_addresses "$SLURMD_NODENAME")
    exec python -m pipeline.cluster.elastic --guest "${address#*=}" "$@"
}

# The last line of the log. $1: exit code; $2: the reason.
headrace_end() {
    [ "$1" = 0 ] || echo "job $HEADRACE_JOB: ended with code $1: $2"
}
