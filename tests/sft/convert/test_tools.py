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


LORA, FOUR, EIGHT = {"adapter": "lora"}, {"load_in_4bit": True}, {"load_in_8bit": True}
STOPPING = {"early_stopping_patience": 3, "eval_steps": 50, "save_steps": 100}
VARIANTS = {
    "peft_use_dora": True,
    "lora_modules_to_save": ["embed_tokens"],
    "lora_r": 8,
}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # TRL's defaults, where ours are others
    (
        TRL | {"use_peft": True},
        {
            "train.learning_rate": 2e-5,
            "train.lr_scheduler_type": "linear",
            "train.num_train_epochs": 3,
            "train.adam_beta2": 0.999,
        }
        | {"data.max_length": 1024, "data.packing": False, "data.overlong": "truncate"}
        | {"model.lora.lora_dropout": 0.05, "model.lora.target_modules": ("q_proj", "v_proj")},
    ),
    # it trains all tokens of `messages` unless told otherwise
    (HANDBOOK, {"data.loss_on": "all", "data.seed": 3, "data.train.0.epochs": 0.5, "data.train.0.weight": None}),
    (HANDBOOK | {"assistant_only_loss": True}, {"data.loss_on": "assistant"}),
    (TRL | {"completion_only_loss": True}, {"data.loss_on": "completion"}),
    (TRL | {"eval_strategy": "steps"}, {"data.held_out.0.path": "d", "data.held_out.0.split": "test"}),
    (TRL, {"data.held_out": None}),
    # a DeepSpeed file that is not here becomes ours of the same stage
    (LLAMA_FACTORY | {"deepspeed": "examples/ds_z3_config.json"}, {"train.deepspeed": "zero3"}),
    (LLAMA_FACTORY | {"deepspeed": "ds/zero2_offload.json"}, {"train.deepspeed": "zero2_offload"}),
    (LLAMA_FACTORY | {"deepspeed": "z0.json"}, {"train.deepspeed": None}),
    # of two engines DeepSpeed is used, as there
    (
        TRL | {"deepspeed": "ds/zero2.json", "fsdp": "full_shard", "fsdp_config": {"offload_params": True}},
        {"train.deepspeed": "zero2", "train.fsdp": None},
    ),
    # the last rate is a fraction of TRL's default, which the file does not state
    (
        TRL | {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
        {"train.learning_rate": 2e-5, "train.min_lr_ratio": 0.05},
    ),
    (AXOLOTL | {"optimizer": "adamw_bnb_8bit"}, {"train.optim": "adamw_8bit"}),
    (AXOLOTL | {"optimizer": "adamw_bnb_8bit", "deepspeed": "zero2.json"}, {"train.optim": "adamw"}),
    (AXOLOTL | {"optimizer": "adamw_bnb_8bit", "fsdp_config": {"fsdp_version": 2}}, {"train.optim": "adamw"}),
    (TRL | {"optim": "lion_8bit", "adam_beta1": 0.8}, {"train.optim": "lion", "train.adam_beta1": 0.9}),
    (TRL | {"optim": "schedule_free_adamw", "adam_beta1": 0.8}, {"train.optim": "adamw", "train.adam_beta1": 0.8}),
    # quantized weights need adapters
    (TRL | FOUR | {"use_peft": True}, {"model.quantization": "nf4", "model.bnb_4bit_use_double_quant": False}),
    (TRL | FOUR, {"model.quantization": None}),
    (AXOLOTL | EIGHT | LORA, {"model.quantization": "int8"}),
    (LLAMA_FACTORY | {"quantization_bit": 8}, {"model.quantization": "int8"}),
    # warmup in steps is a ratio below 1
    (TRL | {"warmup_steps": 7}, {"train.warmup_steps": 7, "train.warmup_ratio": None}),
    (TRL | {"warmup_steps": 0.1}, {"train.warmup_steps": 0, "train.warmup_ratio": 0.1}),
    # the eval loss is measured at checkpoints, and where there is an eval split
    (
        AXOLOTL | STOPPING | {"val_set_size": 0.1},
        {
            "train.load_best_model_at_end": True,
            "train.early_stopping_patience": 3,
            "train.save_steps": 50,
            "train.eval_steps": None,
        },
    ),
    (AXOLOTL | STOPPING, {"train.load_best_model_at_end": False, "train.early_stopping_patience": None}),
    (
        TRL | {"load_best_model_at_end": True, "metric_for_best_model": "eval_bleu", "eval_strategy": "epoch"},
        {"train.load_best_model_at_end": False},
    ),
    (
        AXOLOTL | VARIANTS | LORA | {"lora_target_linear": True},
        {"model.lora.use_dora": True, "model.lora.modules_to_save": ("embed_tokens",), "model.lora.r": 8}
        | {"model.lora.target_modules": "all-linear"},
    ),
    (AXOLOTL | VARIANTS, {"model.lora": None}),
    (
        AXOLOTL
        | {
            "datasets": [{"path": "d", "type": "alpaca", "split": "train[:20%]"}, {"path": "e", "split": "test"}],
            "val_set_size": 0.1,
        },
        {"data.train.0.split": "train", "data.train.0.epochs": 0.2, "data.train.1.split": "test", "data.held_out": 0.1}
        | {"data.train.0.format": "alpaca", "model.chat_template": "plain"},
    ),
    (
        AXOLOTL
        | {
            "fsdp": ["full_shard"],
            "fsdp_config": {"fsdp_offload_params": True, "fsdp_state_dict_type": "FULL_STATE_DICT"},
        },
        {"train.fsdp.offload_params": True, "train.fsdp.state_dict_type": "full"},
    ),
    # LLaMA-Factory trains adapters unless told otherwise
    (LLAMA_FACTORY, {"model.lora.r": 8, "model.lora.lora_alpha": 16}),
    (LLAMA_FACTORY | {"finetuning_type": "full", "lora_rank": 4}, {"model.lora": None}),
    (LLAMA_FACTORY | {"pissa_init": True, "pissa_iter": 4}, {"model.lora.init_lora_weights": "pissa_niter_4"}),
    (LLAMA_FACTORY | {"mask_history": True}, {"data.loss_on": "last_assistant"}),
    (
        TORCHTUNE,
        {"model.lora.r": 4, "model.lora.lora_alpha": 16, "model.lora.target_modules": ("q_proj", "o_proj")}
        | {"data.train.0.path": "yahma/alpaca-cleaned", "data.train.0.format": "alpaca", "data.train.0.epochs": 1}
        | {"data.held_out": 0.05, "data.loss_on": "all", "data.packing": False, "train.lr_scheduler_type": "constant"}
        | {"train.max_grad_norm": 0, "train.weight_decay": 0.01, "train.adam_beta2": 0.999},
    ),
    # TrainingArguments leave model and data to fill in
    (
        {"per_device_train_batch_size": 2, "fp16": False, "max_steps": -1, "save_steps": 0.1},
        {"model.name_or_path": "MODEL", "data.train": "DATA", "train.precision": "fp32", "train.learning_rate": 5e-5}
        | {"train.max_steps": None, "train.save_steps": 500},
    ),
]


