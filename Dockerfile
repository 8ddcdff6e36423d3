# The repository with its pinned stack (requirements.lock), for one machine or for the pods of scripts/kubernetes/pytorchjob.yaml.
#
#   docker build -t sft-recipes .                                     with CUDA: PyPI's torch, which also runs on a CPU
#   docker build -t sft-recipes --build-arg TORCH_BACKEND=cpu .       without, for machines that have no GPU: smaller by gigabytes
#   docker build -t sft-recipes --build-arg TORCH_BACKEND=cu126 .     with another CUDA than that of PyPI's torch
#
#   docker run --rm -v "$PWD/outputs:/workspace/outputs" sft-recipes bash scripts/sft.sh recipes/tiny.yaml
#   docker run --rm --gpus all --shm-size 16g -v "$PWD/outputs:/workspace/outputs" sft-recipes bash scripts/sft.sh recipes/qwen3b.yaml
ARG BASE=docker.io/library/debian:bookworm-slim
FROM ${BASE}
# A compiler and Python's headers for DeepSpeed's CPU kernels and Triton's; git for the commit that run.json records.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ git python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY . .
ARG TORCH_BACKEND=
RUN UV_NO_CACHE=1 ${TORCH_BACKEND:+env UV_TORCH_BACKEND=$TORCH_BACKEND} bash scripts/setup.sh
# What the NVIDIA container toolkit gives to the container; without it they mean nothing.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PATH=/workspace/.venv/bin:$PATH
CMD ["bash"]
