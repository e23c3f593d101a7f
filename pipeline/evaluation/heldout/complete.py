"""`python -m pipeline complete MODEL --prompt TEXT`: text generation with a trained model.

Nucleus sampling: each token is sampled from the most likely ones that together have `--top-p` of the probability
(Holtzman et al. 2020, arXiv:1904.09751). With greedy decoding a small model soon repeats itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError, DataError
from foundation.paths import FOLDER
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.tokenizer_files import load_tokenizer

TEMPERATURE, TOP_P = 0.8, 0.95
"""Defaults of the sampling, in the command, in the report and in Python."""

_LARGEST_SEED = 2**32 - 1
"""Largest seed: transformers' `set_seed` also seeds numpy, which takes 32 bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", type=FOLDER, help="a Hugging Face model folder with its tokenizer, quantized or not"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="format the prompt as a user message with the tokenizer's chat template; print the reply alone",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="maximum number of new tokens; default: %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"sampling temperature: logits are divided by it; 0 is --greedy; default: {TEMPERATURE}",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"nucleus sampling: sample from the most likely tokens with this total probability; default: {TOP_P}",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of the sampling; default: %(default)s",
    )
    parser.add_argument("--greedy", action="store_true", help="greedy decoding: take the most likely token each time")


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and its completion, or with --chat only the reply.

    Raises:
        ConfigError: no new tokens, an empty prompt, invalid sampling parameters, --greedy together with them, or --chat
            with a tokenizer whose chat template is missing or fails.
        DataError: the folder holds no model, or no tokenizer.
    """
    if args.tokens < 1:
        raise ConfigError("--tokens", args.tokens, why="it is not 1 or more", remedy="use 1 or more")
    if not args.prompt:
        raise ConfigError("--prompt", args.prompt, why="generation needs at least one token", remedy="give some text")
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
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
    chat: bool = False,
) -> str:
    """Generates text: the prompt and up to `tokens` new tokens; stops at the end-of-text token, with `chat` also at the
    end of the assistant's turn.

    Args:
        path: a model folder with its tokenizer.
        prompt: text, not empty.
        tokens: maximum number of new tokens.
        temperature: 0 for greedy decoding; else logits are divided by it before sampling.
        top_p: nucleus sampling: total probability, in (0, 1], of the tokens that are sampled from.
        seed: seed of the sampling, 32 bits.
        chat: whether to format the prompt as a user message with the chat template and return only the reply.

    Raises:
        ConfigError: with `chat`, the tokenizer has no chat template, or one that fails.
        DataError: the folder holds no model, or no tokenizer.
    """
    # before the model, which takes longer to load: a missing template is refused early
    tokenizer = load_tokenizer(path)
    inputs = _chat_inputs(tokenizer, prompt, path) if chat else tokenizer(prompt, return_tensors="pt")

    import torch  # noqa: PLC0415
    from transformers import set_seed  # noqa: PLC0415

    from pipeline.models.folder.loading import load_model, pick_device  # noqa: PLC0415

    model = load_model(path, device=pick_device())
    model_inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    # top_k 0: no limit, where transformers' default is 50
    sampled = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    sampling = sampled if temperature > 0 else {"do_sample": False}
    # the fallback avoids a warning: a single prompt needs no padding token
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = _end_tokens(tokenizer, model.generation_config.eos_token_id) if chat else None
    stopping = {"eos_token_id": ends} if ends else {}
    set_seed(seed)
    with torch.inference_mode():
        ids = model.generate(**model_inputs, **sampling, **stopping, max_new_tokens=tokens, pad_token_id=padding)[0]
    return str(tokenizer.decode(ids[model_inputs["input_ids"].shape[1] :] if chat else ids, skip_special_tokens=True))


def _end_tokens(tokenizer: Any, eos: int | Sequence[int] | None) -> list[int]:
    """Token ids that end a reply: the model's EOS, and the token that the chat template writes after a reply.

    The template's token may differ from EOS: Llama 3 ends turns with <|eot_id|>, Gemma with <end_of_turn>.
    """
    from jinja2 import TemplateError  # noqa: PLC0415

    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    reply = "REPLY"
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    try:
        after = tokenizer.apply_chat_template(talk, tokenize=False).rpartition(reply)[2]
    except TemplateError:  # the template wants other roles
        return ends
    first = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"][:1]
    return ends + [token for token in first if token in tokenizer.added_tokens_decoder and token not in ends]


def _check_sampling(args: argparse.Namespace) -> tuple[float, float]:
    """Checks and returns temperature and top-p; temperature 0 means greedy decoding."""
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise ConfigError("--temperature", args.temperature, why="it divides the logits", remedy="use 0 or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        why = "a total probability is above 0, and at most 1"
        raise ConfigError("--top-p", args.top_p, why=why, remedy="use a number above 0, at most 1")
    if not 0 <= args.seed <= _LARGEST_SEED:
        raise ConfigError("--seed", args.seed, why="it has 32 bits", remedy=f"use 0 to {_LARGEST_SEED}")
    if args.greedy and args.temperature:
        why = "--greedy takes the most likely token each time, without sampling"
        raise ConfigError("--temperature", args.temperature, why=why, remedy="leave one of the two out")
    if (args.greedy or args.temperature == 0) and args.top_p is not None:
        why = "with temperature 0 the most likely token is taken each time, without sampling"
        raise ConfigError("--top-p", args.top_p, why=why, remedy="leave it out, or sample with a temperature above 0")
    temperature = TEMPERATURE if args.temperature is None else args.temperature
    return (0.0 if args.greedy else temperature), (TOP_P if args.top_p is None else args.top_p)


def _chat_inputs(tokenizer: Any, message: str, path: Path) -> Any:
    """Token ids of a conversation with one user message, up to where the assistant's reply begins."""
    from jinja2 import TemplateError  # noqa: PLC0415

    if not tokenizer.chat_template:
        why = f"the tokenizer in {path} has no chat template"
        raise ConfigError("--chat", why=why, remedy="leave --chat out: the model continues the prompt as plain text")
    conversation = [{"role": "user", "content": message}]
    try:
        return tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    except TemplateError as error:
        why = f"the chat template of {path} fails on a single message: {error}"
        raise ConfigError("--chat", why=why, remedy="fix the template, or leave --chat out") from None
