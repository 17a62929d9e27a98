"""What `import foredraft` offers: everything that users need, typed, and loaded when it is used."""

import ast
import os
import pickle
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import foredraft
import foredraft.errors
from foredraft.installation import EXTRAS, needing
from indexer.errors import MissingPluginError
from tests.deletion.absent_plugins import absent, plugins

ROOT = Path(__file__).parents[2]
FACE = ROOT / "foredraft"
ADAPTERS = {
    "experimental_sglang": "sglang",
    "llama_cpp": "llama_cpp",
    "mlx_lm": "mlx",
    "onnxruntime_genai": "onnxruntime_genai",
    "transformers": "transformers",
    "vllm": "vllm",
}


def modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def typed_names(stub: Path) -> dict[str, str]:
    """Where type checkers are told that each name comes from."""
    return {
        str(alias.asname): str(node.module)
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.plugin
def test_each_name_is_what_type_checkers_are_told() -> None:
    told = typed_names(FACE / "__init__.pyi")
    assert len(told) > 60
    assert sorted(told) == vars(foredraft)["__all__"]
    for name, module in told.items():
        if name != "errors":
            assert getattr(foredraft, name) is getattr(import_module(module), name)
    assert set(told) <= set(dir(foredraft))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'foredraft' has no attribute 'Indx'"):
        _ = foredraft.Indx  # type: ignore[attr-defined]  # as a typing error would be


def test_importing_loads_no_more_than_what_is_used() -> None:
    bare = modules_after("import foredraft")
    ours = {"foredraft", "foredraft.face", "foredraft.installation", "foredraft.errors"}
    assert ours <= modules_after("import foredraft; foredraft.errors")
    assert not bare & {"numpy", "grpc", "retriever", "decoder", "foredraft.errors"}
    client = modules_after("import retriever.client.connecting, foredraft.installation")
    used = modules_after("from foredraft import DraftRequest, DraftTree, RemoteDrafter, connect")
    assert used - client <= ours


def test_each_error_of_the_packages_is_offered() -> None:
    for package in EXTRAS:
        module = import_module(f"{package}.errors")
        names = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Exception)
        ]
        assert set(names) <= set(foredraft.errors.__all__)
        assert all(getattr(foredraft.errors, name) is getattr(module, name) for name in names)


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("EmbeddedDrafter", "numba", "server"), ("Decoder", "torch", "decoder")],
)
def test_a_missing_library_is_answered_with_what_to_install(
    name: str, library: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / f"{library}.py").write_text(f"raise ModuleNotFoundError(name='{library}')")
    done = subprocess.run(
        [sys.executable, "-c", f"from foredraft import {name}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: {library} is missing: run `pip install 'foredraft[{extra}]'`"
    )


def test_each_adapter_has_a_name_here_that_loads_its_engine_alone() -> None:
    modules = {path.stem for path in FACE.glob("*.py")}
    own = {"__init__", "__main__", "errors", "face", "installation", "program", "verify"}
    assert modules - own == ADAPTERS.keys()
    for name in ADAPTERS.keys() - {"transformers"}:
        assert f"decoder.plugins.{name}" in plugins()
    loaded = modules_after("import foredraft, foredraft.errors")
    assert not loaded & {"torch", *ADAPTERS.values()}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_works_or_names_the_engine_or_plugin_that_is_missing(name: str) -> None:
    module = import_module(f"foredraft.{name}")
    assert module.__all__ == sorted(typed_names(FACE / f"{name}.pyi"))
    plugin = f"decoder.plugins.{name}"
    try:
        assert all(hasattr(module, each) for each in module.__all__)
    except ModuleNotFoundError as error:
        assert error.name == ADAPTERS[name]  # noqa: PT017  (it may be there, too)
    except MissingPluginError as error:
        assert f" needs {plugin}, which" in str(error)  # noqa: PT017  (as above)
        assert plugin in absent()


@pytest.mark.plugin("decoder.plugins.vllm", "decoder.plugins.experimental_sglang")
def test_engines_find_the_adapters_that_they_import_by_name() -> None:
    """vLLM imports what its configuration names, and may send the class to other processes."""
    module, _, name = "foredraft.vllm.ForedraftProposer".rpartition(".")
    proposer = getattr(import_module(module), name)
    assert pickle.loads(pickle.dumps(proposer)) is proposer  # noqa: S301  (our own)
    assert "SpeculativeAlgorithm" not in vars(import_module("foredraft.experimental_sglang"))


def for_users(page: Path) -> bool:
    """Whether a page tells how to use it; others tell how it works, and why."""
    return page.stem != "architecture" and page.parent.name != "decisions"


def pages() -> list[Path]:
    """All that tells users what to type and what to import."""
    found = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    found += [path for path in (ROOT / "docs").rglob("*.md") if for_users(path)]
    found += (path for path in (ROOT / "docs" / "deploy").iterdir() if path.is_file())
    return found + sorted((ROOT / "examples").glob("*.py"))


def test_users_are_told_of_foredraft_alone() -> None:
    assert len(pages()) > 15
    for page in pages():
        text = page.read_text()
        assert not re.findall(r"-m (?:indexer|retriever|decoder)\b(?!\.)", text), page
        assert not re.findall(
            r"^\s*(?:from|import) (?:indexer|retriever|decoder)\b", text, re.MULTILINE
        )
        assert not re.findall(r"[`\"](?:indexer|decoder)(?:\.\w+)+", text), page


def test_messages_and_help_name_no_package_as_a_command() -> None:
    for package in (*EXTRAS, "foredraft"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "__main__.py":
                assert not re.search(r"-m (?:indexer|retriever|decoder)\b(?!\.)", path.read_text())


def test_an_adapter_that_never_ran_in_its_engine_says_so() -> None:
    experimental = [name for name in ADAPTERS if name.startswith("experimental")]
    assert experimental == ["experimental_sglang"]
    assert "Experimental; never run" in str(import_module("foredraft.experimental_sglang").__doc__)
    rows = (ROOT / "docs" / "how-to" / "engines.md").read_text().splitlines()
    hook, carried = [line for line in rows if re.match(r"\| \**SGLang", line)]
    assert "**experimental**" in hook
    assert "never in a whole SGLang" in hook
    assert carried.startswith("| **SGLang**, experimental |")


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("from numpy import no_such_name", "cannot import name 'no_such_name' from 'numpy'"),
        ("import numpy.no_such_module", "No module named 'numpy.no_such_module'"),
    ],
)
def test_a_library_that_changed_is_answered_with_its_version(statement: str, told: str) -> None:
    with pytest.raises(ImportError) as caught, needing("llama-cpp"):
        exec(statement)  # noqa: S102  (an import that fails)
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith(
        f": numpy {version('numpy')} is not a version that foredraft[llama-cpp] was written for: "
        "install an earlier one, or a newer foredraft"
    )
