"""Make lm_eval's `vllm` model ask what its `hf` model asks.

Written against the sources of lm_eval and vLLM, and never run with vLLM itself, which needs a GPU: the tests replace it with a stand-in
that answers with transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.models.generation import encode_as_hf, extensions, make_request, render_chat, special_tokens
from eval.models.target import Target
from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def vllm_arguments(target: Target, tokenizer: str, settings: Settings) -> dict[str, Any]:
    """The arguments of lm_eval's `vllm` model.

    Args:
        target: The model.
        tokenizer: Folder of the tuned model's tokenizer.
        settings: Of the evaluation.
    """
    return {
        "pretrained": target.model,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "tokenizer": tokenizer,
        "dtype": settings.dtype,
        "max_model_len": settings.max_length,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "add_bos_token": settings.add_bos_token,
        "enable_thinking": settings.enable_thinking,
        **settings.backend_settings,
        # Else each served model's own generation config would decide how it samples and repeats.
        "generation_config": "vllm",
        **target.vllm,
    }


def load_vllm(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> Any:
    """lm_eval's `vllm` model that begins, ends and samples its answers as `hf` does."""
    from lm_eval.models.vllm_causallms import VLLM

    special = special_tokens(tokenizer)

    class AsHf(VLLM):  # type: ignore[misc]  # lm_eval ships no types
        """Without the differences from `hf`."""

        def tok_encode(self, string: Any, add_special_tokens: bool | None = None, **_: Any) -> Any:
            if isinstance(string, str):
                own = settings.add_bos_token if add_special_tokens is None else add_special_tokens
                bos = None if add_special_tokens is not None else str(tokenizer.decode(self.prefix_token_id))
                return encode_as_hf(tokenizer, string, own, bos)
            return [encode_as_hf(tokenizer, one, settings.add_bos_token, tokenizer.bos_token) for one in string]

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return render_chat(tokenizer, settings, chat_history, add_generation_prompt)

        @staticmethod
        def modify_gen_kwargs(
            gen_kwargs: dict[str, Any], eos: Any = None, default_max_gen_toks: int = 256
        ) -> tuple[dict[str, Any], list[str], int]:
            request = make_request(gen_kwargs, settings, special)
            asked = {**request.sampling, **extensions(request), "skip_special_tokens": True}
            return asked, request.until, request.max_tokens

        def _model_generate(
            self, requests: list[list[int]], generate: bool = False, sampling_params: Any = None
        ) -> Any:
            outputs = super()._model_generate(requests, generate, sampling_params)
            for output in outputs if generate else ():
                # vLLM's own text continues the prompt's, with a space before the first word where `hf` has none.
                answer = output.outputs[0]
                answer.text = tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
            return outputs

    return AsHf(**vllm_arguments(target, tokenizer.name_or_path, settings))


def release(model: Any) -> None:
    """End vLLM's engine, whose process holds the GPUs that the next model needs."""
    core = getattr(getattr(getattr(model, "model", None), "llm_engine", None), "engine_core", None)
    if core is not None:
        core.shutdown()
