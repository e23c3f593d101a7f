"""The samples of a step that each replica runs, by decision of a quorum. Pure integers; no torch, no network.

The order of samples and the global batch are the run's own (laws 1 and 3). A quorum divides the samples of a step that
no living replica has run into contiguous ranges. Between two steps these are all samples; in the middle of a step, they
are the samples of a replica that has died. When no samples are left, gradients are exchanged.

An exchange may succeed on some replicas and fail on others, for example when a replica dies. Every successful exchange
gives a new *commit*: replicas with equal steps and commits have bit-identical weights, and report equal losses and
gradient norms. A replica that missed the last exchange gets its result, and makes the same update from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from foundation.errors import ConfigError, LostError
from pipeline.config.shares import largest_remainder
from pipeline.run.groups.islands.ledger import PlainReport, process_group

Ranges = tuple[tuple[int, int], ...]
"""(first, end) indices of samples in a step, ascending and disjoint."""


@dataclass(frozen=True)
class ReplicaMember:
    """Report of a replica that asks for a quorum.

    Attributes:
        step: number of steps that the replica has finished.
        exchanges: number of successful gradient exchanges in the run; exceeds steps if some steps were executed again.
        commit: name of the sequence of exchanges that led to its weights.
        before: the previous commit; None if the replica does not have the result of the last exchange.
        held: ranges of samples of its current step whose gradients it has summed.
        between: whether it is between two steps.
        group: its process group (`ReplicaDecision.group`); empty after a failure.
        living: whether it has been part of a quorum since it was started.
        waited: whether it has waited for the other replicas long enough at the start.
        layout: digest of everything that determines an update bit for bit: its config's curve and policies,
            its devices, and names, shapes and offsets of its shards on all ranks.
        state: digest of its last losses and gradient norms, and of the data that it skips.
    """

    name: str
    step: int
    exchanges: int
    commit: str
    before: str | None
    held: Ranges
    between: bool
    group: str
    living: bool
    waited: bool
    layout: str
    state: str = ""

    @property
    def place(self) -> tuple[int, str, str]:
        """Step, commit and state: equal for replicas with the same weights."""
        return self.step, self.commit, self.state

    def plain(self) -> PlainReport:
        """Converts the fields to JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: PlainReport) -> ReplicaMember:
        """Inverts `plain`."""
        return cls(**{**plain, "held": tuple((first, end) for first, end in plain["held"])})


@dataclass(frozen=True)
class ReplicaDecision:
    """Decision of a quorum on its replicas' next actions; every replica decides the same.

    Attributes:
        names: sorted names of the replicas that run the step; their indices are their ranks in the process group.
        source: replica whose state, or whose result of the last exchange, others take.
        late: replicas that missed the last exchange and take its result; if there are any, nothing else is done.
        healed: replicas that take the state of `source`.
        ahead: replicas just started from a checkpoint later than the step of `source`; they are refused.
        waiting: replicas that join in the middle of a step, and ask again.
        behind: living replicas that missed more than one exchange, or whose weights are not those of their commit.
        reset: replicas whose samples another replica has run, too; they drop their gradients.
        parts: replica -> samples of the step that it is to run now; no key without samples.
        group: name of the process group.
        formed: whether the members already have the group.
    """

    names: tuple[str, ...]
    source: str
    late: tuple[str, ...]
    healed: tuple[str, ...]
    ahead: tuple[str, ...]
    waiting: tuple[str, ...]
    behind: tuple[str, ...]
    reset: tuple[str, ...]
    parts: dict[str, Ranges]
    group: str
    formed: bool


def decide(members: Sequence[ReplicaMember], *, samples: int, quorum: int) -> ReplicaDecision:
    """Decides the next actions of a quorum: a pure function of its replicas' reports.

    Living replicas come before replicas just started. Then the most exchanges count (before the first quorum, the most
    steps), then the most replicas, then possession of the last exchange's result.

    Args:
        members: reports of the quorum's replicas, in any order; names are unique.
        samples: global batch size.
        quorum: number of this quorum, which names a process group.
    """
    members = sorted(members, key=lambda each: each.name)
    living = [each for each in members if each.living]
    sharing = Counter(each.place for each in members)

    def rank(each: ReplicaMember) -> tuple[int, ...]:
        done = (each.exchanges,) if living else (each.step, each.exchanges)
        return *done, sharing[each.place], each.before is not None

    best = max(living or members, key=rank)
    front = [each for each in living or members if each.place == best.place]
    late = [each for each in living if (each.commit, each.exchanges) == (best.before, best.exchanges - 1)]
    others = [each for each in members if each not in front and each not in late]
    behind = tuple(each.name for each in others if each.living)
    new = [each for each in others if not each.living]
    begins = not late and all(each.between and not each.held for each in front)
    healed = tuple(each.name for each in new if begins and each.step <= best.step)
    names = tuple(sorted([each.name for each in front] + list(healed)))
    held, reset = _disjoint(front)
    parts = {} if late else divide(_missing(held, samples), names)
    group, formed = process_group(() if healed or late else [each.group for each in front], names, quorum)
    return ReplicaDecision(
        names=names,
        source=best.name if best.name in names else names[0],
        late=tuple(each.name for each in late),
        healed=healed,
        ahead=tuple(each.name for each in new if begins and each.step > best.step),
        waiting=() if begins else tuple(each.name for each in new),
        behind=behind,
        reset=reset,
        parts=parts,
        group=group,
        formed=formed,
    )


