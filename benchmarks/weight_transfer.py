"""Seconds of a weight update to a vLLM server on the same GPU: CUDA IPC against a file.

    python benchmarks/weight_transfer.py --out OUT                          LLaMA-3.1-8B's shape on one GPU
    python benchmarks/weight_transfer.py --shape tiny --out OUT             without a GPU: the file alone

Starts vLLM's own server with random weights and the IPC backend, makes a model of the same shape with other random
weights in this process, and updates the server's weights several times. After each update the engine samples tokens and
the model scores them, as in training; the run fails if they differ. Each result is printed and appended to
OUT/weight_transfer.jsonl at once. vLLM 0.25's IPC backend imports ray but does not use it over HTTP. Where ray is not
installed, the server gets a module of that name without its functions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.servers.vllm import VllmServerEngine
from sortedrl.learner.models import response_logprobs
from sortedrl.studies.measurements import machine, random_prompts

HERE = Path(__file__).parent
SHAPES = {"8b": "llama-3.1-8b", "1.5b": "qwen2.5-1.5b", "tiny": "tiny"}
SLOTS = 8
START_SECONDS = 400.0
MARGIN = 1.2  # free space for a file of weights, as a multiple of its size


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--handle-updates", type=int, default=4, help="by CUDA IPC")
    parser.add_argument("--file-updates", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("h200"))
    return parser.parse_args()


def command(folder: Path, port: int, on_gpu: bool) -> list[str]:
    parts = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    parts += ["--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port), "--tokens-only"]
    parts += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", str(SLOTS), "--max-model-len", "1024"]
    parts += ["--enforce-eager", "--weight-transfer-config", '{"backend": "ipc"}']
    if on_gpu:
        return [*parts, "--dtype", "bfloat16", "--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", str(2**31)]
    return [*parts, "--dtype", "float32", "--gpu-memory-utilization", "0.3"]  # of the CPU's memory


@contextmanager
def serving(folder: Path, log: Path, on_gpu: bool) -> Iterator[str]:
    """The server's address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"} | os.environ
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if find_spec("ray") is None:
        modules = Path(tempfile.mkdtemp())
        (modules / "ray").mkdir()
        (modules / "ray" / "__init__.py").write_text("def is_initialized():\n    return False\n")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), str(modules)]))
    with log.open("w") as out:
        server = subprocess.Popen(
            command(folder, port, on_gpu), stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}") from None
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def allow_files(url: str) -> None:
    """A server that started with random weights (`--load-format dummy`) reads no file until its format is changed."""
    body = {"method": "update_config", "kwargs": {"overrides": {"load_config": {"load_format": "auto"}}}}
    request = urllib.request.Request(
        f"{url}/collective_rpc", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60):
        pass


def folder_with_room(size: int) -> Path:
    """Shared memory if the weights fit, otherwise the folder for temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > MARGIN * size:
        return shared
    return Path(tempfile.gettempdir())


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    on_gpu, began = torch.cuda.is_available(), time.perf_counter()
    folder = HERE / "shapes" / SHAPES[options.shape]
    config = AutoConfig.from_pretrained(folder)
    results = options.out / "weight_transfer.jsonl"

    def record(**fields: Any) -> None:
        line = json.dumps({"shape": options.shape, "at": round(time.perf_counter() - began, 1), **fields})
        print(line, flush=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    with serving(folder, options.out / "weight_transfer_server.log", on_gpu) as url:
        allow_files(url)
        torch.manual_seed(1)
        with torch.device("cuda" if on_gpu else "cpu"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.bfloat16 if on_gpu else torch.float32
            ).eval()
        size = sum(weight.nbytes for weight in model.parameters())
        files = folder_with_room(size)
        vocabulary = int(config.vocab_size)
        engine = VllmServerEngine(url, slots=SLOTS, eos_token_ids=(), vocabulary=vocabulary, weights_folder=files)
        probes = [prompt.tokens for prompt in random_prompts((0, 1), 24, vocabulary)]
        checked = CheckedWeights(engine, lambda *pair: response_logprobs(model, *pair), probes)
        record(
            event="server started", machine=machine(), gib=round(size / 2**30, 2), takes_handles=engine.takes_handles
        )
        ways = ["cuda ipc"] * options.handle_updates if on_gpu and engine.takes_handles else []
        ways += [f"file in {files}"] * options.file_updates
        for version, way in enumerate(ways, start=1):
            with torch.no_grad():  # other weights each time: an update that does nothing fails the check
                model.get_output_embeddings().weight.mul_(-1)
            engine.takes_handles = way == "cuda ipc"
            checked.update_weights(model.state_dict(), version)
            record(
                way=way,
                version=version,
                seconds=round(checked.weight_update_seconds, 3),
                nats_apart=round(checked.last_difference, 5),
            )
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
