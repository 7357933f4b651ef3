"""The target as llama.cpp reads it, and where llama.cpp's own programs lie."""

import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eval.serving.engine_process import tail, without_ours
from eval.serving.environment import EngineUnavailable
from heads.export.engines import OUTTYPES

logger = logging.getLogger(__name__)

SERVER, CONVERTER = "llama-server", "convert_hf_to_gguf.py"


@dataclass(frozen=True)
class TargetFile:
    """The target as a GGUF file: the one that is given, or what llama.cpp's converter makes of it when first asked.

    target: as the converter gets it. dtype: of the converted weights. folder: for the converted file.
    """

    given: str | None
    converter: str | None
    target: str
    dtype: str
    folder: Path

    @cached_property
    def path(self) -> Path:
        """The file.

        Raises:
            EngineUnavailable: if neither a file nor a converter is given, and no converter is on PATH.
            ValueError: if what is given does not exist, the target is no directory, or the converter refuses it.
        """
        if self.given is not None:
            if not Path(self.given).is_file():
                raise ValueError(f"target_gguf={self.given} does not exist; give the target's GGUF file")
            return Path(self.given).resolve()
        converter = find_program(CONVERTER, self.converter, "converter")
        if not Path(self.target).is_dir():
            raise ValueError(
                f"model.path={self.target} must be a directory, llama.cpp's converter reads no hub id; or give "
                "target_gguf=FILE"
            )
        return _convert(converter, Path(self.target), self.folder / "target.gguf", OUTTYPES[self.dtype])


def find_program(name: str, given: str | None, key: str) -> Path:
    """The given program, or the one of this name on PATH. key: the setting that gives it.

    Raises:
        EngineUnavailable: if none is given and none is on PATH.
        ValueError: if the given one does not exist.
    """
    if given is not None:
        if not Path(given).is_file():
            raise ValueError(f"{key}={given} does not exist; give the path of llama.cpp's {name}")
        return Path(given).resolve()
    found = shutil.which(name)
    if found is None:
        raise EngineUnavailable(f"llama.cpp is not here: no {name} on PATH; build it and give {key}=PATH")
    return Path(found)


def _convert(converter: Path, source: Path, file: Path, outtype: str) -> Path:
    """The converter stands in a checkout of llama.cpp, beside its `gguf-py`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    log = file.with_suffix(".log")
    command = [sys.executable, str(converter), str(source), "--outtype", outtype, "--outfile", str(file)]
    library = {"PYTHONPATH": str(converter.parent / "gguf-py")}
    logger.info("converting %s to %s", source, file)
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=without_ours() | library, check=False
        )
    if done.returncode or not file.exists():
        said = "\n  ".join(tail(log))
        raise ValueError(f"{converter} refused {source}; the end of {log}:\n  {said}")
    return file
