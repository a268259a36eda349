# The controller image: API, reconciler, CLI, GPU exporter; no torch, no compiler, no package manager of Python.
#
# Layers by how often they change: system and interpreter, dependencies (keyed by what `uv export` makes of
# uv.lock, not by uv.lock itself), source.
# Secrets, all optional: `ca` (CA bundle), `uv` (uv.toml), `pip` (pip.conf), which name another index.

# Any image with Python from 3.11 on, or with apt to install it.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

# ------------------------------------------------------------------- system and interpreter
FROM ${BASE_IMAGE} AS system
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN --mount=type=cache,id=holdfast-controller-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-controller-lists,target=/var/lib/apt/lists,sharing=locked \
    if ! command -v python3 >/dev/null; then \
        rm -f /etc/apt/apt.conf.d/docker-clean; \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3; \
    fi \
    && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 is needed, not {sys.version}")' \
    && useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin holdfast

# ------------------------------------------------------------- builders, none of it is shipped
FROM system AS tools
RUN --mount=type=cache,id=holdfast-controller-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=holdfast-controller-lists,target=/var/lib/apt/lists,sharing=locked \
    if ! python3 -m pip --version >/dev/null 2>&1; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-pip; \
    fi
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PYC_INVALIDATION_MODE=UNCHECKED_HASH

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
    && $export --only-group build --output-file build.txt \
    && $export --extra controller --extra exporter --output-file controller.txt

# ------------------------------------------------------------------------------ dependencies
# Installed where they are shipped: copied from a builder, they would be laid out anew with each source edit.
FROM system AS dependencies
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PYC_INVALIDATION_MODE=UNCHECKED_HASH
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    --mount=type=bind,from=requirements,source=/lock/controller.txt,target=/lock/controller.txt \
    --mount=type=cache,id=holdfast-uv,target=/root/.cache/uv \
    --mount=type=secret,id=ca --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
    && /opt/uv/bin/uv venv --python "$(command -v python3)" /opt/holdfast \
    && /opt/uv/bin/uv pip install --python /opt/holdfast --require-hashes --requirement /lock/controller.txt \
    # The Kubernetes client's classes for each group of its API, synchronous and not: 54 MB of source. The
    # controller sends plain documents through its ApiClient and imports none of them.
    && rm -r /opt/holdfast/lib/python3.*/site-packages/kubernetes/client/api \
        /opt/holdfast/lib/python3.*/site-packages/kubernetes/aio/client/api \
    # Its thousands of models are loaded when one is wanted, which is never: no bytecode for them.
    && find /opt/holdfast/lib/python3.*/site-packages/kubernetes -path '*/client/*' -name __pycache__ \
        -prune -exec rm -r {} + \
    && echo /opt/holdfast-app >"$(echo /opt/holdfast/lib/python3.*/site-packages)/holdfast-app.pth"

# ------------------------------------------------------------------------------------ source
FROM tools AS source
WORKDIR /src
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    --mount=type=bind,from=requirements,source=/lock/build.txt,target=/lock/build.txt \
    --mount=type=cache,id=holdfast-uv,target=/root/.cache/uv \
    --mount=type=secret,id=ca --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
    && /opt/uv/bin/uv venv --python "$(command -v python3)" /opt/build \
    && /opt/uv/bin/uv pip install --python /opt/build --require-hashes --requirement /lock/build.txt
COPY --link pyproject.toml README.md LICENSE ./
COPY --link trainer ./trainer
COPY --link controller ./controller
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv pip install --no-cache --python /opt/build --no-deps --no-build-isolation \
        --target /opt/holdfast-app . \
    # uv writes the interpreter that built it into `holdfast`; in the image there is another.
    && sed -i '1s|^#!.*|#!/opt/holdfast/bin/python|' /opt/holdfast-app/bin/holdfast

# ----------------------------------------------------------------------------------- runtime
FROM dependencies AS runtime
ARG VERSION=0.0.0
ARG REVISION=unknown
ENV PATH=/opt/holdfast-app/bin:/opt/holdfast/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=holdfast
COPY --link --from=source /opt/holdfast-app /opt/holdfast-app
LABEL org.opencontainers.image.title="Holdfast controller" \
      org.opencontainers.image.description="Submits training jobs and carries them through preemption" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /tmp
USER 65532:65532
EXPOSE 8765
# Exec form: the controller is PID 1 and ends on SIGTERM by itself.
ENTRYPOINT ["python", "-m", "holdfast_controller"]
CMD ["--help"]
