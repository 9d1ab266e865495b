"""Seconds of a weight update to vLLM or SGLang servers on the same GPU: CUDA IPC against files.

    python benchmarks/weight_transfer.py --out OUT                          LLaMA-3.1-8B's shape on one GPU
    python benchmarks/weight_transfer.py --engine sglang --servers 2 --shape 1.5b --out OUT              a pool of two
    python benchmarks/weight_transfer.py --shape tiny --out OUT             without a GPU: files alone

Starts the servers with random weights, makes a model of the same shape with other random weights in this process, and
updates the servers' weights several times. After each update the servers sample tokens and the model scores them, as in
training; the run fails if they differ. Each result is printed and appended to OUT/weight_transfer.jsonl at once; files
with the seconds to write, load and remove them, and to write them with safetensors' own function instead.
`--server-site` is the folder of the server's packages, if this process has others. vLLM 0.25's IPC backend imports ray
but does not use it over HTTP. Where ray is not installed, the server gets a module of that name without its functions.
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
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sortedrl.core.engine import EngineBase
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.servers.base import HttpEngine, ServerPool
from sortedrl.engines.servers.sglang import SglangEngine
from sortedrl.engines.servers.vllm import VllmServerEngine
from sortedrl.engines.servers.weight_files import WeightFiles
from sortedrl.engines.shared import OUTPUT_LAYER, with_output_layer
from sortedrl.learner.models import response_logprobs
from sortedrl.studies.measurements import machine, random_prompts

HERE = Path(__file__).parent
SHAPES = {"8b": "llama-3.1-8b", "1.5b": "qwen2.5-1.5b", "tiny": "tiny"}
ENGINES: dict[str, type[HttpEngine]] = {"vllm-server": VllmServerEngine, "sglang": SglangEngine}
SLOTS = 8
START_SECONDS = 400.0
MARGIN = 1.2  # free space for a file of weights, as a multiple of its size


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--engine", choices=ENGINES, default="vllm-server")
    parser.add_argument("--servers", type=int, default=1, help="behind ServerPool if there are several")
    parser.add_argument("--server-site", default="")
    parser.add_argument("--handle-updates", type=int, default=4, help="by CUDA IPC")
    parser.add_argument("--file-updates", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("h200"))
    return parser.parse_args()


def command(engine: str, folder: Path, port: int, on_gpu: bool) -> list[str]:
    parts = [sys.executable, "-m"]
    if engine == "sglang":
        parts += ["sglang.launch_server", "--model-path", str(folder), "--load-format", "dummy", "--host", "127.0.0.1"]
        parts += ["--port", str(port), "--max-running-requests", str(SLOTS), "--max-total-tokens", "16384"]
        parts += ["--skip-tokenizer-init", "--incremental-streaming-output", "--skip-server-warmup"]
        parts += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
        if on_gpu:
            parts += ["--mem-fraction-static", "0.4", "--dtype", "bfloat16", "--sampling-backend", "pytorch"]
            return [*parts, "--attention-backend", "fa3"]
        return [*parts, "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    parts += ["vllm.entrypoints.openai.api_server", "--model", str(folder)]
    parts += ["--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port), "--tokens-only"]
    parts += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", str(SLOTS), "--max-model-len", "1024"]
    parts += ["--enforce-eager", "--weight-transfer-config", '{"backend": "ipc"}']
    if on_gpu:
        return [*parts, "--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(2**31)]
    return [*parts, "--dtype", "float32", "--gpu-memory-utilization", "0.2"]  # of the CPU's memory


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"} | os.environ
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    paths = [options.server_site, environment.get("PYTHONPATH", "")]
    if options.engine == "vllm-server" and find_spec("ray") is None:
        modules = Path(tempfile.mkdtemp())
        (modules / "ray").mkdir()
        (modules / "ray" / "__init__.py").write_text("def is_initialized():\n    return False\n")
        paths.append(str(modules))
    if options.engine == "sglang" and not torch.cuda.is_available():
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        paths.insert(0, str(HERE.parent / "tests" / "with_sglang" / "without_kernels"))
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def serving(options: argparse.Namespace, folder: Path, on_gpu: bool) -> Iterator[list[str]]:
    """The servers' addresses, once all answer."""
    ports = free_ports(options.servers)
    logs = [options.out / f"{options.engine}-{place}.log" for place in range(options.servers)]
    servers = []
    for port, log in zip(ports, logs, strict=True):
        with log.open("w") as out:
            servers.append(
                subprocess.Popen(
                    command(options.engine, folder, port, on_gpu),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment_of(options),
                    start_new_session=True,
                )
            )
    try:
        deadline = time.monotonic() + START_SECONDS
        for port, server, log in zip(ports, servers, logs, strict=True):
            while not answers(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"a server did not start:\n{log.read_text()[-6000:]}")
                time.sleep(0.3)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


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


