"""The sessions of this repository; `nox -l` lists them, README.md says when to use which.

    nox -s train                    train the demo model on the text that every machine has
    nox -s ut                       test every package, each as its wheel alone
    nox -s "ut(hp-config)"          test one package

Every environment is installed under constraints.txt. Sessions use uv where it is installed, virtualenv otherwise.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("hp-protocols", "hp-config", "hp-components", "hp-models", "hp-compile", "hp-trainer")

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["ut"]


# ---- what a user runs ----------------------------------------------------------------------------------------


@nox.session
def train(session: nox.Session) -> None:
    """Train the debug model on this machine's own text; options go after --, as in `nox -s train -- --nproc 2`."""
    install_everything(session)
    recipe = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel")
    session.run("hp", "train", *recipe, *session.posargs, env={"HP_STARTED_BY": "nox -s train --"})


@nox.session(requires=["build"])
@nox.parametrize("package", [nox.param(name, id=name, tags=[name]) for name in PACKAGES])
def ut(session: nox.Session, package: str) -> None:
    """Unit tests of one package: its wheel alone in a fresh environment, every submodule imported, then its tests."""
    settings = read_settings(package)
    wheel = wheel_of(package)
    install(session, str(wheel))
    import_all = (str(ROOT / "tools" / "import_all.py"), str(package_dir(package)))
    outside = session.create_tmp()
    session.chdir(outside)
    session.run("python", *import_all, "--bare", env=CLEAN)
    if settings["test-extras"]:
        install(session, f"{wheel}[{','.join(settings['test-extras'])}]")
        session.run("python", *import_all, "--extras", *settings["test-extras"], env=CLEAN)
    check_torch(session)
    install(session, *settings["test-requirements"])
    session.run("python", "-m", "pytest", str(package_dir(package) / "tests"), *session.posargs, env=CLEAN)


@nox.session
def integration(session: nox.Session) -> None:
    """Tests over several packages and processes: training runs, resume, the planted faults of `contracts`."""
    install_everything(session)
    install(session, *test_requirements_of("integration"), *test_requirements_of("contracts"))
    session.run("python", "-m", "pytest", "tests_integration", *session.posargs, env=CLEAN)


@nox.session
def align8(session: nox.Session) -> None:
    """The alignment matrix on 8 processes: legacy, eager, graph, bit for bit; options go after --."""
    install_everything(session)
    session.run("python", "-m", "align8", *session.posargs, env={**CLEAN, "PYTHONPATH": str(ROOT / "tools")})


# ---- what keeps the repository sound -------------------------------------------------------------------------


