"""The whole repository: one-way rooms, dependencies and version in one place, short files, no trace of a machine."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import iter_modules

import pytest

import tplab

ROOT = Path(__file__).resolve().parent.parent
# From the ground up; a room imports only from rooms before it.
ROOMS = ["record", "errors", "checks", "files", "patch", "checkpoint", "ranks", "pool", "shard", "model",
         "cache", "engine", "memory", "fast", "invariant", "llm", "faults", "align", "show", "cli"]
# The same of the course; what lies beside the rooms is below them (the first two) or above (lesson, __main__).
COURSE = ["random_weights", "contiguous_cache", "fable", "cost", "figures", "judge", "exercises", "cases", "lab",
          "lesson", "__main__"]
TOP_LEVEL = {"notebooks", "tplab", "tests", "environment.yml", "README.md", "README.zh-CN.md", "launch",
             "pyproject.toml", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
# Needed though no file imports them: to run the lab, and to test it.
RUN_ONLY, TEST_ONLY = {"jupyterlab"}, {"pytest_xdist", "ruff", "mypy"}


def files_under_git():
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path):
    """Full dotted names of what a file imports, at its top or inside functions."""
    package = list(path.relative_to(ROOT).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room(module):
    """The room of a dotted name such as ``tplab.shard.plan``; None outside the house and for ``tplab`` itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "tplab" and len(parts) > 1 and parts[1] in ROOMS else None


def test_the_version_is_the_same_everywhere():
    for file, line in {"CITATION.cff": "version: {}\n", "CHANGELOG.md": "## {}"}.items():
        assert line.format(tplab.__version__) in (ROOT / file).read_text(encoding="utf-8"), file


def test_every_room_has_its_place_in_the_order():
    found = {path.stem
             for path in (ROOT / "tplab").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} <= set(ROOMS)


def test_rooms_import_only_from_rooms_below():
    upward = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files("tplab")
        if (here := room(".".join(path.relative_to(ROOT).with_suffix("").parts)))
        for module in imported(path)
        if (there := room(module)) and ROOMS.index(there) > ROOMS.index(here)
    ]
    assert not upward


def test_rooms_of_the_course_import_only_from_rooms_below():
    home = ROOT / "notebooks" / "course"
    rooms = {path.stem for path in home.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(COURSE)
    upward = [f"{path.relative_to(home)} imports {module}" for path in python_files("notebooks/course")
              for module in imported(path) if module.startswith("course.") and path.parent != home
              and COURSE.index(module.split(".")[1]) > COURSE.index(path.relative_to(home).parts[0])]
    assert not upward


def test_the_library_never_imports_the_course():
    assert not [f"{path.relative_to(ROOT)} imports {module}" for path in python_files("tplab")
                for module in imported(path) if module.split(".")[0] == "course"]


def test_no_name_that_is_loaded_late_is_a_modules_name():
    """To load the module puts it into the package, in the place of what it exports: the second use would get it."""
    rooms = [import_module(f"tplab.{path.parent.name}") for path in (ROOT / "tplab").glob("*/__init__.py")]
    late = {room.__name__: {module.name for module in iter_modules(room.__path__)} & set(room._HOMES)
            for room in rooms if hasattr(room, "_HOMES")}
    assert len(late) > 3 and not any(late.values()), late


def test_every_dependency_is_declared_and_every_declared_one_is_used():
    def names(needs):
        return {re.match(r"[\w.-]+", need).group().lower().replace("-", "_") for need in needs}

    def used(files):
        tops = {module.split(".")[0] for path in files for module in imported(path)} - set(sys.stdlib_module_names)
        packages = {providers[top][0].lower().replace("-", "_") for top in tops if top in providers}
        return packages - {"tplab", "tplab_course"}

    library, course = (tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
                       for folder in (".", "notebooks"))
    providers = metadata.packages_distributions()
    declared, extras = names(library["dependencies"]), library["optional-dependencies"]
    beside = names(course["dependencies"]) - {"tplab"}  # what the course needs and the library does not
    testing = {ROOT / "notebooks/course/lab/testing.py", ROOT / "notebooks/conftest.py"}  # what `launch test` runs
    taught, tests = used(set(python_files("notebooks")) - testing), used({*python_files("tests"), *testing})
    assert used(python_files("tplab")) == declared, "what the library imports, and pyproject.toml names"
    assert taught - declared - beside == set(), "imported by the course but in neither pyproject.toml"
    assert beside - taught == RUN_ONLY and not beside & declared, "in notebooks/pyproject.toml but not imported"
    assert tests - declared - beside <= names(extras["test"]) | names(extras["browser"]), "of tests only, so an extra"
    assert names(extras["test"]) - tests == TEST_ONLY and not names(extras["test"]) & (declared | beside)


def test_conda_environment_installs_the_same_project():
    text = (ROOT / "environment.yml").read_text()
    needs = re.findall(r"^\s+- (\w.*)$", text.split("dependencies:")[1], re.MULTILINE)
    assert [need.split()[0] for need in needs] == ["python", "pip", "pip:"]
    assert re.search(r"- pip:\n\s+- -e \.\[test\]\n\s+- -e \./notebooks\n", text)


def test_the_library_is_installed_alone_and_the_course_beside_it():
    """What setuptools finds: folders whose names fit; one without an __init__.py would be left out."""
    for folder, top in ((".", "tplab"), ("notebooks", "course")):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        assert project["tool"]["setuptools"]["packages"]["find"] == {"include": [f"{top}*"]}
        fitting = [path.name for path in (ROOT / folder).iterdir() if path.is_dir() and path.name.startswith(top)]
        assert [name for name in fitting if not name.endswith(".egg-info")] == [top]
        rooms = {path.parent for path in python_files(f"{folder}/{top}")}
        assert not [room for room in rooms if not (room / "__init__.py").exists()]


@pytest.mark.parametrize("name", ["launch", "pyproject.toml", "notebooks/pyproject.toml", "environment.yml",
                                  ".ci/run"])
def test_installing_names_no_host(name):
    assert "://" not in (ROOT / name).read_text()


def test_files_fit_in_the_head():
    files = [*python_files("tplab", "notebooks", "tests"), ROOT / "launch"]
    long = {str(path.relative_to(ROOT)): lines for path in files
            if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400}  # fmt: skip
    assert not long


def test_top_level_holds_only_what_the_layout_names():
    names = {path.relative_to(ROOT).parts[0] for path in files_under_git()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_no_file_holds_a_path_of_one_machine():
    own = {ROOT / "tests/test_notebooks.py", ROOT / "tests/test_house.py"}  # they hold the patterns
    pattern = re.compile(r"(?<![\w.:/-])/(?:home|Users|root|work|farm|tmp)/[\w.]")
    found = {}
    for path in files_under_git():
        if path not in own and path.suffix not in {".safetensors", ".png"} and path.name != "tokenizer.json":
            found.update({str(path.relative_to(ROOT)): hit.group()
                          for hit in pattern.finditer(path.read_text(encoding="utf-8"))})
    assert not found
