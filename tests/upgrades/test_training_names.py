"""What sft/train/ relies on in the code of TRL and transformers: a new release that changes it fails here first."""

import inspect

import pytest
from transformers.integrations.integration_utils import TensorBoardCallback
from trl import SFTTrainer


@pytest.mark.parametrize(
    "name",
    [
        "_clip_grad_norm",
        "_get_grad_norm",
        "_get_num_items_in_batch",
        "_get_output_dir",
        "_get_train_sampler",
        "_load_from_checkpoint",
        "_load_rng_state",
        "_maybe_log_save_evaluate",
        "_prepare_for_training",
        "_run_epoch",
        "_save_checkpoint",
        "_save_optimizer_and_scheduler",
        "compute_loss",
        "create_accelerator_and_postprocess",
        "create_model_card",
        "create_optimizer",
        "create_scheduler",
        "get_batch_samples",
        "get_sp_size",
        "log",
    ],
)
def test_trls_trainer_has_the_methods_that_ours_overrides(name: str) -> None:
    assert callable(getattr(SFTTrainer, name))


def test_transformers_reads_the_folder_for_tensorboard_from_the_environment() -> None:
    assert "TENSORBOARD_LOGGING_DIR" in inspect.getsource(TensorBoardCallback)
