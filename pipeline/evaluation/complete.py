"""`python -m pipeline complete MODEL --prompt TEXT`: what a finished model writes.

Each token is drawn from the likeliest ones that together have `--top-p` of the probability (nucleus sampling: Holtzman
et al. 2020, arXiv:1904.09751). A small model that takes the likeliest token each time soon repeats itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError, DataError
from pipeline.evaluation.model_folder import ModelFolder

TEMPERATURE, TOP_P = 0.8, 0.95
"""What the command samples with unless told otherwise."""

_LARGEST_SEED = 2**32 - 1
"""transformers' `set_seed` seeds numpy, too, which takes 32 bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face model folder with its tokenizer, quantized or not"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to go on from")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, put to the model by its tokenizer's chat template; prints the answer",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens to add at most; default: %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"what logits are divided by before a token is drawn; 0 is --greedy; default: {TEMPERATURE}",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"draw from the likeliest tokens that have this probability together; 1: from all; default: {TOP_P}",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the sampling: the same draws the same; default: %(default)s",
    )
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token each time; nothing is drawn")


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and what the model adds to it; of a chat the answer alone.

    Raises:
        ConfigError: no tokens asked for, an empty prompt, numbers that nothing can be sampled with, --greedy beside
            them, or --chat for a tokenizer whose chat template is missing or fails.
        DataError: the folder is no model, or has no tokenizer.
    """
    if args.tokens < 1:
        raise ConfigError("--tokens", args.tokens, why="there is nothing to write", remedy="1 or more")
    if not args.prompt:
        raise ConfigError(
            "--prompt", args.prompt, why="a model goes on from at least one token", remedy="give some text"
        )
    temperature, top_p = _check_sampling(args)
    folder = ModelFolder.open(args.model)
    if not (folder.path / "tokenizer_config.json").is_file():
        raise DataError(
            f"{folder.path} has no tokenizer_config.json\n  try: export the model again, with its tokenizer"
        )
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": args.seed}
    print(complete(folder.path, args.prompt, tokens=args.tokens, chat=args.chat, **sampling))
    return 0


def complete(
    path: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = False,
) -> str:
    """The prompt and up to `tokens` more tokens of text; stops at the end-of-text token.

    Args:
        path: a model folder with its tokenizer.
        prompt: text, not empty.
        tokens: new tokens at most.
        temperature: 0 for the likeliest token each time, else logits are divided by it and sampled from.
        top_p: share of the probability, in (0, 1], that the likeliest tokens have which are sampled from.
        seed: of the sampling, 32 bits.
        chat: the prompt is a user's message; returns the answer alone.

    Raises:
        ConfigError: a chat, and the tokenizer has no chat template, or one that fails.
        DataError: as `load_model`.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415  (a refusal should not wait for it)

    # before the model, which takes longer: a missing template is found here
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = _chat_inputs(tokenizer, prompt, path) if chat else tokenizer(prompt, return_tensors="pt")

    import torch  # noqa: PLC0415
    from transformers import set_seed  # noqa: PLC0415

    from pipeline.evaluation.loading import load_model, pick_device  # noqa: PLC0415

    model = load_model(path, device=pick_device())
    taken = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    # top_k 0: all tokens count, where transformers' own default is the likeliest 50
    drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    sampling = drawn if temperature > 0 else {"do_sample": False}
    # the fallback silences a warning for tokenizers without padding: one prompt needs none
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    set_seed(seed)
    with torch.inference_mode():
        ids = model.generate(**taken, **sampling, max_new_tokens=tokens, pad_token_id=padding)[0]
    return str(tokenizer.decode(ids[taken["input_ids"].shape[1] :] if chat else ids, skip_special_tokens=True))


def _check_sampling(args: argparse.Namespace) -> tuple[float, float]:
    """Temperature and top-p; the temperature is 0 where the likeliest token is taken."""
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise ConfigError("--temperature", args.temperature, why="it divides the logits", remedy="0, or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        why = "it is a share of the probability, and of none nothing can be drawn"
        raise ConfigError("--top-p", args.top_p, why=why, remedy="above 0, and 1 at most")
    if not 0 <= args.seed <= _LARGEST_SEED:
        raise ConfigError("--seed", args.seed, why="it has 32 bits", remedy=f"0 to {_LARGEST_SEED}")
    if args.greedy and args.temperature:
        why = "--greedy takes the likeliest token each time: nothing is drawn"
        raise ConfigError("--temperature", args.temperature, why=why, remedy="leave one of the two out")
    if (args.greedy or args.temperature == 0) and args.top_p is not None:
        why = "without a temperature the likeliest token is taken each time: nothing is drawn"
        raise ConfigError("--top-p", args.top_p, why=why, remedy="leave it out, or sample with a temperature above 0")
    temperature = TEMPERATURE if args.temperature is None else args.temperature
    return (0.0 if args.greedy else temperature), (TOP_P if args.top_p is None else args.top_p)


def _chat_inputs(tokenizer: Any, message: str, path: Path) -> Any:
    """The ids of a conversation that begins with a user's message, up to where the assistant answers."""
    from jinja2 import TemplateError  # noqa: PLC0415

    if not tokenizer.chat_template:
        why = f"the tokenizer in {path} has no chat template, so it is not known how a message is put to this model"
        raise ConfigError("--chat", why=why, remedy="leave --chat out: the model goes on from the prompt as it is")
    conversation = [{"role": "user", "content": message}]
    try:
        return tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    except TemplateError as error:
        why = f"the chat template of {path} fails on a single message: {error}"
        raise ConfigError("--chat", why=why, remedy="mend the template, or leave --chat out") from None
