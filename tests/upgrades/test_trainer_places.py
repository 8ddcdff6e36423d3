from dataclasses import fields

from trl import SFTConfig


def test_the_trainer_has_no_new_argument_that_is_a_place() -> None:
    """The run's folder decides where files are written; sft/train/arguments.py refuses these."""
    words = ("dir", "path", "file", "folder")
    places = {field.name for field in fields(SFTConfig) if field.init and any(word in field.name for word in words)}
    assert places - {"profile"} == {"output_dir", "chat_template_path"}