@pytest.mark.parametrize(("config", "expected"), SETTINGS)
def test_what_a_config_becomes(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    recipe = recipe_of(tmp_path, config)

    def setting(key: str) -> Any:
        value: Any = recipe
        for name in key.split("."):
            value = value[int(name)] if name.isdigit() else getattr(value, name)
        return value

    assert {key: setting(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("theirs", "arguments", "ours"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 1e-6}, {"min_lr_ratio": 0.05}),
        ("cosine_with_min_lr", {"min_lr": 0}, {"lr_scheduler_type": "cosine"}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "linear"}, {"lr_decay_steps": 9, "lr_decay_type": "linear"}),
        ("polynomial", {"power": 2.0}, {"lr_scheduler_type": "polynomial", "lr_power": 2}),
        ("constant", {}, {"lr_scheduler_type": "constant", "warmup_steps": 0, "warmup_ratio": None}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"lr_scheduler_type": "cosine", "warmup_ratio": 0.2}),
    ],
)  # fmt: skip
def test_schedules(tmp_path: Path, theirs: str, arguments: dict[str, Any], ours: dict[str, Any]) -> None:
    schedule = {"lr_scheduler_type": theirs, "lr_scheduler_kwargs": arguments, "warmup_ratio": 0.2}
    train = recipe_of(tmp_path, TRL | {"learning_rate": 2e-5} | schedule).train
    assert {key: getattr(train, key) for key in ours} == ours


def test_what_axolotl_trains_is_what_is_not_frozen(tmp_path: Path) -> None:
    unfrozen = {"unfrozen_parameters": ["^lm_head.weight$", "layers.4[4-9]+.mlp"]}
    (pattern,) = recipe_of(tmp_path, AXOLOTL | unfrozen).model.freeze
    names = ["lm_head.weight", "x.lm_head.weight", "lm_head_weight", "model.layers.45.mlp.up", "model.layers.3.mlp.up"]
    assert [name for name in names if not re.search(pattern, name)] == ["lm_head.weight", "model.layers.45.mlp.up"]


def test_gpus_that_share_a_batch_count_once(tmp_path: Path) -> None:
    assert recipe_of(tmp_path, AXOLOTL | {"tensor_parallel_size": 2}, 8).train.global_batch_size == 2 * 4
    with pytest.raises(ConversionError, match="multiple of the 2"):
        convert(written(tmp_path, AXOLOTL | {"tensor_parallel_size": 2}), 3)


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
        (TRL | {"datasets": [{"path": "d", "columns": ["chosen", "rejected", "messages"]}]}, "DPO"),
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
    with pytest.raises(ConversionError, match="exists"):
        main(file, file, 4, as_json=False)


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
    assert "# Carried over with another meaning" in printed
    assert "\x1b" not in printed
    assert "\u2028" not in printed
