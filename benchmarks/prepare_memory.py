"""Peak memory and time of ``python -m data_prep pairs`` against the number of rows: memory must not grow with the images.

    python benchmarks/prepare_memory.py --out docs/results [--rows 1000 10000 100000]

Each size is a process of its own, on synthetic pairs whose images differ (48 px PNG as data URLs). Writes
``prepare_memory.json`` and ``prepare_memory.md``.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from tqdm import tqdm

SIDE = 48


def write_pairs(path: Path, rows: int) -> None:
    generator = random.Random(0)
    with path.open("w") as file:
        for i in tqdm(range(rows), desc="writing pairs", unit="row"):
            buffer = io.BytesIO()
            Image.frombytes("RGB", (SIDE, SIDE), generator.randbytes(SIDE * SIDE * 3)).save(buffer, "PNG")
            url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
            file.write(json.dumps({"question": f"What is in picture {i}?", "answer": str(i), "image": url}) + "\n")


def measure(rows: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pairs.jsonl"
        write_pairs(source, rows)
        command = [sys.executable, "-m", "data_prep", "pairs", "--source", str(source), "--out", f"{folder}/out"]
        began = time.time()
        # One child at a time, so that the largest of the children so far is this one or a smaller size's.
        subprocess.run(command, check=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        megabytes = source.stat().st_size / 2**20
    return {
        "rows": rows,
        "source_mb": round(megabytes),
        "peak_mb": round(peak),
        "seconds": round(time.time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results = [measure(rows) for rows in sorted(args.rows)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "prepare_memory.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = ["# Memory of preparing rows", "", f"`python benchmarks/prepare_memory.py`, images of {SIDE} px.", ""]
    lines += ["| rows | source MB | peak memory MB | seconds |", "|---|---|---|---|"]
    lines += [f"| {r['rows']} | {r['source_mb']} | {r['peak_mb']} | {r['seconds']} |" for r in results]
    (args.out / "prepare_memory.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
