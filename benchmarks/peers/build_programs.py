"""Downloads the programs of other systems and builds what is compiled, outside the checkout.

`python -m benchmarks.peers.build_programs` does what is missing and says what cannot be had. Each
package is of one version: pip compares what it downloads with the hashes here. Programs are kept in
the user's folder for caches, or in the one that is given.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import platformdirs
import typer

from retriever.errors import RetrieverError

CACHE_VARIABLE: Final = "FOREDRAFT_CACHE"
"""The folder for what can be made again, where it is set."""

LLAMA_FUNCTIONS: Final = Path(__file__).with_name("llama_lookup.cpp")
SGLANG_FUNCTIONS: Final = Path(__file__).with_name("sglang_ngram.cpp")
"""Our C functions around others' C++."""

_REASON: Final = "why-not.txt"
_LLAMA: Final = "llama_cpp_python-0.3.36"


class ProgramError(RetrieverError):
    """A program of another system cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """A file of the package index, of which no other version will do.

    Attributes:
        requirement: name and version.
        sha256: of the file.
        options: of `pip download`.
    """

    requirement: str
    sha256: str
    options: tuple[str, ...] = ()


ARCTIC: Final = Package(
    "arctic-inference==0.3.0",
    "7f22e3e1b1071c6061c0d6951be17c0fb50b08d06d6e543144c8f52faba60a36",
    # Its sources; the metadata that pip asks for takes no more than the torch that is here.
    ("--no-binary=:all:", "--no-build-isolation"),
)
NANOBIND: Final = Package(
    "nanobind==2.9.2", "c37957ffd5eac7eda349cff3622ecd32e5ee1244ecc912c99b5bc8188bafd16e"
)
SUFFIX_GPU: Final = Package(
    "suffix-gpu==0.1.3", "f404595694a62b45cc3b793d816b12eecf1c807a7567da15c8d3b47c6622007a"
)
LLAMA_CPP: Final = Package(
    "llama-cpp-python==0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    ("--no-binary=llama-cpp-python",),
)
SGLANG: Final = Package(
    "sglang==0.5.23",
    "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
    # Sources are taken from it, so that it may be of another Python than this one.
    ("--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_34_x86_64"),
)


@dataclass(frozen=True, slots=True)
class Program:
    """What is built from packages.

    Attributes:
        name: it ends with the version.
        packages: what it is made of.
        assemble: puts the program into a folder, from the folder of the packages' files.
        functions: our C functions around it, if it has any.
    """

    name: str
    packages: tuple[Package, ...]
    assemble: Callable[[Path, Path], None]
    functions: Path | None = None

    def folder(self, programs: Path) -> Path:
        """Return where the program is kept below the folder of all programs.

        Another version, or other functions of ours, have another place: they are built anew.
        """
        if self.functions is None:
            return programs / self.name
        digest = hashlib.sha256(self.functions.read_bytes()).hexdigest()
        return programs / f"{self.name}-{digest[:8]}"

    def require(self, programs: Path) -> Path:
        """Return the folder of the built program.

        Raises:
            ProgramError: it is not built; the message says why if building it failed.
        """
        if self.folder(programs).is_dir():
            return self.folder(programs)
        try:
            reason = self._reason(programs).read_text()
        except OSError:
            reason = "not built yet: python -m benchmarks.peers.build_programs"
        raise ProgramError(reason)

    def build(self, programs: Path) -> bool:
        """Download and build what is missing; return whether there was anything to do.

        Raises:
            ProgramError: it cannot be had here; `require` says why from now on.
        """
        if self.folder(programs).is_dir():
            return False
        programs.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=programs) as scratch:
                archives, made = Path(scratch, "archives"), Path(scratch, "made")
                made.mkdir()
                for package in self.packages:
                    download(package, archives)
                self.assemble(archives, made)
                made.rename(self.folder(programs))
        except ProgramError as error:
            self._reason(programs).write_text(str(error))
            raise
        self._reason(programs).unlink(missing_ok=True)
        return True

    def _reason(self, programs: Path) -> Path:
        return programs / f"{self.name}.{_REASON}"


def programs_folder(stated: Path | None = None) -> Path:
    """Return the folder of all programs: the stated one, or one in the user's folder for caches."""
    if stated is not None:
        return stated
    caches = os.environ.get(CACHE_VARIABLE)
    return Path(caches or platformdirs.user_cache_dir("foredraft", appauthor=False)) / "peers"