@nox.session
def contracts(session: nox.Session) -> None:
    """Who imports whom, undeclared dependencies, private names, version ranges, lint, formatting, types."""
    install_everything(session)
    install(session, *test_requirements_of("contracts"))
    session.run("python", "tools/contracts.py", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build the six wheels into dist/."""
    install(session, "hatchling", "build")
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES:
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", str(DIST), str(package_dir(package)), silent=True
        )
    session.log("%d files in %s", len(list(DIST.iterdir())), DIST)


@nox.session(requires=["build"])
def wheels(session: nox.Session) -> None:
    """Check the built wheels: metadata, contents, declared requirements, what must import without torch."""
    install(session, "twine", "check-wheel-contents", "packaging")
    files = sorted(str(path) for path in DIST.iterdir())
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", *[name for name in files if name.endswith(".whl")])
    session.run("python", "tools/check_wheels.py", str(DIST))
    # hp-compile requires torch; the part of it that plans must work before torch is installed.
    session.install("--no-deps", *[str(wheel_of(name)) for name in ("hp-protocols", "hp-config", "hp-compile")])
    install(session, "pyyaml")
    session.run("python", "tools/check_torch_free.py", env=CLEAN)


@nox.session(requires=["build"], venv_backend="uv")
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def lowest(session: nox.Session, package: str) -> None:
    """Unit tests of one package with the lowest versions that its pyproject allows; needs uv."""
    settings = read_settings(package)
    # torch first, by the pin: the lowest torch of the registry is a CUDA build of the same version.
    if "torch" in (package_dir(package) / "pyproject.toml").read_text():
        install(session, "torch")
        check_torch(session)
    # The folder, not the wheel: uv calls only what the command names direct, and a wheel's requirements are not.
    lowest_direct = ("--resolution", "lowest-direct", *links(), *FRESH)
    session.install(*lowest_direct, editable_spec(package), "packaging>=24.0")
    session.run("python", "tools/check_lowest.py", str(package_dir(package)), *settings["test-extras"], env=CLEAN)
    frozen = Path(session.create_tmp()) / "installed.txt"
    frozen.write_text(session.run("uv", "pip", "freeze", "--quiet", silent=True, external=True) or "")
    session.install("--constraint", str(frozen), *links(), *settings["test-requirements"])
    session.chdir(session.create_tmp())
    session.run("python", "-m", "pytest", str(package_dir(package) / "tests"), *session.posargs, env=CLEAN)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks under tools/bench, on demand: `nox -s bench` lists them, `nox -s bench -- NAME` runs one."""
    files = sorted((ROOT / "tools" / "bench").glob("*.py"))
    names = [path.stem for path in files if "__main__" in path.read_text()]  # the others are what those share
    if not session.posargs:
        session.log("benchmarks: %s", ", ".join(names) or "none yet")
        return
    name, *arguments = session.posargs
    if name not in names:
        session.error(f"no benchmark {name!r}; there are: {', '.join(names)}")
    install_everything(session)
    session.run("python", f"tools/bench/{name}.py", *arguments, env=CLEAN)


# ---- helpers -------------------------------------------------------------------------------------------------

# Without the user's site packages and PYTHONPATH nothing but the environment under test is importable.
CLEAN = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}


def install(session: nox.Session, *requirements: str) -> None:
    """Install under constraints.txt; our own wheels in dist/ and the folders of PIP_FIND_LINKS may serve them."""
    fresh = FRESH if session.venv_backend == "uv" else ()
    session.install("--constraint", str(CONSTRAINTS), *links(), *fresh, *requirements)


# uv keeps what it has unpacked by name and version, and ours keep their version while they change.
FRESH = tuple(word for package in PACKAGES for word in ("--refresh-package", package))


def links() -> list[str]:
    """Where wheels may come from besides the registry, as options of pip and uv.

    Given in one go, since the option replaces the environment variable; uv does not read pip's settings at all.
    """
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    if DIST.is_dir():
        folders.append(str(DIST))
    return [word for folder in folders for word in ("--find-links", folder)]


def install_everything(session: nox.Session) -> None:
    """The six packages from the checkout, editable, with what they require."""
    editable = [word for package in PACKAGES for word in ("--editable", editable_spec(package))]
    install(session, *editable)
    check_torch(session)


def check_torch(session: nox.Session) -> None:
    """Stop early where another torch than the pinned one slipped in (a CUDA build costs gigabytes)."""
    session.run("python", str(ROOT / "tools" / "check_torch.py"), str(CONSTRAINTS), env=CLEAN)


def package_dir(package: str) -> Path:
    return ROOT / "packages" / package


def editable_spec(package: str) -> str:
    extras = read_settings(package)["test-extras"]
    return str(package_dir(package)) + (f"[{','.join(extras)}]" if extras else "")


def wheel_of(package: str) -> Path:
    found = list(DIST.glob(f"{package.replace('-', '_')}-*.whl"))
    if len(found) != 1:
        raise RuntimeError(f"expected one wheel of {package} in {DIST}, found {found}; run `nox -s build`")
    return found[0]


def read_settings(package: str) -> dict[str, list[str]]:
    """What a package's pyproject says about its tests: the extras they need and their own requirements."""
    data = tomllib.loads((package_dir(package) / "pyproject.toml").read_text())
    ours = data.get("tool", {}).get("hyper-parallel", {})
    return {"test-extras": ours.get("test-extras", []), "test-requirements": data["dependency-groups"]["test"]}


def test_requirements_of(group: str) -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"][group]
