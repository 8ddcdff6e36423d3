"""Nothing is unpickled but tensors and plain values, whoever calls torch.load: a checkpoint may come from elsewhere.

DeepSpeed loads its part of a checkpoint with weights_only=False, which runs whatever the file says. torch has a switch over that;
what DeepSpeed's files hold besides tensors is named here.
"""

from __future__ import annotations

import os


def load_only_tensors(deepspeed: bool) -> None:
    """Have every torch.load of this process refuse foreign objects.

    Args:
        deepspeed: DeepSpeed is imported, and its checkpoints are to be loaded.
    """
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if not deepspeed:
        return
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch.serialization import add_safe_globals

    add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])
