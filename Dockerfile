# The command `torchloom`. torch's default wheels run on a CPU and on GPUs; an index with CPU builds alone makes the image
# smaller, one of another CUDA version (cu126, ...) fits older drivers. Ranks of one host share memory.
#   docker build -t torchloom .                                        default wheels
#   docker build -t torchloom --build-arg TORCH_INDEX=URL .            those of another index
#   docker run --rm -it torchloom train --steps 20
#   docker run --rm -it --gpus all --ipc host torchloom train --nproc 8
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# torch.compile builds kernels where the program runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home loom

ARG TORCH_INDEX
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
    "$(grep '^torch==' /tmp/constraints.txt)"

# Written to while it is built; what is written is dropped.
RUN --mount=type=bind,target=/src,rw \
    pip install --no-cache-dir -c /src/constraints.txt /src

USER loom
WORKDIR /home/loom
ENTRYPOINT ["torchloom"]
CMD ["--help"]
