# The trainer as a first Dockerfile is often written: everything copied, everything installed after it.
# requirements.txt holds the versions that uv.lock pins, so that both images hold the same.
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS runtime
COPY . /app
RUN --mount=type=secret,id=ca,target=/etc/ssl/ca.pem \
    apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip \
    && rm -rf /var/lib/apt/lists/* \
    && cd /app \
    && if [ -s /etc/ssl/ca.pem ]; then export PIP_CERT=/etc/ssl/ca.pem; fi \
    && python3 -m pip install --break-system-packages --no-cache-dir -r requirements.txt \
    && python3 -m pip install --break-system-packages --no-cache-dir --no-deps .
ENTRYPOINT ["python3", "-m", "torch.distributed.run"]
