"""Schema of `model.base`: the sizes of the model at which learning rate and initialization were tuned."""

from __future__ import annotations

from pydantic import Field

from foundation.section import Count, Section


class BaseModelSection(Section):
    """Sizes of the base model of a CompleteP parametrization; those that are not given are the model's own."""

    hidden_size: Count | None = Field(None, description="Width of the base model, e.g. 256; the model's when absent")
    intermediate_size: Count | None = Field(
        None, description="MLP width of the base model, e.g. 1024; the model's when absent"
    )
    num_hidden_layers: Count | None = Field(
        None, description="Decoder layers of the base model, e.g. 4; the model's when absent"
    )
    num_attention_heads: Count | None = Field(
        None,
        description="Attention heads of the base model, e.g. 4: the head size has to be the model's, so that heads"
        " grow with the width; the model's when absent",
    )
    num_key_value_heads: Count | None = Field(
        None,
        description="Key/value heads of the base model, e.g. 2: the query heads per key/value head have to be the"
        " model's; the model's when absent",
    )
