"""llama.cpp's server from a Python package, on a CPU: `pip install xllamacpp` is enough, nothing is built.

    python tests/llama_server.py [--port 8000] [--exact] MODEL.gguf NAME

`--exact` leaves out what a GPU server trades digits for (flash attention, a cache in fp16). The address is printed once it answers.
"""

import argparse
import signal


def main() -> None:
    """Serve until ended."""
    import xllamacpp  # no part of the project

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("model")
    parser.add_argument("name")
    given = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias, parameters.port = given.model, {given.name}, given.port
    parameters.n_parallel, parameters.n_gpu_layers = 1, 0
    if given.exact:
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    print(f"{server.listening_address}/v1", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
