# Images for k8s/ and k8s/sky.yaml, without root at run time:
#
#   docker build --target cpu  -t headrace:cpu  .
#   docker build --target cuda -t headrace:cuda .
#
# Versions are those of constraints.txt, with which the tests run.
FROM debian:bookworm-slim AS system
# g++ and Python.h: torch.compile and DeepSpeed compile at run time; tini: passes signals on and reaps processes
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --user-group --no-create-home --home-dir /tmp headrace
RUN python3 -m venv /opt/venv
# HOME is where caches go: in k8s/ the root file system is read-only, and /tmp is a volume
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONUNBUFFERED=1 NCCL_DEBUG=WARN
WORKDIR /opt/headrace
COPY constraints.txt ./

FROM system AS cpu
# torch's wheels without CUDA, a tenth of the size
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable .
RUN python -c 'import deepspeed, data_prep.sources._jsonl, torch; assert torch.version.cuda is None' && headrace --version
USER 1000:1000
ENTRYPOINT ["tini", "--"]
CMD ["headrace", "--help"]

FROM system AS cuda
# which of the driver's libraries the NVIDIA runtime puts into the container
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# PyPI's wheels of torch bring CUDA, cuDNN and NCCL; of the host only the driver is used
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable .
RUN python -c 'import data_prep.sources._jsonl, torch; assert torch.version.cuda' && headrace --version
USER 1000:1000
ENTRYPOINT ["tini", "--"]
CMD ["headrace", "--help"]
