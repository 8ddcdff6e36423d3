"""What sft/train/ relies on in the code of TRL and transformers: a new release that changes it fails here first."""

import inspect
from dataclasses import fields

from transformers.integrations.integration_utils import TensorBoardCallback
from trl import SFTConfig, SFTTrainer

from sft.train.arguments import SECOND_WAYS

OVERRIDDEN = """
_clip_grad_norm _get_grad_norm _get_num_items_in_batch _get_output_dir _get_train_sampler _load_from_checkpoint _load_rng_state
_maybe_log_save_evaluate _prepare_for_training _run_epoch _save_checkpoint _save_optimizer_and_scheduler compute_loss
create_accelerator_and_postprocess create_model_card create_optimizer create_scheduler get_batch_samples get_sp_size log
"""


def test_trls_trainer_has_the_methods_that_ours_overrides() -> None:
    assert not [name for name in OVERRIDDEN.split() if not callable(getattr(SFTTrainer, name, None))]


def test_sftconfig_knows_what_the_recipe_may_not_set() -> None:
    """From transformers 5.23 on, where all of these exist."""
    known = {field.name for field in fields(SFTConfig) if field.init}
    assert SECOND_WAYS.keys() - known <= {"activation_checkpointing", "activation_checkpointing_kwargs"}


def test_the_trainer_has_no_new_argument_that_is_a_place() -> None:
    """The run's folder decides where files are written; sft/train/arguments.py refuses these."""
    words = ("dir", "path", "file", "folder")
    places = {field.name for field in fields(SFTConfig) if field.init and any(word in field.name for word in words)}
    assert places - {"profile"} == {"output_dir", "chat_template_path"}


def test_transformers_reads_the_folder_for_tensorboard_from_the_environment() -> None:
    assert "TENSORBOARD_LOGGING_DIR" in inspect.getsource(TensorBoardCallback)
