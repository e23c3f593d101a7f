"""`python -m pipeline complete MODEL --prompt TEXT`: what a finished model writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.base.errors import ConfigError, DataError
from pipeline.evaluation.model_folder import ModelFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face model folder with its tokenizer, quantized or not"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to go on from")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens to add at most; default: %(default)s"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token each time (default)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling when the temperature is above 0")


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and what the model adds to it.

    Raises:
        ConfigError: no tokens asked for, a negative temperature, an empty prompt.
        DataError: the folder is no model, or has no tokenizer.
    """
    if args.tokens < 1:
        raise ConfigError("--tokens", args.tokens, why="there is nothing to write", remedy="1 or more")
    if args.temperature < 0:
        raise ConfigError("--temperature", args.temperature, why="it divides the logits", remedy="0, or more")
    if not args.prompt:
        raise ConfigError(
            "--prompt", args.prompt, why="a model goes on from at least one token", remedy="give some text"
        )
    folder = ModelFolder.open(args.model)
    if not (folder.path / "tokenizer_config.json").is_file():
        raise DataError(
            f"{folder.path} has no tokenizer_config.json\n  try: export the model again, with its tokenizer"
        )
    print(complete(folder.path, args.prompt, tokens=args.tokens, temperature=args.temperature, seed=args.seed))
    return 0


def complete(path: Path, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """The prompt and up to `tokens` more tokens of text; stops at the end-of-text token.

    Args:
        path: a model folder with its tokenizer.
        prompt: text, not empty.
        tokens: new tokens at most.
        temperature: 0 for the likeliest token each time, else logits are divided by it and sampled from.
        seed: of the sampling.

    Raises:
        DataError: as `load_model`.
    """
    import torch  # noqa: PLC0415  (a refusal should not wait for it)
    from transformers import AutoTokenizer  # noqa: PLC0415

    from pipeline.evaluation.loading import load_model, pick_device  # noqa: PLC0415

    model = load_model(path, device=pick_device())
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        # the fallback silences a warning for tokenizers without padding: one prompt needs none
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ids = model.generate(**inputs, **sampling, max_new_tokens=tokens, pad_token_id=padding)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
