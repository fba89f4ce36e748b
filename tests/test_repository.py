"""The rules that hold the repository together: layers, documentation, packaging."""

import ast
import collections
import graphlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import typing
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from imports import circle_of, imports_by_module, unit_of

import jax_specdec
from jax_specdec import lm

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jax_specdec"
PUBLIC = (jax_specdec, jax_specdec.grammar, jax_specdec.testing, lm, lm.formats, lm.models)
MAX_NAMES = 34  # of `import jax_specdec`
LONG_FILE = 800  # lines from which on a file is warned about

# The rooms of _src: each imports those before it in this list, and none after it.
ROOMS = (
    "base",
    "rows",
    "mosaic",
    "verify",
    "logits",
    "drafts",
    "attention",
    "stats",
    "testing",
)
# Who may import whom: a unit imports units of its own layer and of those above it in this list,
# without cycles. A unit is a room of _src, or a file or folder of jax_specdec or its lm; "" is
# jax_specdec/__init__.py.
LAYERS = (
    *[{f"_src.{room}"} for room in ROOMS],
    {"adapters", "grammar", "testing"},
    {""},
    {"extras", "terminal"},
    {"models"},
    {"formats"},
    {"text"},
    {"drafting"},
    {"decoding"},
    {"lm"},
    {"drafters"},
    {"loading"},
    {"server"},
    {"cli", "__main__"},
)
# Two floors: below, the verifier and what it is made of; above, all that is built around it.
UPPER_FLOOR = re.compile(r"jax_specdec\.(lm|__main__)(\.|$)")
# The oracle shares nothing with what it judges.
ONLY_IMPORTS = {"jax_specdec._src.testing.reference": {"jax_specdec._src.base.types"}}

MARKDOWN = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "notebooks/**/*.md")
    for path in ROOT.glob(pattern)
)


# Tests

# All that tests may take from inside the package, and how many names at most.
FACADES = {"lower_floor": 66, "upper_floor": 58}
DOORS = {module.__name__: {*module.__all__, "lm", "adapters", "foreign"} for module in PUBLIC}
OTHER_DOORS = re.compile(r"jax_specdec\.(__main__|adapters|lm\.models\.foreign)\b")


def names_from_inside(code: str) -> list[str]:
    """Every name that is imported from the package by no public door."""
    taken = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            taken += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            taken += [tuple(alias.name.rpartition(".")[::2]) for alias in node.names]
    return [
        f"{module}.{name}"
        for module, name in taken
        if module.partition(".")[0] == "jax_specdec"
        if name not in DOORS.get(module, ()) and not OTHER_DOORS.match(f"{module}.{name}")
    ]


