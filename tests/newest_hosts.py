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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, version
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from packaging.version import Version

ROOT = Path(__file__).parents[1]
# Where packages are that tests have: in this environment, and in the folder of `make hosts`.
INSTALLED = [*sys.path, str(Path(sys.prefix) / "hosts")]
# Arguments of pytest, by the name of the package.
HOSTS: dict[str, tuple[str, ...]] = {
    "transformers": ("tests/hf", "--ignore=tests/hf/test_trl.py"),
    "trl": ("tests/hf/test_trl.py", "-m", "slow"),
    "torchtitan": ("tests/torchtitan",),
}


@dataclass(frozen=True)
class HostResult:
    """What became of one host.

    pinned, newest: versions, "none" where there is none. outcome: how many tests passed and failed, or why none ran.
    failures: tests that failed, each with the first line of its error.
    """

    host: str
    pinned: str
    newest: str
    outcome: str
    failures: Sequence[tuple[str, str]] = ()
    broken: bool = True


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
    results = []
    for host in dict.fromkeys(given.host or HOSTS):
        started = time.monotonic()
        result = tested(host, given.folder.absolute() / host, given.pytest)
        results.append(result)
        print(f"{host}: {result.outcome} in {time.monotonic() - started:.0f} s", flush=True)
    print(summary(results))
    return int(any(result.broken for result in results))


def tested(host: str, folder: Path, more: Sequence[str]) -> HostResult:
    """Returns the result of the tests of ``host`` with its newest release, which is put into ``folder``.

    more: arguments of pytest.
    """
    pinned, newest = version_in(INSTALLED, host), "none"
    try:
        newest = newest_release(host)
        install(host, newest, folder)
    except ValueError as error:
        return HostResult(host, pinned, newest, "not installed", [("pip", str(error))])
    print(f"{host}: testing {newest}; pinned is {pinned}", flush=True)
    report = folder / "tests.xml"
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    # With -v, files are named while they run. xunit1 is the form that has the file of each test.
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *HOSTS[host], *more]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if not report.exists():
        return HostResult(host, pinned, newest, f"pytest ended with {code}")
    passed, failures = outcomes(report)
    # pytest ends with another code than 1 where no test ran, too.
    outcome = f"{passed} passed, {len(failures)} failed" if code in (0, 1) or failures else f"pytest ended with {code}"
    return HostResult(host, pinned, newest, outcome, failures, broken=code != 0)


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


def outcomes(report: Path) -> tuple[int, list[tuple[str, str]]]:
    """Returns how many tests passed, and those that failed with the first line of their error."""
    passed, failures = 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        found = {each.tag: each for each in case}
        if (failed := found.get("failure", found.get("error"))) is not None:
            name = "::".join(filter(None, [case.get("file"), case.get("name")]))
            lines = [line[1:].strip() for line in (failed.text or "").splitlines() if line.startswith("E ")]
            failures.append((name, next(iter(lines or failed.get("message", "").splitlines()), "no message")))
        else:
            passed += "skipped" not in found
    return passed, failures


def summary(results: Sequence[HostResult]) -> str:
    """Returns a table of hosts, and behind it the failures of each."""
    rows = [("host", "pinned", "newest", "tests")]
    rows += [(result.host, result.pinned, result.newest, result.outcome) for result in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
    for result in results:
        if result.broken:
            lines += ["", f"{result.host} {result.newest}: {result.outcome}"]
            lines += [f"  {test}\n      {error}" for test, error in result.failures]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
