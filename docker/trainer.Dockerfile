# The trainer image: torchrun, PyTorch with CUDA, holdfast_trainer.
#
# Layers by how often they change: system and interpreter, PyTorch with CUDA, other dependencies, source.
# What a dependency layer installs is written by `uv export` from uv.lock, and the layer is keyed by that
# text, not by uv.lock: a new dependency leaves the PyTorch layer alone. uv's cache is a mount, so that a
# layer which must be rebuilt downloads only what is new.
#
# Targets: runtime (default), devel (nvcc and headers, for those who build extensions).
# Secrets, all optional: `ca` (CA bundle), `uv` (uv.toml), `pip` (pip.conf), which name another index.

# The wheels that uv.lock pins carry their own CUDA 13 libraries, cuDNN and NCCL; all they want of a base
# is the driver's entry. So: CUDA's `base`, not `cudnn-runtime`, which would bring some GB of libraries a
# second time, and the lowest CUDA 13, because the base's version decides which drivers are refused.
# Any image with apt and Python from 3.11 on will do, e.g. docker.io/library/debian:12-slim.
ARG BASE_IMAGE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04
ARG DEVEL_IMAGE=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04
# 1 adds g++ and Python's headers, which torch.compile needs at run time: 267 MiB on Debian 12, of 5.5 GiB
# (`make bench-images`).
ARG COMPILER=0

# ------------------------------------------------------------------- system and interpreter
FROM ${BASE_IMAGE} AS system
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN --mount=type=cache,id=holdfast-trainer-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-trainer-lists,target=/var/lib/apt/lists,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3 \
    && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 is needed, not {sys.version}")' \
    && useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin holdfast

# ------------------------------------------------------------- builders, none of it is shipped
FROM system AS tools
RUN --mount=type=cache,id=holdfast-trainer-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-trainer-lists,target=/var/lib/apt/lists,sharing=locked \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-pip

FROM tools AS uv-pin
WORKDIR /lock
COPY uv.lock scripts/install.py ./
RUN python3 -c 'import install; print(install.uv_requirement(open("uv.lock").read()))' >uv.txt

FROM tools AS uv
RUN --mount=type=bind,from=uv-pin,source=/lock/uv.txt,target=/lock/uv.txt \
    --mount=type=secret,id=ca --mount=type=secret,id=pip,target=/etc/pip.conf \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3 -m pip install --no-cache-dir --require-hashes --target /opt/uv --requirement /lock/uv.txt

FROM tools AS requirements
WORKDIR /lock
COPY pyproject.toml uv.lock ./
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    export="/opt/uv/bin/uv export --frozen --no-emit-project --no-header --no-annotate --quiet" \
    && $export --only-group torch --output-file torch.txt \
    && $export --only-group build --output-file build.txt \
    && $export --extra trainer --output-file trainer.txt

# ------------------------------------------------------------------------------ dependencies
# Installed where they are shipped: copying 5 GB from a builder costs more than it saves.
FROM system AS dependencies
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PYC_INVALIDATION_MODE=UNCHECKED_HASH
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    --mount=type=bind,from=requirements,source=/lock/torch.txt,target=/lock/torch.txt \
    --mount=type=cache,id=holdfast-uv,target=/root/.cache/uv \
    --mount=type=secret,id=ca --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
    && /opt/uv/bin/uv venv --python /usr/bin/python3 /opt/holdfast \
    && /opt/uv/bin/uv pip install --python /opt/holdfast --require-hashes --requirement /lock/torch.txt
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    --mount=type=bind,from=requirements,source=/lock/trainer.txt,target=/lock/trainer.txt \
    --mount=type=cache,id=holdfast-uv,target=/root/.cache/uv \
    --mount=type=secret,id=ca --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
    && /opt/uv/bin/uv pip install --python /opt/holdfast --require-hashes --requirement /lock/trainer.txt \
    && echo /opt/holdfast-app >"$(echo /opt/holdfast/lib/python3.*/site-packages)/holdfast-app.pth"

# ------------------------------------------------------------------------------------ source
FROM tools AS source
WORKDIR /src
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    --mount=type=bind,from=requirements,source=/lock/build.txt,target=/lock/build.txt \
    --mount=type=cache,id=holdfast-uv,target=/root/.cache/uv \
    --mount=type=secret,id=ca --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
    && /opt/uv/bin/uv venv --python /usr/bin/python3 /opt/build \
    && /opt/uv/bin/uv pip install --link-mode copy --python /opt/build --require-hashes --requirement /lock/build.txt