def old_seconds(weights: dict[str, Any], folder: Path) -> float:
    """As weights were written before: one file, by safetensors' own function."""
    began, file = time.perf_counter(), folder / "weight_transfer_old.safetensors"
    save_file({name: weight.clone() if name == OUTPUT_LAYER else weight for name, weight in weights.items()}, file)
    seconds = time.perf_counter() - began
    file.unlink()
    return seconds


def file_seconds(engine: EngineBase, files: WeightFiles, weights: dict[str, Any], version: int) -> dict[str, float]:
    times = [time.perf_counter()]
    with files.written(weights, version) as folder:
        times.append(time.perf_counter())
        engine.update_weights(folder, version)
        times.append(time.perf_counter())
    times.append(time.perf_counter())
    parts = (after - before for before, after in pairwise(times))
    return {part: round(seconds, 3) for part, seconds in zip(("write", "load", "remove"), parts, strict=True)}


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a time limit ends the servers, too
    options.out.mkdir(parents=True, exist_ok=True)
    on_gpu, began = torch.cuda.is_available(), time.perf_counter()
    folder = HERE / "shapes" / SHAPES[options.shape]
    config = AutoConfig.from_pretrained(folder)
    results = options.out / "weight_transfer.jsonl"

    def record(**fields: Any) -> None:
        about = {"shape": options.shape, "engine": options.engine, "servers": options.servers}
        line = json.dumps({**about, "at": round(time.perf_counter() - began, 1), **fields})
        print(line, flush=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    with serving(options, folder, on_gpu) as urls:
        torch.manual_seed(1)
        with torch.device("cuda" if on_gpu else "cpu"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.bfloat16 if on_gpu else torch.float32
            ).eval()
        size = sum(weight.nbytes for weight in model.parameters())
        files = folder_with_room(size)
        vocabulary = int(config.vocab_size)
        settings: dict[str, Any] = {"slots": SLOTS, "eos_token_ids": (), "weights_folder": files}
        settings["vocabulary"] = vocabulary
        if options.engine == "sglang":
            settings["cuda_ipc"] = on_gpu
        else:
            for url in urls:
                allow_files(url)
        engines = [ENGINES[options.engine](url, **settings) for url in urls]
        engine = ServerPool(engines) if len(engines) > 1 else engines[0]
        probes = [prompt.tokens for prompt in random_prompts(range(2 * len(urls)), 24, vocabulary)]
        # With random weights bf16 alone may put the two 0.1 nats apart. Wrong weights: more than 1.
        checked = CheckedWeights(engine, lambda *pair: response_logprobs(model, *pair), probes, tolerance=0.5)
        can_ipc = on_gpu and all(one.takes_handles for one in engines)
        record(event="servers started", machine=machine(), gib=round(size / 2**30, 2), takes_handles=can_ipc)
        ways = ["cuda ipc"] * options.handle_updates if can_ipc else []
        ways += [f"files in {files}"] * options.file_updates
        for version, way in enumerate(ways, start=1):
            with torch.no_grad():  # other weights each time: an update that does nothing fails the check
                model.get_output_embeddings().weight.mul_(-1)
            for one in engines:
                one.takes_handles = way == "cuda ipc"
            weights, parts = dict(with_output_layer(model.state_dict())), {}
            start = time.perf_counter()
            if way == "cuda ipc":
                engine.update_weights(weights, version)
            else:
                parts = file_seconds(engine, engines[0].weight_files, weights, version)
            seconds = round(time.perf_counter() - start, 3)
            checked.check(f"after update {version}")
            if parts:
                parts["old_write"] = round(old_seconds(weights, files), 3)
            record(way=way, version=version, seconds=seconds, **parts, nats_apart=round(checked.last_difference, 5))
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
