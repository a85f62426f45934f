"""``python -m benchmarks``: what the streamed head, the single pass and the selection save, against the plain way."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import growth, head, model, report
from benchmarks.head import Size
from benchmarks.measure import ratios, spread

#: The vocabularies of Qwen3-VL and of Qwen3.5.
VOCABULARIES = (151_936, 248_320)

PARTS = ("head", "growth", "model", "updates")

#: What the plain way holds at its peak, in fp32 numbers per token and word: log-probabilities, gradient, gradient of logits.
PLAIN_COPIES = 3.3


def say(line: str) -> None:
    print(f"== {line}", file=sys.stderr, flush=True)


def available(device: str) -> float:
    """Bytes that a measurement may take."""
    if device == "cuda":
        return 0.9 * torch.cuda.mem_get_info()[0]
    import psutil

    return 0.9 * psutil.virtual_memory().available


def fitting(size: Size, device: str) -> Size:
    """``size``, or the same proportion of prompt and response with as many tokens as the plain way has memory for."""
    needed = PLAIN_COPIES * 4 * size.vocabulary * (size.prompt + size.response) + 16 * size.vocabulary * size.hidden
    while needed > available(device):
        size = replace(size, prompt=size.prompt // 2, response=size.response // 2)
        needed /= 2
        say(f"too little memory for the plain way: {size.prompt} + {size.response} tokens instead")
    return size


def head_rows(args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory and time of head and loss, for each vocabulary; the first one is the headline."""
    memory, time = {}, {}
    for vocabulary in VOCABULARIES if not args.quick else (2048, 4096):
        prompt, response = (128, 32) if args.quick else (4096, 1024)
        hidden = args.hidden if not args.quick else 64
        whole = Size(vocabulary, prompt, response, hidden, dtype=args.dtype, device=args.device)
        whole = fitting(replace(whole, chunk=8) if args.quick else whole, args.device)
        say(f"peak memory of head and loss, vocabulary {vocabulary}")
        peaks = {side: head.peak(side, whole) for side in head.SIDES}
        memory[str(vocabulary)] = {**spread([peaks["plain"] / peaks["ours"]]), "bytes": peaks, "inputs": asdict(whole)}
        # On a CPU a quarter of the tokens takes a quarter of the time; the ratio is the same.
        part = (
            whole if args.device == "cuda" else replace(whole, prompt=whole.prompt // 4, response=whole.response // 4)
        )
        say(f"time of head and loss, vocabulary {vocabulary}")
        seconds = head.seconds(part, args.repeats)
        time[str(vocabulary)] = {
            **spread(ratios(seconds["plain"], seconds["ours"])),
            "seconds": seconds,
            "inputs": asdict(part),
        }
    first = next(iter(memory))
    return {
        "head_memory_ratio": {**memory[first], "vocabularies": memory},
        "head_time_ratio": {**time[first], "vocabularies": time},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for benchmarks.json and .md")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of hidden states and heads"
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the rows about the head")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all but 'model', on a GPU all but 'updates'")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that the command works")
    args = parser.parse_args()
    args.only = args.only or [part for part in PARTS if part != ("updates" if args.device == "cuda" else "model")]
    results: dict[str, Any] = {}
    if "head" in args.only:
        results |= head_rows(args)
    if "growth" in args.only:
        smallest = Size(37_984, 1024, 256, args.hidden, topk=10, dtype=args.dtype, device=args.device)
        if args.quick:
            smallest = replace(smallest, vocabulary=2048, prompt=64, response=32, hidden=32, chunk=8)
        results["growth"] = growth.measure(smallest, 1, say)
    if "model" in args.only:
        results |= model_rows(args)
    if "updates" in args.only:
        results |= update_rows(args)
    report.write(args.out, results, sys.argv[1:], args)
    print(report.table(results))
    if args.quick:
        print("\n--quick: sizes at which nothing is saved; the ratios mean nothing")


def model_rows(args: argparse.Namespace) -> dict[str, Any]:
    """A model with head and loss, without verl."""
    case = model.TINY if args.quick else model.LARGE if args.device == "cuda" else model.SMALL
    found = model.measure(replace(case, dtype=args.dtype, device=args.device), args.repeats, say)
    peaks, seconds, given = found["bytes"], found["seconds"], found["inputs"]
    return {
        "model_memory_ratio": {**spread([peaks["plain"] / peaks["ours"]]), "bytes": peaks, "inputs": given},
        "model_time_ratio": {**spread(ratios(seconds["plain"], seconds["ours"])), "seconds": seconds, "inputs": given},
    }


def update_rows(args: argparse.Namespace) -> dict[str, Any]:
    if args.device == "cuda":
        say("whole updates are left out: they need verl, in its CPU configuration (--device cpu); 'model' does not")
        return {}
    from benchmarks import updates

    return updates.measure(args.quick, args.repeats, say)


if __name__ == "__main__":
    main()