COPY --link pyproject.toml README.md LICENSE ./
COPY --link trainer ./trainer
COPY --link controller ./controller
ENV PYC_INVALIDATION_MODE=UNCHECKED_HASH
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv pip install --no-cache --python /opt/build --no-deps --no-build-isolation \
        --compile-bytecode --target /opt/holdfast-app . \
    # `holdfast`, the controller's client, needs what this image has not.
    && rm -r /opt/holdfast-app/bin

# What layers of models on a CPU compute between their products (trainer/holdfast_trainer/native.py): the
# compiler is not shipped. It is keyed by these four files.
FROM tools AS kernels
RUN --mount=type=cache,id=holdfast-trainer-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-trainer-lists,target=/var/lib/apt/lists,sharing=locked \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++
WORKDIR /src/holdfast_trainer
COPY --link trainer/holdfast_trainer/__init__.py trainer/holdfast_trainer/cpuinfo.py \
    trainer/holdfast_trainer/layers.cpp trainer/holdfast_trainer/native.py ./
WORKDIR /src
RUN python3 -m holdfast_trainer.native /kernels

# What trains on a CPU takes it by itself (trainer/holdfast_trainer/allocator.py). After the wheels: another
# malloc is no reason to unpack PyTorch again.
FROM dependencies AS malloc
RUN --mount=type=cache,id=holdfast-trainer-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-trainer-lists,target=/var/lib/apt/lists,sharing=locked \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libtcmalloc-minimal4

# ----------------------------------------------------------------------------------- variants
FROM malloc AS compiler-0
FROM malloc AS compiler-1
RUN --mount=type=cache,id=holdfast-trainer-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-trainer-lists,target=/var/lib/apt/lists,sharing=locked \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ python3-dev

FROM ${DEVEL_IMAGE} AS devel-system
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN --mount=type=cache,id=holdfast-trainer-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-trainer-lists,target=/var/lib/apt/lists,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates git libtcmalloc-minimal4 ninja-build python3 python3-dev \
    && useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin holdfast
COPY --link --from=dependencies /opt/holdfast /opt/holdfast
# Packages lie under the Python that installed them; another one would find none, and not say why.
RUN python=$(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])') \
    && if [ ! -e "/opt/holdfast/lib/$python" ]; then \
        echo "DEVEL_IMAGE has $python, and $(ls /opt/holdfast/lib) of BASE_IMAGE has the packages:" \
            "choose two images of one release" >&2; \
        exit 1; \
    fi

FROM devel-system AS devel
ARG VERSION=0.0.0
ARG REVISION=unknown
ENV PATH=/opt/holdfast/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=holdfast \
    NVIDIA_VISIBLE_DEVICES=void \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --link --from=source /opt/holdfast-app /opt/holdfast-app
COPY --link --from=kernels /kernels /opt/holdfast-app/holdfast_trainer/compiled
LABEL org.opencontainers.image.title="Holdfast trainer, with compilers" \
      org.opencontainers.image.description="Builds extensions for the trainer: nvcc, headers, build tools" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["python", "-m", "torch.distributed.run"]
CMD ["--help"]

# hadolint ignore=DL3006
FROM compiler-${COMPILER} AS runtime
ARG VERSION=0.0.0
ARG REVISION=unknown
# HOME: with a read-only root file system only mounts can be written, and /tmp is one wherever PyTorch runs.
# USER: getpass, which names inductor's cache, fails for a user id that no file knows.
# NVIDIA_VISIBLE_DEVICES: CUDA bases say `all`, and a pod that asked for no GPU would see every one of its
# node; the device plugin and `docker run --gpus` set it themselves.
ENV PATH=/opt/holdfast/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=holdfast \
    NVIDIA_VISIBLE_DEVICES=void \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --link --from=source /opt/holdfast-app /opt/holdfast-app
COPY --link --from=kernels /kernels /opt/holdfast-app/holdfast_trainer/compiled
LABEL org.opencontainers.image.title="Holdfast trainer" \
      org.opencontainers.image.description="Trains PyTorch models on interruptible GPUs and loses no work" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /tmp
USER 65532:65532
# 9090: /metrics and /progress of rank 0; 23456: rendezvous under a PyTorchJob.
EXPOSE 9090 23456
# Exec form: torchrun is PID 1 and gets the notice (SIGTERM) itself; a shell would swallow it.
ENTRYPOINT ["python", "-m", "torch.distributed.run"]
CMD ["--help"]
