"""What is released: the wheel and the sdist, and what they say about themselves."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml

import twinboot

pytest.importorskip("hatchling", reason="the extra dev is not installed")
ROOT = Path(__file__).parents[1]
VERSION = twinboot.__version__


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "--directory", str(folder)], ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"twinboot-{VERSION}-py3-none-any.whl"


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder.parent).as_posix() for path in files}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        return message_from_string(files.read(f"twinboot-{VERSION}.dist-info/METADATA").decode())


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if not name.startswith(f"twinboot-{VERSION}.dist-info/")}
    assert names == sources(ROOT / "src" / "twinboot")
    assert {"twinboot/py.typed", "twinboot/experiments/templates/report.html"} <= names
    assert wheel.stat().st_size < 1e6


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    about = metadata(wheel)
    assert about["Version"] == VERSION
    assert about["License-Expression"] == "MIT"
    assert about["Requires-Python"] == ">=3.11"
    needed = [re.split(r"[<>=;]", line)[0] for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(needed) == ["numpy", "safetensors", "torch"]
    # hatchling refuses classifiers that do not exist.
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(about.get_all("Classifier", []))
    assert str(about.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    with zipfile.ZipFile(wheel) as files:
        scripts = files.read(f"twinboot-{VERSION}.dist-info/entry_points.txt").decode()
        licence = files.read(f"twinboot-{VERSION}.dist-info/licenses/LICENSE").decode()
    assert scripts.split("\n")[:2] == ["[console_scripts]", "twinboot = twinboot.experiments.cli:main"]
    assert licence == (ROOT / "LICENSE").read_text()


def test_the_sdist_has_what_tests_need_and_makes_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / f"twinboot-{VERSION}.tar.gz") as files:
        names = {name.partition("/")[2] for name in files.getnames()}
        files.extractall(tmp_path, filter="data")
    assert {"tests/test_package.py", "docs/play/twins.js", "examples/loop.py", "constraints.txt", "Makefile"} <= names
    run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        tmp_path / f"twinboot-{VERSION}",
    )
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(tmp_path / wheel.name) as two:
        assert {f.filename: f.CRC for f in one.infolist()} == {f.filename: f.CRC for f in two.infolist()}


def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, which a .pth file makes visible; an editable install of the
    package is not visible that way."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], tmp_path)
    own = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    (own / "dependencies.pth").write_text("\n".join({sysconfig.get_path(key) for key in ("purelib", "platlib")}))
    code = """
import torch, twinboot
from twinboot import Twins, fit
twins = Twins(torch.nn.Linear(3, 1))
twins.update()
print(twinboot.__file__)
"""
    # -I ignores PYTHONPATH, which could lead to the sources.
    assert Path(run([str(python), "-I", "-c", code], tmp_path).strip()) == own / "twinboot" / "__init__.py"
    script = [str(python), "-I", str(place / "bin" / "twinboot")]
    assert VERSION in run([*script, "--version"], tmp_path)


def test_one_version_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first
    assert first[1] == VERSION


def test_the_citation_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["preferred-citation"]["url"] == "https://arxiv.org/abs/2508.15019"


def test_public_ci_runs_the_commands_of_the_makefile() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"]["make"]["strategy"]["matrix"]["include"]
    assert [job["command"] for job in jobs] == ["make test", "make demo", "make docs"]
    assert {"on", True} & set(workflow)  # in YAML 1.1, `on` is true


@pytest.mark.parametrize("name", ["bug", "idea", "result"])
def test_issue_templates_are_forms(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in form["body"])
