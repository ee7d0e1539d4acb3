# The command `torchloom`, on the CPU:
#   docker build -t torchloom .
#   docker run --rm -it torchloom train --steps 20
# On GPUs (TORCH is the variant of torch's wheels; ranks of one host share memory):
#   docker build -t torchloom:cuda --build-arg TORCH=cu130 .
#   docker run --rm -it --gpus all --ipc host torchloom:cuda train --nproc 8
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# torch.compile builds kernels where the program runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home loom

ARG TORCH=cpu
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" \
    "$(grep '^torch==' /tmp/constraints.txt)"

# Written to while it is built; what is written is dropped.
RUN --mount=type=bind,target=/src,rw \
    pip install --no-cache-dir -c /src/constraints.txt /src

USER loom
WORKDIR /home/loom
ENTRYPOINT ["torchloom"]
CMD ["--help"]
