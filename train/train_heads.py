"""Train heads on a frozen target and keep the best by decoded tau.

accelerate launch train/train_heads.py model=llama3-8b heads=medusa data.train=[chats.jsonl]
accelerate launch --config_file conf/accelerate/ddp.yaml train/train_heads.py experiment=medusa_llama3-8b
"""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eval.threads import use_threads
from train.config import from_hydra
from train.display import configure_logging, console
from train.loop import train

CONF = str(Path(__file__).parents[1] / "conf")  # absolute: works as a script and with -m
USER_ERRORS = (ValueError, FloatingPointError, OSError)  # their messages say what to do


@hydra.main(version_base="1.3", config_path=CONF, config_name="train")
def main(composed: DictConfig) -> None:
    main_process = os.environ.get("RANK", "0") == "0"
    configure_logging(main_process)
    try:
        config = from_hydra(composed)
        use_threads(config.threads)
        train(config)
    except USER_ERRORS as error:
        if main_process:
            console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
