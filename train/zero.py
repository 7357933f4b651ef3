"""Heads under DeepSpeed: ZeRO-1 shards the optimiser's state, ZeRO-2 the gradients too, ZeRO-3 the parameters too.

DeepSpeed keeps flat float32 partitions of many parameters. Its tensor fragments find one parameter's part in them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from heads.family import DraftHeads
from train.config import TrainerConfig
from train.optimizer import build_optimizer, stored_state
from train.parallel import Sharded

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Sharded):
    """ZeRO of stage 1 to 3. `model` is DeepSpeed's engine, which clips and steps itself."""

    model: Any

    def __init__(self, heads: DraftHeads, config: TrainerConfig, accelerator: Accelerator):
        super().__init__(heads, config, accelerator)
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        settings = plugin.deepspeed_config
        check_settings(settings)
        self.stage = plugin.zero_stage
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        # Accumulation is ours: a loss is divided by the labels of its whole step, and `accumulating` names the last.
        settings |= {
            "gradient_clipping": config.clip_norm,
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
        }
        self.model, self.optimizer = accelerator.prepare(heads, build_optimizer(self.parameters, config))

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        self.model.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> Tensor:
        self.model.step()  # does nothing where a gradient is not finite
        return torch.as_tensor(self.model.get_global_grad_norm(), device=self.accelerator.device)

    def whole_parameter(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        value = safe_get_full_fp32_param(parameter)
        assert value is not None
        return value

    def gather_moments(self) -> dict[str, Tensor]:
        self._link_states()
        return super().gather_moments()

    def whole_moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        state = self._states[self._partitions[0]]
        if not state:  # before the first step
            return {}
        moments = {"step": state["step"].clone()}  # one for each parameter: files have no shared tensors
        for key in MOMENTS:
            value = safe_get_full_optimizer_state(parameter, key)
            assert value is not None
            moments[key] = value
        return moments

    def restore(self, moments: dict[str, Tensor]) -> None:
        states = {name: stored_state(name, shape, moments) for name, shape in self.shapes.items()}
        steps = {state["step"].item() for state in states.values() if state}
        if not steps:
            return
        assert len(steps) == 1, f"parameters were stepped {steps} times, but ZeRO counts once for all"
        for partition in self._partitions:
            zeros = {key: torch.zeros_like(partition) for key in MOMENTS}
            step = torch.tensor(max(steps), device=partition.device)
            self._states[partition] = {"step": step, **zeros}
        self._link_states()
        for name, parameter in self.parameters.items():
            for key in MOMENTS if states[name] else ():
                self._set_moment(parameter, key, states[name][key].to(self.accelerator.device))

    @property
    def _states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of the AdamW inside DeepSpeed's optimiser, by partition."""
        return self.model.optimizer.optimizer.state

    @property
    def _partitions(self) -> list[Tensor]:
        """This process's flat parts of the parameters."""
        zero = self.model.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _link_states(self) -> None:
        """Let parameters find their moments in the partitions.

        DeepSpeed 0.19 does it once, after its first group has stepped, when the others have no moments yet.
        """
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        if self.stage < 3 and self._states[self._partitions[0]]:
            for parameters, partition in zip(self.model.optimizer.bit16_groups, self._partitions, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, partition, self._states)

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, value, key)
            return
        # DeepSpeed's own cut of a whole moment fails where the number of processes does not divide its size.
        size = parameter.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
        padded = F.pad(value.flatten(), (0, size * self.accelerator.num_processes - value.numel()))
        part = padded[size * self.accelerator.process_index :][:size]
        safe_set_local_optimizer_state(parameter, part, key)


def check_settings(settings: dict[str, Any]) -> None:
    """Raise ValueError for settings of DeepSpeed under which heads would not be trained or saved as they should."""
    zero = settings["zero_optimization"]
    offloads = [
        name for name in ("offload_optimizer", "offload_param") if zero.get(name, {}).get("device", "none") != "none"
    ]
    low = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled")]
    problem = ""
    if zero.get("stage", 0) == 0:
        problem = "zero_stage=0 shards nothing; launch with conf/accelerate/ddp.yaml"
    elif offloads:
        problem = f"{offloads[0]} must have the device none, since moments in CPU memory would not be saved"
    elif low:
        problem = f"{low[0]} must be off, since masters are float32; trainer.precision says what heads compute in"
    if problem:
        raise ValueError(f"DeepSpeed: {problem}; see conf/accelerate/zero3.yaml")