def divide(ranges: Ranges, names: Sequence[str]) -> dict[str, Ranges]:
    """Divides samples equally over replicas, in contiguous ranges by order of names."""
    counts = largest_remainder([1] * len(names), count_of(ranges), least=0)
    left, parts = list(ranges), dict[str, Ranges]()
    for name, count in zip(names, counts, strict=True):
        own: list[tuple[int, int]] = []
        while count:
            first, end = left.pop(0)
            cut = min(end, first + count)
            own.append((first, cut))
            count -= cut - first  # noqa: PLW2901
            if cut < end:
                left.insert(0, (cut, end))
        if own:
            parts[name] = tuple(own)
    return parts


def count_of(ranges: Ranges) -> int:
    """Counts the samples in ranges."""
    return sum(end - first for first, end in ranges)


def joined(ranges: Ranges) -> Ranges:
    """Joins ranges: the same samples, ascending, in as few ranges as possible."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return tuple(found)


def compatible(members: Sequence[ReplicaMember]) -> tuple[ReplicaMember, ...]:
    """Returns members with the curve and layout of the first living member, or else of the first by name."""
    ordered = sorted(members, key=lambda each: (not each.living, each.name))
    return tuple(each for each in members if each.layout == ordered[0].layout)


def _disjoint(front: Sequence[ReplicaMember]) -> tuple[Ranges, tuple[str, ...]]:
    """Returns the held samples, each once, and the names of replicas that hold an already held sample.

    A slow replica may return after its samples were given to another replica that has not finished them.
    """
    held: list[tuple[int, int]] = []
    reset: list[str] = []
    for each in sorted(front, key=lambda each: (-count_of(each.held), each.name)):
        if any(first < end and begin < last for first, last in each.held for begin, end in held):
            reset.append(each.name)
        else:
            held += each.held
    return joined(tuple(held)), tuple(reset)


def _missing(held: Ranges, samples: int) -> Ranges:
    begins = [0, *(end for _, end in held)]
    ends = [*(first for first, _ in held), samples]
    return tuple((first, end) for first, end in zip(begins, ends, strict=True) if first < end)


def other_curve(me: ReplicaMember, members: Sequence[ReplicaMember]) -> ConfigError:
    """Makes the error of a replica whose updates would differ from the others'."""
    others = ", ".join(each.name for each in members)
    why = f"{others} train another curve than {me.name}, or split the model over their ranks in another way"
    remedy = (
        "the same config, engine, ZeRO stage, parallel and anomalies sections, number of processes, kind of device and"
        " version of torch on all"
    )
    return ConfigError("replicas", why=why, remedy=remedy)


def no_exchange(me: ReplicaMember, why: str, *, attempts: int, others: str) -> LostError:
    """Makes the error of a replica whose attempts to exchange have all failed."""
    return LostError(
        f"step {me.step + 1}: {attempts} exchanges of {me.name} have failed one after another; the others: {others}\n"
        f"  why: {why}\n  try: give every replica a name of its own and a replicas.bind that the others reach, let them"
        f" connect to it on all ports, and start it again"
    )


def left_behind(me: ReplicaMember, source: ReplicaMember) -> LostError:
    """Makes the error of a replica whose weights differ from the others'."""
    where, again = f"step {me.step + 1}", "start it again: it takes their state"
    if me.commit == source.commit:
        return LostError(
            f"{where}: {me.name} and {source.name} have made the same exchanges and have come to other losses or"
            f" gradient norms: their weights differ\n  try: {again}; the same devices and drivers on all replicas"
        )
    return LostError(
        f"{where}: the other replicas went on without {me.name} for more than one step\n"
        f"  try: {again}; a larger replicas.wait_s if it is only slower"
    )


def ahead(me: ReplicaMember, source: ReplicaMember) -> ConfigError:
    """Makes the error of a replica whose checkpoint is later than the step of the running replicas."""
    why = f"{me.name} has a checkpoint of step {me.step}, and the replicas that run are at step {source.step}"
    remedy = (
        f"to go on from step {me.step}, stop the others and start all together, with a replicas.start_s in which the"
        f" slowest has loaded its checkpoint; or remove the checkpoints of {me.name}, and it joins the others"
    )
    return ConfigError("replicas", why=why, remedy=remedy)
