# Training container: Debian's Python, CUDA from the wheels, the NVIDIA driver from the host (NVIDIA Container Toolkit).
# `make image` builds it with Docker, or with buildah if no Docker daemon is running.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# A compiler and Python's headers: Triton and torch.compile build their launchers at run time.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && apt-get clean && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 adamae \
 && install --directory --owner adamae --mode 1777 /adamae/runs /adamae/cache /data

# This layer depends on the pins only, so that editing the code does not download 4 GB again. Secrets are the build
# host's pip settings and certificates, if any; they are stored in no layer.
COPY pyproject.toml constraints.txt /adamae/
WORKDIR /adamae
RUN --mount=type=secret,id=pip_settings --mount=type=secret,id=certificates \
    if [ -s /run/secrets/pip_settings ]; then export PIP_CONFIG_FILE=/run/secrets/pip_settings; fi \
 && if [ -s /run/secrets/certificates ]; then export PIP_CERT=/run/secrets/certificates; fi \
 && python3 -m venv /opt/venv \
 && python3 -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *sum(map(p["optional-dependencies"].get, ("cuda13", "s3", "gcs", "wandb")), []), sep="\n")' \
  | /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt --requirement /dev/stdin \
# Half a gigabyte that nobody uses here: Triton's profiler and its bitcode for AMD, cuSOLVER on several GPUs.
 && cd /opt/venv/lib/python3*/site-packages \
 && rm -rf triton/backends/nvidia/lib/cupti* triton/backends/amd/lib nvidia/cu*/lib/libcusolverMg.so.*

COPY . /adamae/

# The package is imported by its link: its folder on PYTHONPATH would hide packages of other names (adamae/__init__.py).
# Compiled here, since the image's user may not write there, and each rank would compile it for itself.
RUN ln -s /adamae/adamae "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/adamae" \
 && printf '#!/opt/venv/bin/python\nfrom adamae.__main__ import main\nmain()\n' > /opt/venv/bin/adamae \
 && chmod 755 /opt/venv/bin/adamae \
 && /opt/venv/bin/python -m compileall -q /adamae

# video: NVDEC, without which DALI cannot decode on the GPU.
# USER is for users without a name (getpass); the entry point gives every user a HOME in /adamae/cache.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,video,utility \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    USER=adamae
ENTRYPOINT ["/adamae/launch/entrypoint.sh"]