def download(package: Package, folder: Path) -> None:
    """Have pip put a package's file into a folder, if it is the expected one.

    Raises:
        ProgramError: pip fails, or the file is another one.
    """
    folder.mkdir(exist_ok=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    wanted = ["--dest", str(folder), *package.options, "--requirement", str(requirements)]
    _run([*pip, *wanted], f"{package.requirement} cannot be downloaded")


def compiler() -> str:
    """Return the C++ compiler: the one in `CXX`, or the first of the usual ones.

    Raises:
        ProgramError: there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise ProgramError("no C++ compiler: install g++, or name one in the variable CXX")


def compile_library(
    sources: Iterable[Path], includes: Iterable[Path | str], standard: str, output: Path
) -> None:
    """Compile C++ sources to a shared library, optimised as CMake's Release is.

    Raises:
        ProgramError: there is no compiler, or it fails; the message is its first error.
    """
    # -fno-strict-aliasing is what nanobind's own build files ask for.
    flags = ["-O3", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"]
    places = [f"-I{each}" for each in includes]
    command = [compiler(), f"-std={standard}", *flags, *places, *map(str, sources)]
    _run([*command, "-o", str(output)], f"{output.name} cannot be compiled")


def _assemble_arctic(archives: Path, made: Path) -> None:
    """ArcticInference's suffix decoding: its C++ through nanobind, and its own cache in Python."""
    _unpack(archives / "arctic_inference-0.3.0.tar.gz", archives, ("",))
    _unpack_wheel(archives, "nanobind", archives)
    package = made / "arctic_inference"
    root, nanobind = archives / "arctic_inference-0.3.0", archives / "nanobind"
    shutil.copytree(root / "arctic_inference" / "suffix_decoding", package / "suffix_decoding")
    (package / "__init__.py").touch()  # its own imports what it changes in vLLM
    csrc = root / "csrc" / "suffix_decoding"
    compile_library(
        (nanobind / "src" / "nb_combined.cpp", csrc / "bindings.cc", csrc / "suffix_tree.cc"),
        (
            nanobind / "include",
            nanobind / "ext" / "robin_map" / "include",
            sysconfig.get_paths()["include"],
            csrc,
        ),
        "c++20",
        package / "suffix_decoding" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}",
    )


def _assemble_suffix_gpu(archives: Path, made: Path) -> None:
    _unpack_wheel(archives, "suffix_gpu", made)


def _assemble_llama(archives: Path, made: Path) -> None:
    """llama.cpp's n-gram caches behind our few functions, and llama-cpp-python's prompt lookup."""
    llama = "vendor/llama.cpp"
    parts = ("common", "include", "ggml/include", "vendor/nlohmann")
    wanted = ("llama_cpp/llama_speculative.py", *(f"{llama}/{part}/" for part in parts))
    _unpack(archives / f"{_LLAMA}.tar.gz", archives, wanted)
    root = archives / _LLAMA
    shutil.copy(root / "llama_cpp" / "llama_speculative.py", made)
    sources = root / llama
    compile_library(
        (sources / "common" / "ngram-cache.cpp", LLAMA_FUNCTIONS),
        (sources / part for part in ("common", "include", "ggml/include", "vendor")),
        "c++17",
        made / "llama_lookup.so",
    )


def _assemble_sglang(archives: Path, made: Path) -> None:
    """SGLang's n-gram corpus behind our few functions."""
    _unpack_wheel(archives, "sglang", archives)
    sources = archives / "sglang" / "kernels" / "jit" / "csrc" / "ngram_corpus"
    parts = (sources / f"{name}.cpp" for name in ("ngram", "trie", "result", "suffix_automaton"))
    library = made / "sglang_ngram.so"
    compile_library((*parts, SGLANG_FUNCTIONS), (sources,), "c++20", library)


def _unpack(archive: Path, folder: Path, parts: tuple[str, ...]) -> None:
    """Unpack those files of a source archive that begin with one of the parts."""
    wanted = tuple(f"{archive.name.removesuffix('.tar.gz')}/{part}" for part in parts)
    with tarfile.open(archive) as opened:
        members = [each for each in opened if each.name.startswith(wanted)]
        opened.extractall(folder, members, filter="data")


def _unpack_wheel(archives: Path, name: str, folder: Path) -> None:
    with zipfile.ZipFile(next(archives.glob(f"{name}-*.whl"))) as wheel:
        wheel.extractall(folder)  # noqa: S202  its hash is the expected one


def _run(command: list[str], failed: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        reason = (errors or lines or [f"status {done.returncode}"])[0]
        raise ProgramError(f"{failed}: {reason}")


ARCTIC_INFERENCE: Final = Program("arctic-inference-0.3.0", (ARCTIC, NANOBIND), _assemble_arctic)
SUFFIX_ON_TORCH: Final = Program("suffix-gpu-0.1.3", (SUFFIX_GPU,), _assemble_suffix_gpu)
LLAMA_LOOKUP: Final = Program(
    "llama-cpp-python-0.3.36", (LLAMA_CPP,), _assemble_llama, LLAMA_FUNCTIONS
)
SGLANG_NGRAM: Final = Program("sglang-0.5.23", (SGLANG,), _assemble_sglang, SGLANG_FUNCTIONS)
PROGRAMS: Final = (ARCTIC_INFERENCE, SUFFIX_ON_TORCH, LLAMA_LOOKUP, SGLANG_NGRAM)


def main(
    folder: Annotated[
        Path | None, typer.Option(help="Where to. Default: in the user's folder for caches.")
    ] = None,
) -> None:
    """Download and build other systems' programs; what is built already stays."""
    programs, failed = programs_folder(folder), False
    for program in PROGRAMS:
        try:
            built = program.build(programs)
        except ProgramError as error:
            print(f"{program.name}: {error}", file=sys.stderr)
            failed = True
        else:
            print(f"{program.name}: {'built' if built else 'there already'}")
    print(programs)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
