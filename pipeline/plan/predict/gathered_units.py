"""The units of a rank whose weights are gathered together: embedding, decoder layers, head."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.predict.rank_time import RankTime


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """A unit of sharded weights.

    Attributes:
        name: "embedding", "layer 0" (the first of the rank), ..., "head".
        elements: number of its weights on this rank, before sharding; without experts that no other rank holds.
        forward_s, backward_s: seconds of a micro-batch's passes, with the communication for which they wait.
    """

    name: str
    elements: int
    forward_s: float
    backward_s: float


def units_of(rank: RankTime) -> list[GatheredUnit]:
    """The units of a rank in the order of the forward pass.

    The layers of a stage take equally long. A final norm counts with the head; a tied head with the embedding.
    """
    layout = rank.work.layout
    model = layout.rank if layout.run.topology.edp > 1 else layout.apart()[0].rank
    head = model.rest if not model.first else model.head if model.last and model.separate else 0
    embedding = [GatheredUnit("embedding", model.rest - head, 0.0, 0.0)] if model.first else []
    each = rank.inside / max(1, len(model.layers))
    seconds = [
        (stage.decoder.forward / stage.layers + each / 3, stage.decoder.backward / stage.layers + each * 2 / 3)
        for stage in rank.stages
        for _ in range(stage.layers)
    ]
    layers = [
        GatheredUnit(f"layer {number}", elements, *passes)
        for number, (elements, passes) in enumerate(zip(model.layers, seconds, strict=True))
    ]
    last = [stage.head for stage in rank.stages if stage.head.forward]
    heads = [GatheredUnit("head", head, part.forward, part.backward) for part in last]
    return [*embedding, *layers, *heads]
