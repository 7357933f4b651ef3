"""How the rows of a log were made, noted beside it: a run that goes on must make the rest in the same way.

    answers.jsonl                  one row for each answer
    answers.jsonl.settings.json    {"seed": 0, "sampling.temperature": 0.3, ...}, written before the first row

Training reads the rows alone.
"""

import json
from pathlib import Path
from typing import Any

from data.disk import write_whole
from data.regenerate import GO_ON, AnswerLog


def settings_path(log: Path) -> Path:
    """Where the settings of a log are noted."""
    return log.with_name(f"{log.name}.settings.json")


def keep_to_settings(log: AnswerLog, settings: dict[str, Any]) -> None:
    """Note `settings` (JSON values) if `log` is empty, else require those by which its rows were made.

    Raises:
        ValueError: naming the settings that differ; or if nobody knows how the rows were made.
        OSError: if the note cannot be written.
    """
    path = settings_path(log.path)
    if not log.rows:
        write_whole(path, json.dumps(settings, indent=2, sort_keys=True) + "\n", GO_ON)
        return
    try:
        noted = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{log.path} holds {len(log.rows)} rows, but how they were made cannot be read ({error}); give another "
            f"output=, or, if they were made by the settings of now, write these into {path}: {json.dumps(settings)}"
        ) from error
    differing = [
        f"{name}: {noted.get(name)} before, {value} now" for name, value in settings.items() if noted.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"{log.path} holds {len(log.rows)} rows that were made by other settings ({', '.join(differing)}); "
            "restore these to go on, or give another output="
        )
