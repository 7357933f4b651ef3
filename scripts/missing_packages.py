"""Which packages are missing or of another version than pyproject.toml asks for, by name; exit code 1 if any.

python scripts/missing_packages.py torch transformers     # only these; without names, all that the project needs
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def problems(names: list[str]) -> list[str]:
    """One line for each package of `names` (empty: all dependencies) that is not as the project needs it."""
    needed = [Requirement(line) for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]]
    if unknown := sorted(set(names) - {requirement.name for requirement in needed}):
        raise ValueError(f"{', '.join(unknown)}: not among the dependencies in pyproject.toml; name those only")
    lines = []
    for requirement in needed:
        if names and requirement.name not in names:
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            lines.append(f"{requirement}: missing")
            continue
        # The part of a version behind "+" names the build (2.11.0+cu130), and a build of a release is no pre-release.
        if not requirement.specifier.contains(found.split("+")[0], prereleases=True):
            lines.append(f"{requirement}: found {found}")
    return lines


def main() -> None:
    try:
        lines = problems(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    for line in lines:
        print(line)
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
