"""ModelLearner: a model of transformers, whose dense parameters FSDP2 shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

from moesys.config import ClusterSpec, Strategy
from moesys.config.workload import ModelTraining
from moesys.hf.parallelize import parallelize
from moesys.lab.train.text import load_files
from moesys.moe.masters import DTYPES
from moesys.moe.runtime import MoERuntime

_WEIGHTS = ("*.safetensors*", "pytorch_model*.bin*")


class ModelLearner:
    """The model that ``workload`` names, on its data.

    Raises ValueError for a group that is not all ranks, a model that transformers does not know or moesys cannot run,
    and tokens beyond its vocabulary.
    """

    def __init__(
        self,
        strategy: Strategy,
        cluster: ClusterSpec,
        workload: ModelTraining,
        seed: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        if not dist.is_initialized() or group not in (None, dist.group.WORLD):
            raise ValueError(
                "workload=ms.models.ModelTraining(...) trains on all ranks of the default process group; make one"
            )
        config = _config(workload)
        self.text = load_files(workload.data, workload.tokenizer, config.vocab_size)
        self.model: Any = _model(workload, config, seed).to(device).train()
        if workload.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._strategy, self._cluster = strategy, cluster
        self._device, self._dtype = device, DTYPES[workload.dtype]
        self._router_loss_coef = getattr(config, "router_aux_loss_coef", 0.0)
        self._num_ranks = dist.get_world_size()

    def link(self) -> MoERuntime:
        mesh = init_device_mesh(self._device.type, (self._num_ranks,), mesh_dim_names=("ep",))
        dtype = None if self._dtype == torch.float32 else self._dtype
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
        return parallelize(self.model, self._strategy, mesh, policy=policy, cluster=self._cluster)

    def losses(self, inputs_BC: Tensor, targets_BC: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(input_ids=inputs_BC, use_cache=False)
        nats_N = functional.cross_entropy(outputs.logits.flatten(0, 1).float(), targets_BC.flatten(), reduction="none")
        router_loss = getattr(outputs, "aux_loss", None)
        return nats_N, nats_N.new_zeros(()) if router_loss is None else self._router_loss_coef * router_loss

    def backward(self, loss: Tensor) -> None:
        # FSDP's gradients are means over ranks.
        (loss * self._num_ranks).backward()

    def sync_gradients(self) -> None:
        pass


def _config(workload: ModelTraining) -> Any:
    fields = workload.config_fields
    kind = str(fields.pop("model_type", None))
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"model={workload.model!r}: transformers knows no model_type={kind!r}")
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
    # The validators of transformers raise classes of their own, with messages of several lines.
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"model={workload.model!r}: transformers refuses its config.json: {words}") from error
    # Without this, transformers may ask whether to run the code that the configuration names.
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model={workload.model!r}: transformers {transformers.__version__} has no language model of model_type="
            f"{kind!r}, and code that config.json names is not run; take a model that transformers has"
        )
    return config


def _model(workload: ModelTraining, config: Any, seed: int) -> Any:
    transformers.utils.logging.disable_progress_bar()
    folder = Path(os.path.expanduser(workload.model))
    learners: Any = transformers.AutoModelForCausalLM
    # The seed counts even if the weights are read, because dropout is drawn, the same for every strategy.
    torch.manual_seed(seed)
    if not any(any(folder.glob(names)) for names in _WEIGHTS):
        return learners.from_config(config, dtype=torch.float32)
    try:
        model, told = learners.from_pretrained(
            folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    # The readers of transformers raise classes of their own.
    except Exception as error:
        raise ValueError(f"model={workload.model!r}: its weights cannot be read: {error}") from error
    if wanting := sorted([*told["missing_keys"], *(each[0] for each in told["mismatched_keys"])]):
        raise ValueError(
            f"model={workload.model!r}: {wanting[0]} and {len(wanting) - 1} more of the model's weights are not in the "
            "folder, or of another shape than config.json says; give the whole model, or its config.json alone to "
            "draw weights"
        )
    return model
