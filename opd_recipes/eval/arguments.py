"""The options that say who is asked and how; ``eval`` and ``gap`` share them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from data_prep.rows import positive
from data_prep.synthesize.client import Retry
from data_prep.synthesize.options import above_zero, json_object
from opd_recipes.eval.asking import THINKING_TOKENS, Settings
from opd_recipes.eval.judging import Judge
from opd_recipes.eval.runner import Endpoint
from opd_recipes.registry import RecipeError

#: Defaults of ``--timeout``: 16k tokens of thought take minutes on a busy server.
TIMEOUT_S, THINKING_TIMEOUT_S = 300.0, 1800.0


def add_asking(parser: argparse.ArgumentParser) -> None:
    """What does not depend on whether a server or a checkpoint answers."""
    add = parser.add_argument_group("how it is asked (greedy, with a fixed seed)").add_argument
    add("--limit", type=positive, metavar="N", help="only the first N questions of each")
    add("--thinking", action="store_true", help="let the model think first (default: the chat template is told not to)")
    add(
        "--max-tokens",
        type=positive,
        metavar="N",
        help=f"longest reply (default: the benchmark's; {THINKING_TOKENS} with --thinking)",
    )
    add("--seed", type=int, default=0, help="sent with every request (default: %(default)s)")
    add("--concurrency", type=positive, default=16, metavar="N", help="questions at one time (default: %(default)s)")
    add(
        "--timeout",
        type=above_zero,
        metavar="S",
        help=f"seconds for one try of a question (default: {TIMEOUT_S:.0f}; {THINKING_TIMEOUT_S:.0f} with --thinking)",
    )
    add(
        "--attempts",
        type=positive,
        default=4,
        metavar="N",
        help="tries of a question before it counts as failed (default: %(default)s)",
    )
    add(
        "--max-wait",
        type=above_zero,
        default=60.0,
        metavar="S",
        help="most seconds between two tries (default: %(default)s)",
    )
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="""more fields of each request; null leaves one of ours out, e.g. '{"chat_template_kwargs": null}'""",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a running server").add_argument
    add("--server", metavar="URL", help="OpenAI-compatible server, e.g. http://localhost:8000/v1")
    add("--model", metavar="NAME", help="the model's name on the server")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the server's key")


def add_serving(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--serve-args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="more arguments of vllm serve, after an equals sign: --serve-args='--tensor-parallel-size 2'",
    )
    group.add_argument(
        "--start-timeout",
        type=above_zero,
        default=1800.0,
        metavar="S",
        help="seconds until it must be ready (default: %(default)s)",
    )


def add_judge(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "a judge for short answers and undecided replies (a second score beside the rules')"
    ).add_argument
    add("--judge-server", metavar="URL", help="OpenAI-compatible server")
    add("--judge-model", metavar="NAME", help="the judge's name on it")
    add("--judge-api-key-env", metavar="NAME", help="environment variable that holds its key")


def judge_of(args: argparse.Namespace) -> Judge | None:
    """The judge, where one is named.

    Raises:
        RecipeError, DataError: Half of it is named, or the address is none.
    """
    if args.judge_server is None and args.judge_model is None:
        return None
    if args.judge_server is None or args.judge_model is None:
        raise RecipeError("a judge needs both --judge-server URL and --judge-model NAME")
    retry = Retry(attempts=args.attempts, longest=args.max_wait, timeout=args.timeout or TIMEOUT_S)
    judge = Judge(args.judge_server, args.judge_model, args.judge_api_key_env, retry, args.concurrency)
    judge.server()  # says what is wrong now, not when all has been asked
    return judge


def endpoint_of(args: argparse.Namespace, log: Path, checkpoint: Path | None) -> Endpoint:
    """Who answers: ``checkpoint``, or the server of ``args``.

    Raises:
        RecipeError: Neither or both are named, or the model's name is missing.
    """
    if (checkpoint is None) == (args.server is None):
        raise RecipeError("name who answers: either --server URL and --model NAME, or --checkpoint FOLDER")
    if checkpoint is None and args.model is None:
        raise RecipeError("--server needs --model: the name under which it knows the model")
    if checkpoint is not None and args.api_key_env:
        raise RecipeError("--api-key-env is for --server; a checkpoint is served without a key")
    timeout = THINKING_TIMEOUT_S if args.thinking else TIMEOUT_S
    return Endpoint(
        model=args.model or _name(checkpoint),
        url=args.server,
        checkpoint=checkpoint,
        log=log,
        key_variable=args.api_key_env,
        retry=Retry(attempts=args.attempts, longest=args.max_wait, timeout=args.timeout or timeout),
        concurrency=args.concurrency,
        serve_arguments=args.serve_args,
        start_s=args.start_timeout,
    )


def settings_of(args: argparse.Namespace, model: str, weights: str | None, max_tokens: int) -> Settings:
    """What the replies depend on.

    Args:
        model: Its name for the server.
        weights: :func:`~opd_recipes.eval.server.checkpoint_digest` of a checkpoint.
        max_tokens: The benchmark's own limit.
    """
    default = max(max_tokens, THINKING_TOKENS) if args.thinking else max_tokens
    return Settings(
        model=model,
        max_tokens=args.max_tokens or default,
        thinking=args.thinking,
        seed=args.seed,
        extra=args.extra_body,
        weights=weights,
    )


def _name(checkpoint: Path | None) -> str:
    assert checkpoint is not None
    return checkpoint.resolve().name