@pytest.mark.newest
def test_tests_take_what_is_not_public_from_the_facades() -> None:
    files = {path: names_from_inside(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    inside = {path.stem: names for path, names in files.items() if names}
    assert inside.keys() == FACADES.keys(), inside
    assert {file: names for file, names in inside.items() if len(names) > FACADES[file]} == {}


@pytest.mark.long
def test_the_tests_of_a_gpu_are_collected_where_there_is_one_device() -> None:
    """As on a machine with one GPU: no file makes a mesh while it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests"]
    alone = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0 and "test_mosaic_gpu" in done.stdout, done.stdout[-3000:]


# Layers


def layer_violations(imports: dict[str, set[str]]) -> list[str]:
    layer_of = {unit: i for i, units in enumerate(LAYERS) for unit in units}
    found = []
    for module, targets in imports.items():
        for target in sorted(targets):
            source, sink = unit_of(module), unit_of(target)
            for unit in (source, sink):
                if unit not in layer_of:
                    found.append(f"{module}: give {unit!r} a place in LAYERS")
                    layer_of[unit] = len(LAYERS)
            allowed = ONLY_IMPORTS.get(module)
            if allowed is not None and target not in allowed:
                found.append(f"{module} imports {target}, but only {sorted(allowed)} are allowed")
            elif layer_of[sink] > layer_of[source]:
                found.append(f"{module} imports {target}, which lies above it")
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        found.append(f"import cycle: {' <- '.join(error.args[1])}")
    return found


def test_imports_run_one_way() -> None:
    assert layer_violations(imports_by_module(PACKAGE)) == []


def test_every_file_of_src_is_in_a_room_that_the_page_describes() -> None:
    inside = {path.name for path in (PACKAGE / "_src").iterdir()} - {"__init__.py", "__pycache__"}
    assert inside == set(ROOMS)
    described = re.findall(r"^\| `(\w+)/` \|", read("docs/architecture.md"), re.MULTILINE)
    assert described == list(ROOMS)


def floor_violations(package: Path) -> list[str]:
    """What the lower floor imports of the upper one, or says of it in a docstring or a comment."""
    public = {name: getattr(module, name) for module in PUBLIC for name in module.__all__}
    above = [name for name, thing in public.items() if UPPER_FLOOR.match(f"{_home(thing)}.")]
    named = re.compile(rf"[`.]({'|'.join(above)})\b")
    found = []
    for module, targets in imports_by_module(package).items():
        if UPPER_FLOOR.match(module) or module == "jax_specdec":  # the door may name both
            continue
        found += [f"{module} imports {x}" for x in sorted(targets) if UPPER_FLOOR.match(x)]
        path = package.parent.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        found += [f"{module} names {name}" for name in named.findall(path.read_text())]
    return found


def _home(thing: object) -> str:
    return thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", "")


def test_the_lower_floor_knows_nothing_of_the_upper() -> None:
    assert floor_violations(PACKAGE) == []


def test_no_files_import_each_other() -> None:
    """Not even for type checkers alone."""
    assert circle_of(imports_by_module(PACKAGE, for_types=True)) == []


def test_what_reads_knows_nothing_of_what_draws() -> None:
    """Nor does a kernel know who calls it."""
    imports = imports_by_module(PACKAGE)
    verify = "jax_specdec._src.verify"
    reads = [f"{verify}.{name}" for name in ("q", "local_rows", "reader", "statistics")]
    kernels = [module for module in imports if module.startswith(f"{verify}.mosaic_")]
    above = {f"{verify}.{name}" for name in ("draw", "api")}
    found = {
        (module, target)
        for module in (*reads, *kernels)
        for target in imports[module]
        if target in above or target.startswith(f"{verify}.backends")
    }
    assert found == set()


@pytest.mark.filterwarnings("default:.* lines:UserWarning")
def test_no_file_is_empty_and_a_long_one_is_warned_about() -> None:
    for path in PACKAGE.rglob("*.py"):
        count = len(path.read_text().splitlines())
        if count > LONG_FILE:
            warnings.warn(f"{path.relative_to(ROOT)} has {count} lines", stacklevel=1)
        assert count > 0, path


# Names


def test_a_class_has_its_name_once() -> None:
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(names) > 300
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []


# Public names


def test_public_names_exist_once() -> None:  # that they are sorted is checked by ruff
    names = [name for module in PUBLIC for name in module.__all__]
    assert len(names) == len(set(names))
    assert [name for module in PUBLIC for name in module.__all__ if not hasattr(module, name)] == []
    assert len(jax_specdec.__all__) <= MAX_NAMES


def test_public_names_are_documented_with_an_example() -> None:
    public = {name: getattr(module, name) for module in PUBLIC for name in module.__all__}
    callables = {
        name: thing
        for name, thing in public.items()
        if callable(thing) and typing.get_origin(thing) is None  # no example for a type alias
    }
    # Not inspect.getdoc, which would answer with the docstring of a base class.
    docs = {name: thing.__doc__ or "" for name, thing in callables.items()}
    elsewhere = re.compile(r"^ *Example: see `(\w+)`\.$", re.MULTILINE)
    undocumented = []
    for name, doc in docs.items():
        see = elsewhere.search(doc)
        if ">>>" not in (docs.get(see[1], "") if see else doc):
            undocumented.append(name)
    assert undocumented == []


@pytest.mark.newest
def test_an_import_brings_in_only_what_it_needs() -> None:
    code = "import sys, jax; before = set(sys.modules); import jax_specdec; "
    code += "print(*set(sys.modules) - before)"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    new = printed.split()
    packages = {name.partition(".")[0] for name in new}
    assert packages <= {"jax_specdec", "jax", "jaxlib", "numpy"}
    assert [name for name in new if name.startswith("jax_specdec.lm")] == []
    assert "jax.experimental.pallas" not in new  # kernels are read where one is launched


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'novel'$"):
        _ = jax_specdec.novel


# Requirements

# Begins a program in which nothing is installed but JAX and what JAX needs.
WITH_JAX_ALONE = """
import importlib.metadata, sys
there = {"jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum", "jax_specdec"}
sys.modules |= dict.fromkeys(importlib.metadata.packages_distributions().keys() - there)
"""


def run_with_jax_alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITH_JAX_ALONE + program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.long
def test_the_first_program_of_the_readme_needs_jax_alone() -> None:
    program = re.search(r"^```python.*?\n(.*?)^```", read("README.md"), re.DOTALL | re.MULTILINE)[1]
    assert "rejection_sample" in program
    result = run_with_jax_alone(program)
    assert result.returncode == 0, result.stderr


@pytest.mark.long
@pytest.mark.newest
def test_the_upper_floor_without_its_extra_says_what_to_install() -> None:
    result = run_with_jax_alone("""
from jax_specdec import *
from jax_specdec.__main__ import main
for arguments in ((), ("--help",), ("--version",), ("serve", "--help"), ("generate", "a")):
    try:
        main(arguments)
    except SystemExit as end:
        print("ended with", end.code)
lm.load_embedded_pair()
""")
    lm = "is not installed: it comes with the extra lm, "
    lm += 'pip install ".[lm]" in a clone of jax_specdec'
    ends = re.findall("^ended with (.*)", result.stdout, re.MULTILINE)
    assert ends == ["0", "0", "0", "0", "2"]
    assert f"jax-specdec {jax_specdec.__version__}\nended" in result.stdout
    first, *_, last = result.stderr.splitlines()
    assert first == f"jax-specdec generate: rich {lm}"
    assert last == f"ImportError: safetensors {lm}"


def test_the_requirements_are_what_the_package_imports() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for x in nodes if isinstance(x, ast.Import) for alias in x.names]
    names += [x.module for x in nodes if isinstance(x, ast.ImportFrom) and x.level == 0]
    imported = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    extras = project()["optional-dependencies"]
    lines = project()["dependencies"] + extras["lm"] + extras["serve"] + extras["grammar"]
    required = {re.match(r"\w+", line)[0] for line in lines if "[" not in line}
    same = {"jaxlib": "jax", "pydantic_core": "pydantic"}  # comes with
    assert {same.get(name, name) for name in imported - {"jax_specdec"}} == required - {"jaxlib"}


def test_no_command_takes_an_abbreviation_of_an_option() -> None:
    calls = [
        (path.name, line)
        for folder in ("jax_specdec", "benchmarks", "tools", "training")
        for path in (ROOT / folder).rglob("*.py")
        for line in re.findall("ArgumentParser\\(.*", path.read_text())
    ]
    assert len(calls) > 9 and [x for x in calls if "allow_abbrev=False" not in x[1]] == []


# Packaging


def project() -> dict[str, typing.Any]:
    return tomllib.loads(read("pyproject.toml"))["project"]


def test_the_changelog_begins_with_this_version() -> None:
    newest = re.search(r"^## \[?([^\]\s]+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None and newest[1] == jax_specdec.__version__


@pytest.mark.long
@pytest.mark.newest
def test_the_wheel_carries_every_file_of_the_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, source / "jax_specdec", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "wheel", *offline, "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[1] == jax_specdec.__version__
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "jax_specdec").rglob("*")
        if path.is_file()
    }
    assert packed == expected
    assert "jax_specdec/py.typed" in packed


# Set-up

# Stands for an interpreter: says which version it is, makes environments or fails to.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) [ "$3" = {version} ] ;;
    "-m venv") {venv} && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip") echo "pip $*" ;;
esac
"""


@pytest.fixture
def make_venv(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs tools/make_venv.sh for "9.9 9.8" where nothing but fake interpreters is found."""

    def run(interpreters: dict[str, str]) -> subprocess.CompletedProcess[str]:
        for place, text in {"path/none": "", "py env/none": "", **interpreters}.items():
            file = tmp_path / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        paths = [str(tmp_path / "empty path"), str(tmp_path / "path"), os.environ["PATH"]]
        return subprocess.run(
            ["sh", str(ROOT / "tools/make_venv.sh"), "environment", "9.9 9.8", "-e", ".[lm]"],
            cwd=tmp_path,
            env={"PATH": ":".join(paths), "PYENV_ROOT": str(tmp_path / "py env")},
            capture_output=True,
            text=True,
        )

    return run


def fake_python(version: str, venv: str = "true") -> str:
    return FAKE_PYTHON.format(version=version, venv=venv)


BROKEN_SHIM = "#!/bin/sh\nexit 127\n"
PYENV_99 = "py env/versions/9.9.1/bin/python"


@pytest.mark.parametrize(
    ("interpreters", "chosen"),
    [
        ({"path/python9.9": fake_python("9.9"), "path/python9.8": fake_python("9.8")}, "python9.9"),
        ({"path/python3": fake_python("9.8")}, "path/python3"),
        ({"path/python9.9": BROKEN_SHIM, PYENV_99: fake_python("9.9")}, PYENV_99),
        ({"path/python9.8": fake_python("9.8"), PYENV_99: fake_python("9.9")}, PYENV_99),
        ({PYENV_99: fake_python("9.9", "false"), "path/python": fake_python("9.8")}, "path/python"),
    ],
    ids=["newest", "plain name", "broken shim", "newest under pyenv", "no ensurepip"],
)
def test_the_newest_python_that_works_is_chosen(
    make_venv: Callable, tmp_path: Path, interpreters: dict[str, str], chosen: str
) -> None:
    result = make_venv(interpreters)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"^environment: Python 9\.[89] from .*{chosen}$", result.stderr, re.MULTILINE)
    assert result.stdout.startswith("pip -m pip install ")
    assert result.stdout.endswith(" -e .[lm]\n")
    assert (tmp_path / "environment/bin/python").exists()


@pytest.mark.parametrize("interpreters", [{}, {PYENV_99: fake_python("9.9", "false")}])
def test_without_a_usable_python_one_sentence_says_what_to_install(
    make_venv: Callable, tmp_path: Path, interpreters: dict[str, str]
) -> None:
    result = make_venv(interpreters)
    assert result.returncode == 1
    assert "No usable Python found: install Python 9.9 or 9.8 with venv and pip" in result.stderr
    assert not (tmp_path / "environment").exists()


# Documents


def read(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_make_targets_that_documents_name_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))
    assert named - targets == set()
    if path.name == "README.md" and path.parent == ROOT:
        assert {"demo", "test"} <= named
