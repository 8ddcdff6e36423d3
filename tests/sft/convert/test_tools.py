"""What configs of each tool become, and which are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft import cli
from sft.convert.conversion import ConversionError, flatten
from sft.convert.main import convert, main, read_config, recipe_text
from sft.recipe.load import parse_recipe
from sft.recipe.schema import Recipe

TRL = {"model_name_or_path": "m", "dataset_name": "d", "per_device_train_batch_size": 2}
AXOLOTL = {
    "base_model": "m",
    "datasets": [{"path": "d", "type": "chat_template"}],
    "micro_batch_size": 2,
    "learning_rate": 1e-4,
}
LLAMA_FACTORY = {
    "model_name_or_path": "m",
    "stage": "sft",
    "dataset": "d",
    "template": "qwen",
    "per_device_train_batch_size": 2,
}
TORCHTUNE = {
    "output_dir": "/tmp/out",
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": None},
    "model": {
        "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
        "lora_attn_modules": ["q_proj", "output_proj"],
        "lora_rank": 4,
    },
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "m",
        "output_dir": "${output_dir}/x",
    },
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "split": "train[:95%]"},
    "dataset_val": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "split": "train[95%:]"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4},
    "batch_size": 2,
    "epochs": 1,
}
HANDBOOK = TRL | {"dataset_mixture": {"datasets": [{"id": "d", "weight": 0.5, "columns": ["messages"]}], "seed": 3}}
HANDBOOK.pop("dataset_name")


def written(folder: Path, values: Any, name: str = "theirs.yaml") -> Path:
    file = folder / name
    file.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return file


def recipe_of(folder: Path, values: dict[str, Any], gpus: int | None = 4) -> Recipe:
    """The recipe of a config, with every key accounted for."""
    file = written(folder, values)
    c = convert(file, gpus)
    given = set(flatten(read_config(file)))
    assert given <= c.carried.keys() | c.changed.keys() | c.dropped.keys()
    assert len(c.carried) + len(c.changed) + len(c.dropped) == len({*c.carried, *c.changed, *c.dropped})
    return parse_recipe(recipe_text(c, "sft convert"))


@pytest.mark.parametrize("config", [TRL, AXOLOTL, LLAMA_FACTORY, HANDBOOK, TORCHTUNE])
def test_the_batch_per_gpu_becomes_the_global_batch(tmp_path: Path, config: dict[str, Any]) -> None:
    recipe = recipe_of(tmp_path, config | {"gradient_accumulation_steps": 3}, 8)
    assert recipe.train.global_batch_size == 2 * 3 * 8


@pytest.mark.parametrize("config", [TRL, {"model_name_or_path": "m", "dataset_name": "d"}])
def test_without_gpus_it_is_refused_with_the_option(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConversionError, match=r"batch_size.*--gpus N"):
        convert(written(tmp_path, config), None)


def test_trl_keeps_its_own_defaults(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TRL | {"use_peft": True})
    assert (recipe.train.learning_rate, recipe.train.lr_scheduler_type, recipe.train.num_train_epochs) == (
        2e-5,
        "linear",
        3,
    )
    assert (recipe.data.max_length, recipe.data.packing, recipe.data.overlong) == (1024, False, "truncate")
    assert recipe.train.adam_beta2 == 0.999
    assert recipe.model.lora is not None
    assert (recipe.model.lora.lora_dropout, recipe.model.lora.target_modules) == (0.05, ("q_proj", "v_proj"))


def test_trl_trains_all_tokens_of_messages_unless_told_otherwise(tmp_path: Path) -> None:
    assert recipe_of(tmp_path, HANDBOOK).data.loss_on == "all"
    assert recipe_of(tmp_path, HANDBOOK | {"assistant_only_loss": True}).data.loss_on == "assistant"
    assert recipe_of(tmp_path, TRL | {"completion_only_loss": True}).data.loss_on == "completion"


def test_a_weight_of_the_handbook_is_a_fraction_of_the_rows(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, HANDBOOK)
    assert (recipe.sources[0].epochs, recipe.sources[0].weight, recipe.data.seed) == (0.5, None, 3)


def test_a_test_split_is_the_eval_split_where_it_was_evaluated(tmp_path: Path) -> None:
    held_out = recipe_of(tmp_path, TRL | {"eval_strategy": "steps", "eval_steps": 7}).data.held_out
    assert isinstance(held_out, tuple)
    assert (held_out[0].path, held_out[0].split) == ("d", "test")
    assert recipe_of(tmp_path, TRL).data.held_out is None


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("examples/ds_z3_config.json", "zero3"),
        ("ds/zero2_offload.json", "zero2_offload"),
        ("z0.json", None),
        ("mine.json", None),
    ],
)
def test_a_deepspeed_file_that_is_not_here_becomes_ours_of_the_same_stage(
    tmp_path: Path, path: str, ours: str | None
) -> None:
    assert recipe_of(tmp_path, LLAMA_FACTORY | {"deepspeed": path}).train.deepspeed == ours


@pytest.mark.parametrize(
    ("theirs", "arguments", "ours"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 1e-6}, {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.05}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 9, "decay_type": "linear"},
            {"lr_decay_steps": 9, "lr_decay_type": "linear"},
        ),
        ("polynomial", {"power": 2.0}, {"lr_scheduler_type": "polynomial", "lr_power": 2}),
        ("constant", {}, {"lr_scheduler_type": "constant", "warmup_steps": 0, "warmup_ratio": None}),
        ("constant_with_warmup", {}, {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.2}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"lr_scheduler_type": "cosine"}),
    ],
)
def test_schedules(tmp_path: Path, theirs: str, arguments: dict[str, Any], ours: dict[str, Any]) -> None:
    config = TRL | {
        "learning_rate": 2e-5,
        "lr_scheduler_type": theirs,
        "lr_scheduler_kwargs": arguments,
        "warmup_ratio": 0.2,
    }
    train = recipe_of(tmp_path, config).train
    assert {key: getattr(train, key) for key in ours} == ours


@pytest.mark.parametrize(
    ("theirs", "ours", "arguments"),
    [
        ("adamw_torch_fused", "adamw", {}),
        ("adamw_bnb_8bit", "adamw_8bit", {}),
        ("paged_adamw_8bit", "paged_adamw_8bit", {}),
        ("paged_adamw_32bit", "adamw", {}),
        ("lion_8bit", "lion", {}),
        ("adafactor", "adafactor", {}),
        ("schedule_free_adamw", "adamw", {}),
    ],
)
def test_optimizers(tmp_path: Path, theirs: str, ours: str, arguments: dict[str, float]) -> None:
    train = recipe_of(tmp_path, TRL | {"optim": theirs, "adam_beta1": 0.8}).train
    assert (train.optim, train.optim_args) == (ours, arguments)
    assert train.adam_beta1 == (0.8 if "adam" in ours else 0.9)


def test_8_bit_states_are_not_sharded(tmp_path: Path) -> None:
    config = AXOLOTL | {"optimizer": "adamw_bnb_8bit"}
    assert recipe_of(tmp_path, config).train.optim == "adamw_8bit"
    assert recipe_of(tmp_path, config | {"deepspeed": "zero2.json"}).train.optim == "adamw"
    assert recipe_of(tmp_path, config | {"fsdp_config": {"fsdp_version": 2}}).train.optim == "adamw"


def test_qlora_needs_adapters(tmp_path: Path) -> None:
    four, eight = {"load_in_4bit": True}, {"load_in_8bit": True}
    model = recipe_of(tmp_path, TRL | four | {"use_peft": True}).model
    assert (model.quantization, model.bnb_4bit_use_double_quant) == ("nf4", False)
    assert recipe_of(tmp_path, TRL | four).model.quantization is None
    assert recipe_of(tmp_path, AXOLOTL | eight | {"adapter": "lora"}).model.quantization == "int8"
    assert recipe_of(tmp_path, LLAMA_FACTORY | {"quantization_bit": 8}).model.quantization == "int8"


@pytest.mark.parametrize(("steps", "ours"), [(7, (7, None)), (0.1, (0, 0.1)), (0, (0, None))])
def test_warmup_in_steps_below_one_is_a_ratio(tmp_path: Path, steps: float, ours: tuple[int, float | None]) -> None:
    train = recipe_of(tmp_path, TRL | {"warmup_steps": steps}).train
    assert (train.warmup_steps, train.warmup_ratio) == ours


def test_early_stopping_measures_at_each_checkpoint(tmp_path: Path) -> None:
    stopping = {"early_stopping_patience": 3, "eval_steps": 50, "save_steps": 100}
    train = recipe_of(tmp_path, AXOLOTL | stopping | {"val_set_size": 0.1}).train
    assert (train.load_best_model_at_end, train.early_stopping_patience, train.save_steps, train.eval_steps) == (
        True,
        3,
        50,
        None,
    )
    train = recipe_of(tmp_path, AXOLOTL | stopping).train  # without an eval split nothing is compared
    assert (train.load_best_model_at_end, train.early_stopping_patience) == (False, None)
    train = recipe_of(
        tmp_path, TRL | {"load_best_model_at_end": True, "metric_for_best_model": "eval_bleu", "eval_strategy": "epoch"}
    ).train
    assert not train.load_best_model_at_end


def test_axolotls_fsdp_and_slices(tmp_path: Path) -> None:
    data = [
        {"path": "d", "type": "alpaca", "split": "train[:20%]"},
        {"path": "e", "type": "chat_template", "split": "test"},
    ]
    fsdp = {
        "fsdp": ["full_shard"],
        "fsdp_config": {"fsdp_offload_params": True, "fsdp_state_dict_type": "FULL_STATE_DICT"},
    }
    recipe = recipe_of(tmp_path, AXOLOTL | {"datasets": data, "val_set_size": 0.1} | fsdp)
    assert [(one.path, one.split, one.epochs) for one in recipe.sources] == [("d", "train", 0.2), ("e", "test", 1.0)]
    assert (recipe.sources[0].format, recipe.model.chat_template, recipe.data.held_out) == ("alpaca", "plain", 0.1)
    assert recipe.train.fsdp is not None
    assert (recipe.train.fsdp.offload_params, recipe.train.fsdp.state_dict_type) == (True, "full")


def test_what_axolotl_trains_is_what_is_not_frozen(tmp_path: Path) -> None:
    (pattern,) = recipe_of(
        tmp_path, AXOLOTL | {"unfrozen_parameters": ["^lm_head.weight$", "layers.4[4-9]+.mlp"]}
    ).model.freeze
    trained = [
        name
        for name in (
            "lm_head.weight",
            "x.lm_head.weight",
            "lm_head_weight",
            "model.layers.45.mlp.up",
            "model.layers.3.mlp.up",
        )
        if not re.search(pattern, name)
    ]
    assert trained == ["lm_head.weight", "model.layers.45.mlp.up"]


def test_adapter_variants(tmp_path: Path) -> None:
    variants = {
        "peft_use_dora": True,
        "lora_modules_to_save": ["embed_tokens"],
        "lora_rank_pattern": {"layers.0": 4},
        "lora_r": 8,
    }
    lora = recipe_of(tmp_path, AXOLOTL | variants | {"adapter": "lora", "lora_target_linear": True}).model.lora
    assert lora is not None
    assert (lora.use_dora, lora.modules_to_save, lora.rank_pattern, lora.r) == (
        True,
        ("embed_tokens",),
        {"layers.0": 4},
        8,
    )
    pissa = recipe_of(tmp_path, LLAMA_FACTORY | {"pissa_init": True, "pissa_iter": 4}).model.lora
    assert pissa is not None
    assert pissa.init_lora_weights == "pissa_niter_4"
    assert recipe_of(tmp_path, AXOLOTL | variants).model.lora is None


def test_gpus_that_share_a_batch_count_once(tmp_path: Path) -> None:
    assert recipe_of(tmp_path, AXOLOTL | {"tensor_parallel_size": 2}, 8).train.global_batch_size == 2 * 4
    with pytest.raises(ConversionError, match="multiple of the 2"):
        convert(written(tmp_path, AXOLOTL | {"tensor_parallel_size": 2}), 3)


def test_llama_factory_trains_adapters_unless_told_otherwise(tmp_path: Path) -> None:
    lora = recipe_of(tmp_path, LLAMA_FACTORY).model.lora
    assert lora is not None
    assert (lora.r, lora.lora_alpha) == (8, 16)
    assert recipe_of(tmp_path, LLAMA_FACTORY | {"finetuning_type": "full", "lora_rank": 4}).model.lora is None
    assert recipe_of(tmp_path, LLAMA_FACTORY | {"mask_history": True}).data.loss_on == "last_assistant"


def test_names_of_dataset_info_are_looked_up_where_it_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {
        "d": {"file_name": "d.json", "columns": {"prompt": "question", "response": "answer"}},
        "e": {"hf_hub_url": "me/e", "subset": "s"},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    sources = recipe_of(tmp_path, LLAMA_FACTORY | {"dataset": "d, e", "max_samples": 9}).sources
    assert (sources[0].path, sources[0].columns, sources[0].split) == (
        "data/d.json",
        {"instruction": "question", "output": "answer"},
        "train[:9]",
    )
    assert (sources[1].path, sources[1].name) == ("me/e", "s")


def test_torchtunes_components_and_defaults(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TORCHTUNE)
    lora = recipe.model.lora
    assert lora is not None
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (4, 16, ("q_proj", "o_proj"))
    assert (recipe.sources[0].path, recipe.sources[0].format, recipe.sources[0].epochs) == (
        "yahma/alpaca-cleaned",
        "alpaca",
        1,
    )
    assert (recipe.data.held_out, recipe.data.loss_on, recipe.data.packing) == (0.05, "all", False)
    train = recipe.train
    assert (train.lr_scheduler_type, train.max_grad_norm, train.weight_decay, train.adam_beta2) == (
        "constant",
        0,
        0.01,
        0.999,
    )


def test_a_training_arguments_file_leaves_model_and_data_to_fill_in(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"per_device_train_batch_size": 2, "fp16": False, "max_steps": -1, "save_steps": 0.1})
    assert (recipe.model.name_or_path, recipe.data.train) == ("MODEL", "DATA")
    assert (recipe.train.precision, recipe.train.learning_rate) == ("fp32", 5e-5)
    assert (recipe.train.max_steps, recipe.train.save_steps) == (None, 500)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TORCHTUNE | {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "DPO"),
        ({"model_name_or_path": "m", "template": "x", "infer_backend": "hf"}, "trains nothing"),
        ({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}, "train.deepspeed"),
        (AXOLOTL | {"rl": "dpo"}, "DPO"),
        (AXOLOTL | {"pretraining_dataset": [{"path": "d"}]}, "pretraining"),
        (AXOLOTL | {"processor_type": "AutoProcessor"}, "vision"),
        (LLAMA_FACTORY | {"stage": "pt"}, "pretraining"),
        (LLAMA_FACTORY | {"image_max_pixels": 9}, "vision"),
        (LLAMA_FACTORY | {"do_train": False, "do_predict": True}, "prediction"),
        (TRL | {"beta": 0.1}, "DPO"),
        (TRL | {"num_generations": 8}, "GRPO"),
        ({"compute_environment": "LOCAL_MACHINE", "num_processes": 8}, "accelerate launch"),
        ({"schema_version": 1, "version": 1, "model": {}}, "a recipe already"),
        ({"colour": "red"}, "colour"),
        ("just text", "no keys"),
        ("a: [", "neither YAML nor JSON"),
        ("base_model: &a [*a]", "aliases"),
    ],
)
def test_what_is_no_supervised_fine_tuning_is_refused_by_name(tmp_path: Path, config: Any, said: str) -> None:
    file = written(tmp_path, config)
    with pytest.raises(ConversionError, match=said):
        convert(file, 1)


def test_the_command_writes_a_recipe_with_comments_and_its_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, HANDBOOK | {"chat_template": "{% for m in messages %}{{ m }}{% endfor %}"})
    output = tmp_path / "ours" / "recipe.yaml"
    cli.run(["convert", str(file), "--gpus", "4", "-o", str(output), "--json"])
    lists = json.loads(capsys.readouterr().out)
    assert list(lists) == ["tool", "carried", "changed", "dropped"]
    assert lists["tool"] == "alignment-handbook"
    recipe = parse_recipe(output.read_text())
    assert recipe.model.chat_template == str(output.parent / "theirs.jinja")
    assert "for m in messages" in (output.parent / "theirs.jinja").read_text()
    assert "# per_device_train_batch_size: 2 per GPU x 1 accumulated x 4 GPUs" in output.read_text()
    cli.run(["convert", str(file), "--gpus", "8", "-o", str(output)])  # its own file is written again
    assert "Not carried over" in capsys.readouterr().out


def test_a_file_that_it_did_not_write_is_not_overwritten(tmp_path: Path) -> None:
    file = written(tmp_path, TRL)
    with pytest.raises(ConversionError, match="exists"):
        main(file, file, 4, as_json=False)


def test_what_it_prints_is_the_recipe_with_the_lists_as_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(written(tmp_path, TRL), None, 4, as_json=False)
    printed = capsys.readouterr().out
    assert parse_recipe(printed).train.global_batch_size == 8
    assert "# Carried over with another meaning" in printed


def test_what_others_wrote_cannot_end_a_comment_or_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {
        "chat_template": "a\u2028model: {name_or_path: evil}",
        "bad\x1b[2J\nmodel": 1,
        "special_tokens": {"pad_token": "\n\x85x"},
    }
    main(written(tmp_path, AXOLOTL | hostile, "a\nb.yml"), None, 4, as_json=False)
    printed = capsys.readouterr().out
    assert parse_recipe(printed).model.name_or_path == "m"
    assert "\x1b" not in printed
    assert "\u2028" not in printed
