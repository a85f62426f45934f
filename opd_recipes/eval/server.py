"""``vllm serve`` on a checkpoint folder, for as long as questions are asked; stopped whatever happens."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from opd_recipes.registry import RecipeError

#: Lines of the server's log that a failure shows.
TAIL = 25
#: Seconds for an orderly end; then it is killed.
END_S = 30.0
#: vLLM on a machine without an accelerator (as in config/overlay/cpu.yaml). Variables that are set already stay.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
}
CPU_ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--skip-mm-profiling")

#: Files of a model, or of a training checkpoint, by suffix.
MODEL_FILES = {".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".pt", ".py"}
#: Bytes of a weight file that its digest reads, in pieces spread over the file.
PIECE, PIECES = 2**16, 32


def check_checkpoint(folder: Path) -> None:
    """Check that vLLM can load the folder.

    Raises:
        RecipeError: There is no such folder, it holds a training checkpoint, or no model.
    """
    if not folder.is_dir():
        raise RecipeError(
            f"--checkpoint {folder}: no such folder; name a local folder with a model in Hugging Face format"
        )
    if _weights(folder) and (folder / "config.json").exists():
        return
    shards = next(folder.rglob("model_world_size_*_rank_*.pt"), None)
    if shards is not None:
        raise RecipeError(
            f"--checkpoint {folder}: {shards.relative_to(folder)} is a shard of a training checkpoint, which vLLM cannot load; "
            f"export it first: opd_recipes export {shards.parent} --to FOLDER"
        )
    lacks = "config.json" if not (folder / "config.json").exists() else "weights (*.safetensors or *.bin)"
    raise RecipeError(f"--checkpoint {folder}: it has no {lacks}; name a folder with a model in Hugging Face format")


def checkpoint_digest(folder: Path) -> str:
    """Tells models apart that have the same name: all of the small files, and pieces of the weight files.

    Training changes every weight, so pieces show it, and 100 GB need not be read. What is no part of a model does not count.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in MODEL_FILES or not path.is_file() or path.name.startswith("."):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= PIECE * PIECES:
                digest.update(file.read())
                continue
            for number in range(PIECES):
                file.seek((size - PIECE) * number // (PIECES - 1))
                digest.update(file.read(PIECE))
    return digest.hexdigest()


def _weights(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.bin")]


@contextmanager
def serving(
    checkpoint: Path, model: str, log: Path, arguments: Sequence[str] = (), start_s: float = 1800.0
) -> Iterator[VllmServer]:
    """A server for ``checkpoint`` on a free local port, ready for requests; its output goes to ``log``.

    Args:
        model: The name under which it answers.
        arguments: Further arguments of ``vllm serve``.
        start_s: Seconds until it must be ready.

    Raises:
        RecipeError: vLLM is not installed, or the server ended or was not ready in time; with the last lines of its log.
    """
    server = VllmServer(checkpoint, model, log, arguments)
    try:
        server.start()
        server.wait(start_s)
        yield server
    finally:
        server.stop()


class VllmServer:
    """See :func:`serving`, which is how it is used."""

    def __init__(self, checkpoint: Path, model: str, log: Path, arguments: Sequence[str] = ()):
        self.checkpoint, self.model, self.log = checkpoint, model, log
        self._arguments = list(arguments)
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def command(self) -> list[str]:
        program = Path(sys.executable).parent / "vllm"
        if not program.exists():
            raise RecipeError(
                f"--checkpoint: {program} does not exist; install vLLM (pip install '.[gpu]' or make install), "
                "or name a running server with --server"
            )
        address = ["--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", self.model]
        on_cpu = CPU_ARGUMENTS if _is_cpu_build() else ()
        return [str(program), "serve", str(self.checkpoint), *address, *on_cpu, *self._arguments]

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        if _is_cpu_build():
            environment = {**CPU_ENVIRONMENT, **environment}
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches us alone, and we end all of its processes.
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not _healthy(self._port):
            if self.ended:
                raise RecipeError(self.told("vllm serve ended before it was ready"))
            if time.monotonic() > deadline:
                raise RecipeError(self.told(f"vllm serve was not ready within {seconds:.0f} s (--start-timeout)"))
            time.sleep(0.5)

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def told(self, what: str) -> str:
        """A message with the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL:] if self.log.exists() else []
        return "\n".join([f"{what}; the end of {self.log}:", *(f"  {line}" for line in lines)])

    def stop(self) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):  # what is left of its session, the engine for one
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_with_parent() -> None:
    """In the child: ask the kernel to end it when we are killed outright (Linux; elsewhere nothing)."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _is_cpu_build() -> bool:
    """As vLLM decides it: see :mod:`opd_recipes.backends.vllm_metadata`."""
    try:
        return version("vllm").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
