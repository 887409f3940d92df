"""Tests moesys against the newest releases of transformers, TRL and torchtitan, and says what broke: ``make newest``.

Each release lies in a folder of its own, which tests have first on their path, together with packages that it needs and
that are missing here or older. torch and what is installed stay as they are, so that what breaks is the host's doing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, version
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

ROOT = Path(__file__).parents[1]
# Where packages are that tests have: in this environment, and in the folder of `make hosts`.
INSTALLED = [*sys.path, str(Path(sys.prefix) / "hosts")]
# Arguments of pytest, by the name of the package.
HOSTS: dict[str, tuple[str, ...]] = {
    "transformers": ("tests/hf", "--ignore=tests/hf/test_trl.py"),
    "trl": ("tests/hf/test_trl.py", "-m", "not gpu"),
    "torchtitan": ("tests/torchtitan",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if something broke, else 0."""
    parser = argparse.ArgumentParser(
        prog="newest_hosts.py",
        description="Test moesys against the newest releases of the trainers that it plugs into.",
        epilog="Exit code: 1 if a host could not be installed or a test failed. Example, for some tests of one host: "
        "newest_hosts.py --host transformers -- -k padding",
    )
    parser.add_argument("--host", choices=HOSTS, action="append", help="test this host; repeatable; all by default")
    parser.add_argument(
        "--folder", type=Path, default=Path(sys.prefix) / "newest", help="where releases go; default: %(default)s"
    )
    parser.add_argument("pytest", nargs="*", help="more arguments of pytest, after --")
    given = parser.parse_args(arguments)
    hosts = dict.fromkeys(given.host or HOSTS)
    outcomes = {host: tested(host, given.folder.absolute() / host, given.pytest) for host in hosts}
    for host, (_, outcome) in outcomes.items():
        print(f"{host}, of which {version_in(INSTALLED, host)} is pinned: {outcome}")
    return int(any(broke for broke, _ in outcomes.values()))


def tested(host: str, folder: Path, more: Sequence[str]) -> tuple[bool, str]:
    """Tests ``host`` with its newest release, which is put into ``folder``, where pytest names what broke. Returns
    whether something did, and a line.

    more: arguments of pytest.
    """
    try:
        newest = newest_release(host)
        install(host, newest, folder)
    except ValueError as error:
        return True, f"the newest release is not installed: {error}"
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=short", "-p", "no:cacheprovider", *HOSTS[host], *more]
    # The lines of what failed are cut at the width of a terminal.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "300"}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return code != 0, f"tests of {newest} " + (f"failed, and pytest ended with {code}" if code else "passed")


def version_in(paths: Sequence[str], name: str) -> str:
    """Returns the version of a package that is installed in the first of ``paths`` that has it, "none" if none has."""
    found = next(iter(Distribution.discover(name=name, path=list(paths))), None)
    return "none" if found is None else found.version


def newest_release(host: str) -> str:
    """Returns the version of the newest release, whatever it needs. Raises ValueError where pip finds none."""
    print(f"{host}: looking for the newest release", flush=True)
    return next(iter(planned(["--no-deps", host]).values()), version_in(INSTALLED, host))


def install(host: str, newest: str, folder: Path) -> None:
    """Puts a release of ``host`` and what it needs into ``folder``, which is emptied first, where these are not here.

    Raises ValueError where pip cannot install it beside the torch that is here.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if newest == version_in(INSTALLED, host):
        return
    with TemporaryDirectory() as temporary:
        constraints = Path(temporary) / "constraints.txt"
        constraints.write_text(f"torch=={version('torch')}\n")
        wanted = planned(["--constraint", str(constraints), f"{host}=={newest}"])
    # What is here is newer than some want, and tests pass with it.
    wanted = {name: each for name, each in wanted.items() if is_newer(each, version_in(INSTALLED, name))}
    releases = [f"{name}=={each}" for name, each in wanted.items()]
    print(f"{host}: installing {', '.join(releases)}", flush=True)
    pip(["--no-deps", "--target", str(folder), *releases])


def is_newer(found: str, installed: str) -> bool:
    return installed == "none" or Version(found) > Version(installed)


def planned(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the packages, with their versions, that pip would install beside those that are here."""
    with TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        pip(["--dry-run", "--report", str(report), "--upgrade", *arguments])
        described = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {each["name"]: each["version"] for each in described}


def pip(arguments: Sequence[str]) -> None:
    """Raises ValueError with what pip says where it fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(INSTALLED)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith("WARNING")]
        print("\n".join(lines), flush=True)
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise ValueError([*errors, *lines, f"pip ended with {done.returncode}"][0])


if __name__ == "__main__":
    sys.exit(main())
